"""The fault schedule that users test their own scripts with."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from algorithms.test_conformance import assert_same_state
from catalog import buckets, random_gradients
from processes import in_each_process
from test_lost_peers import by_hook, by_optimizer_step
from thinwire import ConfigError, PowerSGD
from thinwire.simulation import Simulation
from thinwire.testing import InjectedError, fail_at, faults

POWER = PowerSGD(matrix_rank=2)


@pytest.mark.parametrize(("worker", "after_messages"), [(0, 0), (2, 1), (0, 2)])
def test_non_finite_is_one_skipped_step_and_nothing_else(worker: int, after_messages: int) -> None:
    disturbed, healthy = (Simulation(POWER, buckets(), num_workers=3) for _ in range(2))
    schedule = [fail_at(worker, 3, "non-finite", after_messages=after_messages)]
    wire = disturbed.engines[worker].wire
    with faults(disturbed.syncs[worker], schedule) as struck:
        committed = [
            disturbed.step(random_gradients(buckets(), num_workers=3, seed=seed))
            for seed in (0, 1, 2, 9, 3, 4)
        ]
    assert struck == schedule
    assert disturbed.engines[worker].wire is wire
    assert committed == [True, True, True, False, True, True]
    for seed in range(5):
        healthy.step(random_gradients(buckets(), num_workers=3, seed=seed))
    mine, theirs = disturbed.state_dicts()[worker], healthy.state_dicts()[worker]
    assert (mine["skipped_steps"], theirs["skipped_steps"]) == (1, 0)
    assert_same_state(mine | {"skipped_steps": 0}, theirs)


def test_a_fault_of_another_process_step_or_incarnation_does_not_strike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(POWER, buckets(), num_workers=2)
    schedule = [fail_at(1, 0, "raise"), fail_at(0, 1, "raise"), fail_at(0, 0, "raise", restart=1)]
    with faults(simulation.syncs[0], schedule) as struck:
        simulation.step(random_gradients(buckets(), num_workers=2, seed=0))
        assert struck == []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    simulation = Simulation(POWER, buckets(), num_workers=2)
    gradients = random_gradients(buckets(), num_workers=2, seed=0)
    with (
        faults(simulation.syncs[0], schedule) as struck,
        pytest.raises(InjectedError, match="process 0 raises in step 0"),
    ):
        simulation.step(gradients)
    assert struck == [schedule[2]]


@pytest.mark.parametrize("adapter", [by_hook, by_optimizer_step], ids=lambda adapter: adapter.__name__)
@in_each_process(2)
def test_faults_that_need_no_restart_on_real_processes(adapter: Any) -> None:
    slow, stalled = fail_at(0, 1, "slow", seconds=0.05), fail_at(1, 2, "stall", seconds=0.05)
    overflowing = fail_at(1, 3, "non-finite")
    sync, step_with = adapter(POWER)
    with faults(sync, [slow, stalled, overflowing]) as struck:
        for step in range(6):
            step_with(step)
    assert struck == [[slow], [stalled, overflowing]][dist.get_rank()]
    assert (sync.stats().steps, sync.stats().nonfinite_steps) == (6, 1)
    assert sync.stats().compression_ratio > 4


BAD: dict[str, tuple[Any, str]] = {
    "process": (lambda: fail_at(-1, 0, "kill"), "process.*-1"),
    "step": (lambda: fail_at(0, 1.5, "kill"), "step.*1.5"),  # type: ignore[arg-type]
    "kind": (lambda: fail_at(0, 0, "explode"), "kind must be one of non-finite, kill, stall.*'explode'"),  # type: ignore[arg-type]
    "slow without seconds": (lambda: fail_at(0, 0, "slow"), "'slow' needs seconds.*got None"),
    "kill with seconds": (lambda: fail_at(0, 0, "kill", seconds=1), "got 1 for 'kill'"),
    "nobody": (lambda: open_with([fail_at(1, 0, "raise")]), "process must be below 1, .*got 1"),
    "no fault": (lambda: open_with(["kill"]), "fail_at.*'kill'"),
    "a killed simulation": (lambda: open_with([fail_at(0, 0, "kill")]), "share one process: 'kill'"),
    "a stalled simulation": (lambda: open_with([fail_at(0, 0, "stall")]), "share one process: 'stall'"),
}


def open_with(schedule: list[Any]) -> None:
    with faults(Simulation(POWER, buckets(), num_workers=1).syncs[0], schedule):
        pass


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_mistakes_are_refused_at_once(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
