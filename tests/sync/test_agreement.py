"""Before the first message all processes compare what they are about to do; who differs is named on all."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import thinwire
from algorithms.test_conformance import assert_same_state
from catalog import averaged, buckets, random_gradients
from processes import in_each_process
from thinwire import AgreementError, AllReduce, Cast, PowerSGD, Quantize, TopK, hooks
from thinwire.algorithms import Algorithm
from thinwire.comm import InProcessTransport, run_members
from thinwire.kernels import dispatch
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from thinwire.sync import Engine, GradientSync, bucket_plans
from training import are_alike

POWER = PowerSGD(matrix_rank=2)


def new_model(width: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))


def step(model: nn.Module) -> None:
    model(torch.randn(8, 64)).square().mean().backward()


def is_odd() -> bool:
    return dist.get_rank() % 2 == 1


def attached(
    algorithm: Algorithm = POWER, ddp: dict[str, Any] | None = None, **settings: Any
) -> tuple[DistributedDataParallel, GradientSync]:
    model = DistributedDataParallel(new_model(), **(ddp or {}))
    return model, thinwire.attach(model, algorithm, **settings)


def ddp_step(
    algorithm: Algorithm = POWER, ddp: dict[str, Any] | None = None, **settings: Any
) -> DistributedDataParallel:
    model, _ = attached(algorithm, ddp, **settings)
    step(model)
    return model


def hooked_step(state: object, hook: Any, group: dist.ProcessGroup | None = None) -> None:
    model = DistributedDataParallel(new_model(), process_group=group)
    model.register_comm_hook(state, hook)
    step(model)


def another_version() -> None:
    with patch.object(bucket_plans, "__version__", "9.9.9" if is_odd() else thinwire.__version__):
        ddp_step()


def numba_on_one() -> None:
    with patch.object(dispatch, "backends", (dispatch.TORCH,) if is_odd() else dispatch.backends):
        ddp_step()


def more_threads_on_one() -> None:
    with patch("torch.get_num_threads", lambda: 1 + is_odd()):
        ddp_step(PowerSGD(matrix_rank=5))  # Numba has no kernels for it


def eigenvectors_of_another_processor() -> None:
    eigh = torch.linalg.eigh
    flipped = Mock(side_effect=lambda matrix: SimpleNamespace(eigenvectors=-eigh(matrix).eigenvectors))
    uncached = patch.object(dispatch, "_bits_of_some", dispatch._bits_of_some.__wrapped__)
    with uncached, patch("torch.linalg.eigh", flipped if is_odd() else eigh):
        ddp_step(Quantize(bits=4, eigenbasis="*"))


def other_hook_in_a_new_group() -> None:
    group = dist.new_group()  # in which no hook has been used
    hooked_step(group, hooks.bf16_compress_hook if is_odd() else hooks.fp16_compress_hook, group)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "other settings of DDP": (
        lambda: ddp_step(ddp={"find_unused_parameters": is_odd()}),
        "process 0 has find_unused_parameters False, process 1 has find_unused_p",
    ),
    "a scaler on one": (
        lambda: ddp_step(grad_scaler=GradScaler("cpu") if is_odd() else None),
        "process 0 has no grad_scaler, process 1 has grad_scaler set",
    ),
    "another host check of a hook": (
        lambda: hooked_step(hooks.PowerSGDState(None, host_check=is_odd()), hooks.powerSGD_hook),
        "process 0 has host_check False, process 1 has host_check True",
    ),
    "a weight on one": (lambda: ddp_step(weight=(lambda: 1.0) if is_odd() else None), "weight"),
    "a weight that is a number on one": (lambda: ddp_step(weight=1.0 if is_odd() else lambda: 1.0), "weight"),
    "another hook": (
        other_hook_in_a_new_group,
        "has algorithm Cast(dtype='fp16'), process 1 has algorithm Cast(dtype='bf16')",
    ),
    "other settings of post-local": (
        lambda: hooked_step(
            hooks.PostLocalSGDState(None, None, 1 + is_odd(), post_local_gradient_allreduce=False),
            hooks.post_localSGD_hook,
        ),
        "process 0 has start_localSGD_iter 1, process 1 has start_localSGD_iter 2",
    ),
    "another version": (another_version, "process 1 has thinwire 9.9.9"),
    "other eigenvectors": (eigenvectors_of_another_processor, "process 0 has kernels of PyTorch"),
    "more threads on one": (more_threads_on_one, "threads (OMP_NUM_THREADS): 2, products"),
}
if find_spec("numba") is not None:  # else none has it
    words = f"process 0 has kernels of Numba {version('numba')}, process 1 has kernels of PyTorch"
    CASES["Numba on one"] = (numba_on_one, words)


@pytest.mark.parametrize("case", CASES)
@in_each_process(2)
def test_a_difference_is_told_on_all_processes(case: str) -> None:
    make, words = CASES[case]  # the group's timeout would be a CommunicationError
    with pytest.raises(AgreementError, match=re.escape(words)):
        make()


def saved(steps: int) -> dict[str, Any]:
    simulation = Simulation(POWER, buckets(), num_workers=1)
    for seed in range(steps):
        averaged(simulation, seed)
    return simulation.state_dicts()[0]


SPECS = [spec for bucket in buckets() for spec in bucket]
RESHAPED = [SPECS[0]._replace(shape=(32, 64), stride=(64, 1)), *SPECS[1:]]


class Differs(NamedTuple):
    """What process 1 has, unlike processes 0 and 2, and what each does before the first step."""

    words: str
    algorithm: Algorithm = POWER
    model: list[ParameterSpec] = SPECS
    before: Callable[[bool, GradientSync], object] = lambda is_other, sync: None


LONG = "é – " + 999 * "x"
DIFFERENCES = {
    "another setting": Differs(
        "processes 0, 2 have matrix_rank 2, process 1 has matrix_rank 4", PowerSGD(matrix_rank=4)
    ),
    "another algorithm": Differs(
        "processes 0, 2 have algorithm PowerSGD, process 1 has algorithm AllReduce", AllReduce()
    ),
    "other shapes": Differs(
        "processes 0, 2 have parameter head.weight 64×32 float32, strides (32, 1), process 1 has",
        model=RESHAPED,
    ),
    "one parameter more": Differs(
        f"processes 0, 2 have no parameter {LONG}, process 1 has parameter {LONG} 3 float32",
        model=[*SPECS, SPECS[1]._replace(name=LONG, shape=(3,))],
    ),
    "switched to another": Differs(
        "processes 0, 2 have dtype 'fp16', process 1 has dtype 'bf16'",
        before=lambda is_other, sync: sync.use(Cast("bf16" if is_other else "fp16")),
    ),
    "loaded a later state": Differs(
        "process 1 has committed 3 steps; processes 0, 2 have loaded a state with",
        before=lambda is_other, sync: sync.load_state_dict(saved(3 * is_other)),
    ),
    "loaded another state": Differs(  # as if both were of the same step
        "process 1 has loaded a state with checksum ",
        before=lambda is_other, sync: sync.load_state_dict(saved(1 + is_other) | {"step": 1}),
    ),
    "saved on one at the first step": Differs(
        "calls differ: a step on processes 0, 2, state_dict() on process 1. Make the same calls",
        before=lambda is_other, sync: is_other and sync.state_dict(),
    ),
}


@pytest.mark.parametrize("differs", DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_difference_of_engines_is_told_on_all_members(differs: Differs) -> None:
    transports, gradients = InProcessTransport.group(3), random_gradients(buckets(), num_workers=3, seed=0)

    def body(rank: int) -> None:
        is_other = rank == 1
        kind, model = (differs.algorithm, differs.model) if is_other else (POWER, SPECS)
        engine = Engine(kind, transports[rank], model)

        def call() -> None:
            differs.before(is_other, GradientSync(engine))
            engine.average(zip(buckets(), gradients[rank], strict=True))

        with pytest.raises(AgreementError, match=re.escape(differs.words)):
            call()
        assert engine.reporter.counts().messages == 0

    run_members(3, body)


@pytest.mark.parametrize("algorithm", [Quantize(bits=4), TopK(), PowerSGD(matrix_rank=8)], ids=str)
@in_each_process(2)
def test_unlike_kernels_are_no_difference_where_results_do_not_depend_on_them(algorithm: Algorithm) -> None:
    """Numba on one process only: few bits are decoded to the same bits, and it has no code for rank 8."""
    model, sync = attached(algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with patch.object(dispatch, "backends", (dispatch.TORCH,) if is_odd() else dispatch.backends):
        for _ in range(4):
            optimizer.zero_grad()
            step(model)
            optimizer.step()
    assert are_alike(model.parameters())
    assert sync.stats().compression_ratio > 1.9


def test_memory_is_as_it_was_and_agreeing_members_go_on() -> None:
    simulation = Simulation(POWER, buckets(), num_workers=2)
    averaged(simulation, 0)
    before = simulation.state_dicts()[0]
    for rank, sync in enumerate(simulation.syncs):
        sync.use(PowerSGD(matrix_rank=3 + rank))
    with pytest.raises(AgreementError):
        averaged(simulation, 1)
    for sync in simulation.syncs:
        sync.use(POWER)
    assert_same_state(simulation.state_dicts()[0], before)
    averaged(simulation, 1)
    assert simulation.syncs[0].stats().steps == 2


@in_each_process(2)
def test_unlike_buckets_are_refused_before_any_message() -> None:
    """Though the first ones are alike: all that are new are compared before one is sent."""
    cap = 0.005 if is_odd() else 0.0001
    model, sync = attached(ddp={"bucket_cap_mb": cap, "find_unused_parameters": True})
    words = "bucket 1 with 2.weight, process 1 has bucket 1 with 0.bias, 2.weight"
    with pytest.raises(AgreementError, match=words) as refused:
        step(model)
    assert "bucket 0" not in str(refused.value)
    assert sync.stats().messages == 0
