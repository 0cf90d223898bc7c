"""Whole steps: all or nothing, and what they leave alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from cProfile import Profile
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from catalog import ENTRIES, Entry, buckets, random_gradients, spec, specs_of
from thinwire import AllReduce, PowerSGD, Quantize
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import CombinedWork, InProcessTransport, Message, Work, run_members
from thinwire.errors import CommunicationError, StepError
from thinwire.simulation import Simulation
from thinwire.sync import GradientSync, bucket_plans
from thinwire.sync.engine import Engine
from thinwire.sync.settings import Settings

POWER = PowerSGD(matrix_rank=2)
ITERATED = replace(POWER, power_iterations=3, min_compression_ratio=1)
SPECS = specs_of(buckets())
ALTERNATING = replace(POWER, power_iterations=2, alternating=True)


class Noting(InProcessTransport):
    """Averages among one, and notes what is sent and when it is waited for."""

    def __init__(self, room: Any, rank: int) -> None:
        super().__init__(room, rank)
        self.events: list[str] = []
        self.look: Callable[[], object] = lambda: None  # is called when a mean is sent
        self.fail_at = -1
        self.sent = 0

    def start(self, message: Message) -> Work:
        if message.operation != "mean":
            return super().start(message)
        self.look()
        number, self.sent = self.sent, self.sent + 1
        self.events.append(f"send {number}")
        return CombinedWork(partial(self._await, number))

    def _await(self, number: int) -> None:
        if number == self.fail_at:
            raise CommunicationError("the peer has gone")
        self.events.append(f"wait {number}")


def noting(look: Callable[[], object] = lambda: None) -> Noting:
    (transport,) = Noting.group(1)
    assert isinstance(transport, Noting)
    transport.look = look
    return transport


def step(engine: Engine, seed: int = 0) -> list[torch.Tensor]:
    gradients = random_gradients(buckets(), num_workers=1, seed=seed)[0]
    assert engine.average(zip(buckets(), gradients, strict=True))
    return gradients


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_failed_collective_leaves_memory_as_it_was(fail_at: int) -> None:
    transport = noting()
    healthy, failing = (Engine(PowerSGD(matrix_rank=2), one, SPECS) for one in (noting(), transport))
    for engine in (healthy, failing):
        step(engine)
    transport.fail_at = transport.sent + fail_at
    with pytest.raises(CommunicationError, match="the peer has gone"):
        step(failing, seed=1)
    assert failing.reporter.stats().steps == 1
    for expected, got in zip(step(healthy, seed=2), step(failing, seed=2), strict=True):
        assert torch.equal(expected, got)


def test_the_wait_for_other_shards_is_no_arithmetic() -> None:
    shards = Mock(size=2, data_device=torch.device("cpu"))
    shards.all_reduce.return_value.wait = lambda: time.sleep(0.2)
    engine = Engine(POWER, noting(), SPECS, Settings(health_group=shards))
    step(engine)
    assert engine.reporter.stats().waiting_seconds >= 0.2


def test_a_bucket_in_flight_is_not_started_in_another_step() -> None:
    engine = Engine(PowerSGD(matrix_rank=2), noting(), SPECS)
    flat = random_gradients(buckets(), num_workers=1, seed=0)[0][0]
    bucket, first, second = engine.open(buckets()[0], flat.device), engine.begin(), engine.begin()
    first.start(bucket, flat.clone())
    with pytest.raises(StepError, match="in flight in an earlier step"):
        second.start(bucket, flat.clone())
    second.abandon()
    assert first.finish()
    step(engine)
    assert engine.reporter.stats().steps == 2


@pytest.mark.parametrize("fails", [False, True])
def test_what_an_abandoned_step_has_sent_is_waited_for_before_the_next(fails: bool) -> None:
    """The message may be the gradients themselves, to which the backend still writes. It may have failed."""
    transport = noting()
    engine = Engine(AllReduce(), transport, SPECS)
    step(engine)
    transport.events.clear()
    transport.fail_at = transport.sent if fails else -1
    flats = random_gradients(buckets(), num_workers=1, seed=0)[0]
    engine.begin().start(engine.open(buckets()[0], flats[0].device), flats[0])
    engine.abandon()
    assert [event.split()[0] for event in transport.events] == ["send"]
    step(engine)
    assert [event.split()[0] for event in transport.events][1] == ("send" if fails else "wait")
    assert engine.reporter.stats().steps == 2


def test_which_parameters_were_used_is_waited_for_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after a step whose first round has failed."""
    transport, flags = noting(), Mock()
    engine = Engine(PowerSGD(matrix_rank=2), transport, SPECS)
    monkeypatch.setattr(engine, "send_used", lambda used: (flags, used))
    failing, (flat, *_) = engine.begin(), random_gradients(buckets(), num_workers=1, seed=0)[0]
    failing.start(engine.open(buckets()[0], flat.device), flat)
    transport.fail_at = 0
    with pytest.raises(CommunicationError, match="the peer has gone"):
        failing.finish(torch.ones(len(buckets()[0])) > 0)
    assert not flags.wait.called
    engine.begin()
    assert flags.wait.called


def test_a_step_is_not_captured_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(PowerSGD(matrix_rank=2), noting(), SPECS)
    bucket = engine.open(buckets()[0], torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        flat = torch.zeros(sum(spec.numel for spec in buckets()[0]), device="cuda")
    with pytest.raises(StepError, match="CUDA graph capture"):
        engine.begin().start(bucket, flat)
    step(engine)
    assert engine.reporter.stats().steps == 1


def test_an_interrupted_backward_pass_is_told_at_the_next() -> None:
    engine = Engine(PowerSGD(matrix_rank=2), noting(), SPECS)
    with pytest.raises(StepError, match="without start"):
        engine.begin().finish()
    step(engine)
    flat = random_gradients(buckets(), num_workers=1, seed=0)[0][0]
    bucket = engine.open(buckets()[0], flat.device)
    interrupted = engine.begin()
    interrupted.start(bucket, flat)
    sync = GradientSync(engine)
    for action in (lambda: sync.use(AllReduce()), sync.state_dict, lambda: sync.load_state_dict({})):
        with pytest.raises(StepError, match="between steps"):
            action()
    with pytest.raises(StepError, match="did not finish"):
        interrupted.start(bucket, flat)
    for call in (interrupted.advance, interrupted.finish, lambda: interrupted.start(bucket, flat)):
        with pytest.raises(StepError, match="this step has ended; begin a new one"):
            call()
    step(engine)
    assert engine.reporter.stats().steps == 2


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_autocast_and_autograd_do_not_reach_the_arithmetic(entry: Entry) -> None:
    plain, under = (Engine(entry.algorithm, noting(), SPECS) for _ in range(2))
    for seed in range(5 if getattr(entry.algorithm, "warmup_steps", 0) else 3):
        expected = step(plain, seed)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            got = step(under, seed)
        assert all(map(torch.equal, expected, got))
        assert not any(mean.requires_grad for mean in got)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has one level only")
def test_the_users_precision_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.backends.fp32_precision = "tf32"` is a wider setting: products follow it, and go on to."""
    settings: Any = torch.backends
    products = [settings.cuda.matmul, settings.mkldnn.matmul]
    inside: list[str] = []
    transport = noting(lambda: inside.extend(each.fp32_precision for each in products))
    monkeypatch.setattr(settings, "fp32_precision", "tf32")
    step(Engine(PowerSGD(matrix_rank=2), transport, SPECS))
    assert [each.fp32_precision for each in products] == ["tf32"] * 2
    settings.fp32_precision = "ieee"
    assert [each.fp32_precision for each in products] == ["ieee"] * 2
    assert inside == ["ieee"] * 6


@pytest.mark.parametrize("algorithm", [POWER, ITERATED, ALTERNATING, BatchedPowerSGD()], ids=str)
@pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
def test_relative_error_is_residual_over_what_was_to_send(algorithm: Algorithm, scale: float | None) -> None:
    """Under any scaling and number of iterations; and saving, which averages the residual, keeps it."""
    loss_scale = None if scale is None else (lambda device: torch.tensor(scale))
    layout = [(spec("weight", 49, 25),)]  # a square number of elements
    simulation = Simulation(algorithm, layout, num_workers=2, loss_scale=loss_scale)
    memories = [engine.state.memory[ERROR] for engine in simulation.engines]
    for seed in range(3):
        residuals = [memory.get("weight", torch.zeros(49 * 25)).clone() for memory in memories]
        gradients = random_gradients(layout, num_workers=2, seed=seed)
        assert simulation.step([[flat * (scale or 1.0)] for (flat,) in gradients])
    found = [sync.stats() for sync in simulation.syncs]
    for stats, memory, before, (flat,) in zip(found, memories, residuals, gradients, strict=True):
        residual_norm = memory["weight"].norm().item()
        assert 0.1 < stats.relative_error["weight"] < 1
        expected = residual_norm, residual_norm / (flat + before).norm().item()
        got = stats.error_norm["weight"], stats.relative_error["weight"]
        assert got == pytest.approx(expected, rel=1e-4)
    simulation.state_dicts()
    assert [sync.stats().relative_error for sync in simulation.syncs] == [s.relative_error for s in found]


def test_the_seed_and_without_a_warm_start_the_step_decide_the_first_factors() -> None:
    engines = [Engine(PowerSGD(matrix_rank=2, seed=seed), noting(), SPECS) for seed in (0, 0, 1)]
    first, again, other = (torch.cat(step(engine)) for engine in engines)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # The same ones in every step would never see what lies across them.
    engine = Engine(PowerSGD(matrix_rank=1, warm_start=False, error_feedback=False), noting(), SPECS)
    first, other = (torch.cat(step(engine)) for _ in range(2))
    assert (first - other).norm() > 0.05 * first.norm()


def test_a_higher_matrix_rank_begins_with_the_factors_that_are_there() -> None:
    """Of a gradient with two large directions, which the first steps find, none is lost."""
    gradient = torch.diag(torch.tensor([5.0, 5.0, *[1.0] * 30])).flatten()
    found, gaps = PowerSGD(matrix_rank=2, error_feedback=False), list[float]()
    simulation = Simulation(found, [(spec("weight", 32, 32),)], num_workers=1)
    for step in range(9):
        if step == 8:
            simulation.syncs[0].use(replace(found, matrix_rank=3))
        mean = gradient.clone()
        assert simulation.step([[mean]])
        gaps.append(float((mean - gradient).norm()))
    assert gaps[-1] < gaps[-2] < gaps[0]
    assert simulation.syncs[0].stats().compression_ratio > 5


def test_parameters_that_nobody_used_are_found_right_after_a_resume() -> None:
    """The first bucket has no residual, so that there is one shows only with the second."""
    layout = [(spec("bias", 30),), (spec("weight", 30, 20), spec("unused", 30, 20))]
    flats = random_gradients(layout, num_workers=1, seed=0)[0]
    saved: dict[str, Any] = {}
    for _ in range(2):
        engine = Engine(PowerSGD(matrix_rank=1), noting(), specs_of(layout), Settings(may_be_unused=True))
        if saved:
            GradientSync(engine).load_state_dict(saved)
            flats[1][600:] = 0
        used, step = flats[1][600:].any(), engine.begin()
        assert step.finds_unused
        for specs, gradients in zip(layout, flats, strict=True):
            step.start(engine.buckets.bucket(specs), gradients)
        assert step.finish(torch.tensor([True, True, used]))
        saved, before = engine.state_dict(), saved
    assert (flats[1][600:] == 0).all()
    assert dict(saved["error"])["unused"].norm() > 0
    torch.testing.assert_close(dict(saved["error"])["unused"], dict(before["error"])["unused"])
    assert not torch.equal(dict(saved["error"])["weight"], dict(before["error"])["weight"])


def test_buckets_of_models_that_use_other_parameters_in_each_step_are_closed_again() -> None:
    """As with experts, or layers that are dropped. The residual is the parameters', and stays."""
    specs = [spec(f"{number}.weight", 32, 16) for number in range(12)]
    engine, subsets = Engine(PowerSGD(matrix_rank=1), noting(), specs), [*combinations(specs, 2)]
    assert len(subsets) > 2 * bucket_plans.MAX_IDLE_BUCKETS
    missing = {parameter.name: torch.zeros(parameter.numel) for parameter in specs}
    first = engine.open(subsets[0], torch.device("cpu"))
    for seed, subset in enumerate([*subsets, subsets[0]]):
        ((flat,),) = random_gradients([subset], num_workers=1, seed=seed)
        sent = flat.clone()
        assert engine.average([(subset, flat)])
        for parameter, given, mean in zip(subset, sent.view(2, 512), flat.view(2, 512), strict=True):
            missing[parameter.name] += given - mean
    open_buckets = engine.buckets.open_buckets()
    # And that of the last step.
    assert sum(subset in open_buckets for subset in subsets) == bucket_plans.MAX_IDLE_BUCKETS + 1
    assert open_buckets[subsets[0]] is not first
    assert not first.is_current
    for name, owed in engine.state.memory[ERROR].items():
        torch.testing.assert_close(owed, missing[name], rtol=1e-4, atol=1e-4)
    assert engine.reporter.plan.compression_ratio > 5


@pytest.mark.parametrize("algorithm", [Quantize(bits=4), PowerSGD(matrix_rank=1)], ids=str)
def test_steps_and_loads_cost_in_proportion_to_the_buckets(algorithm: Algorithm) -> None:
    def calls(count: int, members: list[InProcessTransport], rank: int) -> int:
        specs, profile = [spec(f"{number}.weight", 16, 16) for number in range(count)], Profile()
        engine = Engine(algorithm, members[rank], specs)
        step = partial(engine.average, [((one,), torch.ones(256)) for one in specs])
        step()  # opens them
        for call in (step, partial(engine.check_state_dict, engine.state_dict())):
            call() if rank else profile.runcall(call)
        return sum(entry.callcount for entry in profile.getstats())

    few, many = (run_members(2, partial(calls, n, InProcessTransport.group(2)))[0] for n in (100, 200))
    assert many < 2.2 * few
