"""`host_check=False`: the device decides whether a step is committed, and the host waits for nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import thinwire
from catalog import ENTRIES, Entry, Sums, averaged, buckets, random_gradients
from sync.test_nonfinite import run
from thinwire import AllReduce, Cast, PowerSGD
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import InProcessTransport
from thinwire.kernels import dispatch
from thinwire.simulation import Simulation
from thinwire.sync import Engine, Settings
from thinwire.sync.settings import HostCheck
from thinwire.tensors import accelerators

NUM_STEPS = 4
LOW_RANK = [PowerSGD(matrix_rank=2), PowerSGD(matrix_rank=2, alternating=True), BatchedPowerSGD()]


def turns(entry: Entry) -> bool:
    """Whether what it does in a step depends on the step's number: a bad step counts if nobody looks."""
    algorithm: Any = entry.algorithm
    turning = any(
        getattr(algorithm, name, False) for name in ("alternating", "period", "warmup_steps", "eigenbasis")
    )
    return turning or not getattr(algorithm, "warm_start", True)


# Those that do not turn give the same good steps with bad ones between them. On accelerators the last bits of
# the batched one's products depend on where in memory a factor lies.
@pytest.mark.parametrize(
    ("entry", "bad_steps", "is_accelerator"),
    [
        *((entry, {0, 2}, False) for entry in ENTRIES),
        *((entry, {0, 2}, True) for entry in ENTRIES if not isinstance(entry.algorithm, BatchedPowerSGD)),
        *((entry, set(), False) for entry in ENTRIES if turns(entry)),
    ],
    ids=str,
)
def test_steps_that_are_not_finite_leave_no_trace(
    entry: Entry, bad_steps: set[int], is_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_accelerator:
        monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
        monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    seen, expected = run(entry.algorithm, bad_steps, steps=NUM_STEPS, host_check=True)
    unseen, got = run(entry.algorithm, bad_steps, steps=NUM_STEPS, host_check=False)
    assert unseen.syncs[0].stats().nonfinite_steps == seen.syncs[0].stats().nonfinite_steps
    assert unseen.syncs[0].steps == NUM_STEPS
    for step, (a, b) in enumerate(zip(got, expected, strict=True)):
        if step in bad_steps and seen.syncs[0].stats().nonfinite_steps:
            assert a.isnan().all()
        elif not bad_steps or not turns(entry):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        elif step not in bad_steps:
            assert a.isfinite().all()


@pytest.mark.parametrize("algorithm", LOW_RANK, ids=str)
def test_nothing_is_lost(algorithm: Algorithm) -> None:
    """Whatever turn it was: results plus final mean error are the sum of the true means of the good steps."""
    simulation, sums = Simulation(algorithm, buckets(), num_workers=2, host_check=False), Sums()
    for step in range(NUM_STEPS):
        if step in (1, 2):
            gradients = random_gradients(buckets(), num_workers=2, seed=step)
            gradients[step // 2][1][7] = torch.nan
            simulation.step(gradients)
        else:
            averaged(simulation, step, sums)
    assert sums.lost(simulation).norm() < 1e-6
    assert simulation.syncs[0].stats().compression_ratio > 5


@pytest.mark.parametrize("bad_step", [False, True])
@pytest.mark.parametrize(
    "after", [AllReduce(), Cast("fp16"), PowerSGD(matrix_rank=2, error_feedback=False)], ids=str
)
def test_what_is_paid_back_is_forgotten_or_still_owed(after: Algorithm, bad_step: bool) -> None:
    """Switching pays the debt in one step, or, if that was not finite, in the next."""
    simulation = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=2, host_check=False)
    for step in range(6):
        gradients = random_gradients(buckets(), num_workers=2, seed=step)
        if bad_step and step == 3:
            gradients[1][0][5] = torch.nan
            gradients[1][1][5] = torch.nan
        if step == 3:
            assert simulation.engines[0].state.memory[ERROR]
            for sync in simulation.syncs:
                sync.use(after)
        before = simulation.syncs[0].stats().message_bytes
        simulation.step(gradients)
        sent_bytes = simulation.syncs[0].stats().message_bytes - before
        if step >= 3:
            assert bool(simulation.engines[0].state.memory[ERROR]) == (bad_step and step == 3)
            assert gradients[0][0].isnan().all() == (bad_step and step == 3)
    assert simulation.syncs[0].stats().nonfinite_steps == bad_step
    if isinstance(after, PowerSGD):
        assert sent_bytes < sum(4 * spec.numel for specs in buckets() for spec in specs) / 5


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("algorithm", "scaled"), [*zip(LOW_RANK, [True, False, True], strict=True)], ids=str)
def test_the_host_reads_nothing(algorithm: Algorithm, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values: whatever asks for one fails, as it would wait for an accelerator."""
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)  # the CPU may be asked
    specs = buckets()[0]
    dispatch.name_of_results("products", torch.device("cpu"))  # read once a process, of tensors with values

    def train(*, host_check: HostCheck) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            scale = torch.tensor([8.0])
            loss_scale = (lambda device: scale) if scaled else None
            (transport,) = InProcessTransport.group(1)
            engine = Engine(algorithm, transport, specs, Settings(loss_scale, host_check=host_check))
            for _ in range(3):
                engine.average([(specs, torch.randn(sum(spec.numel for spec in specs)))])
            assert engine.state.memory[ERROR]

    train(host_check=False)
    train(host_check="auto")
    with pytest.raises(DataDependentOutputException):
        train(host_check=True)
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: device.type != "cpu")
    with pytest.raises(DataDependentOutputException):
        train(host_check="auto")  # on the CPU it looks


@pytest.mark.parametrize("given", ["never", None, [True]])
def test_what_is_no_choice(given: object) -> None:
    words = f'^host_check must be "auto", True or False, got {re.escape(repr(given))}$'
    with pytest.raises(thinwire.ConfigError, match=words):
        Settings.of(host_check=given)  # type: ignore[arg-type]
    with pytest.raises(thinwire.ConfigError, match="host_check=False can't be combined with find_unused"):
        Settings(may_be_unused=True, host_check=False)
