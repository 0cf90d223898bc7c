"""Machines of several processes, in this process: together they do what one for each machine would do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from unittest.mock import Mock

import pytest
import torch

from algorithms.test_conformance import assert_same_state, first_steps, over, warmup_steps
from catalog import ENTRIES, Entry, Sums, averaged, buckets, random_gradients, resumed, spec, whole_residual
from thinwire import AllReduce, Cast, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.comm import InProcessTransport
from thinwire.errors import CommunicationError, StepError
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation

Buckets = Sequence[tuple[ParameterSpec, ...]]

every_entry = over(ENTRIES)
KINDS = {type(entry.algorithm): entry for entry in ENTRIES if entry.feedback}  # each kind's last
one_of_each_kind = over([ENTRIES[3], *KINDS.values()])
LAYERS = [(spec(f"{n}.weight", 96, 64), spec(f"{n}.bias", 96)) for n in range(6)]
TOGETHER = [tuple(parameter for bucket in LAYERS for parameter in bucket)]


def machines(algorithm: Algorithm, model: Buckets, num: int = 2, processes: int = 2) -> Simulation:
    return Simulation(algorithm, model, num_workers=num * processes, workers_per_machine=processes)


def means_of_machines(gradients: list[list[torch.Tensor]], processes: int = 2) -> list[list[torch.Tensor]]:
    """The gradients of one process for each machine."""
    by_machine = [gradients[first : first + processes] for first in range(0, len(gradients), processes)]
    return [[torch.stack(flats).mean(0) for flats in zip(*machine, strict=True)] for machine in by_machine]


@every_entry
def test_results_and_state_are_those_of_a_process_for_each_machine(entry: Entry) -> None:
    """What depends on which parts of parameters share a bucket is compared in the first step only."""
    several, alone = (
        machines(entry.algorithm, buckets(torch.float64)),
        Simulation(entry.algorithm, buckets(torch.float64), num_workers=2),
    )
    is_cut_alike = entry.same_in_any_buckets or entry.algorithm.split_granularity == "bucket"
    for step in range(first_steps(entry).stop + 1 if is_cut_alike else 1):
        gradients = random_gradients(several.buckets, num_workers=4, seed=step)
        expected = means_of_machines(gradients)
        assert several.step(gradients)
        assert alone.step(expected)
        for others in gradients[1:]:
            assert all(map(torch.equal, gradients[0], others))
        for mine, theirs in zip(gradients[0], expected[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    states = several.state_dicts()
    for state in states[1:]:
        assert_same_state(state, states[0])
    if is_cut_alike:
        (ours, *_), (of_one, *_) = states, alone.state_dicts()
        assert ours["slots"] == of_one["slots"]
        for slot, _ in ours["slots"]:
            for (label, tensor), (same_label, same) in zip(ours[slot], of_one[slot], strict=True):
                assert label == same_label
                torch.testing.assert_close(tensor, same, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("entry", "num", "processes"),
    [(entry, *size) for entry, size in zip(ENTRIES, cycle([(2, 4), (4, 2)]))],
    ids=str,
)
def test_a_machine_sends_what_one_process_would(entry: Entry, num: int, processes: int) -> None:
    several = machines(entry.algorithm, TOGETHER, num, processes)
    alone = Simulation(entry.algorithm, TOGETHER, num_workers=num)
    for step in first_steps(entry):
        before = several.syncs[-1].stats()
        gradients = random_gradients(TOGETHER, num_workers=num * processes, seed=step)
        assert several.step(gradients)
        assert alone.step(means_of_machines(gradients, processes))
    stats, of_one = several.syncs[-1].stats(), alone.syncs[-1].stats()
    assert of_one.message_bytes <= stats.message_bytes <= 1.1 * of_one.message_bytes
    if entry.compresses:
        assert stats.message_bytes < stats.gradient_bytes
    assert stats.gradient_bytes == of_one.gradient_bytes
    assert {sync.stats().message_bytes for sync in several.syncs} == {stats.message_bytes}
    if not warmup_steps(entry.algorithm) and not getattr(entry.algorithm, "alternating", False):
        assert stats.message_bytes - before.message_bytes == several.syncs[0].plan.message_bytes
    # A scatter and a gather, each of all bytes but those of each process's own part.
    inside = [sync.stats().inside_bytes for sync in several.syncs[:processes]]
    assert sum(inside) == 2 * (processes - 1) * stats.gradient_bytes


@one_of_each_kind
def test_results_plus_residual_are_the_sum_of_true_means_over_every_change(entry: Entry) -> None:
    """Also behind steps that overflow, another algorithm, other buckets, and a state that is loaded."""
    layers = LAYERS[:2]
    together = [tuple(parameter for bucket in layers for parameter in bucket)]
    sim, sums = machines(entry.algorithm, layers), Sums()
    for step in range(3):
        averaged(sim, step, sums)
    overflow = random_gradients(sim.buckets, num_workers=4, seed=99)
    overflow[3][0][5] = torch.inf
    assert not sim.step(overflow)
    assert all(flat.isnan().all() for worker in overflow for flat in worker)
    averaged(sim, 3, sums)
    for other in (Quantize(bits=2, error_feedback=True), BatchedPowerSGD(), entry.algorithm):
        for sync in sim.syncs:
            sync.use(other)
        averaged(sim, 4, sums)
    sim.buckets = together
    for step in range(5, 7):
        averaged(sim, step, sums)
    state = sim.state_dicts()[0]
    for num, processes in ((2, 1), (1, 3), (2, 2)):
        sim = resumed(machines(entry.algorithm, together, num, processes), state)
        assert torch.equal(whole_residual(sim.state_dicts()[0], together), whole_residual(state, together))
    for step in range(7, 9):
        averaged(sim, step, sums)
    assert sums.lost(sim).norm() <= max(entry.tolerance, 1e-5)


@one_of_each_kind
def test_a_resumed_run_goes_on_to_the_same_bits(entry: Entry) -> None:
    first = machines(entry.algorithm, buckets())
    for step in range(3):
        averaged(first, step)
    second = resumed(machines(entry.algorithm, buckets()), first.state_dicts()[0])
    for step in range(3, 5):
        assert all(map(torch.equal, averaged(first, step), averaged(second, step)))


@pytest.mark.parametrize(
    "algorithm",
    [PowerSGD(matrix_rank=2), BatchedPowerSGD(), Quantize(bits=2, error_feedback=True), TopK()],
    ids=str,
)
def test_each_process_remembers_its_part(algorithm: Algorithm) -> None:
    several, alone = machines(algorithm, LAYERS, 2, 4), Simulation(algorithm, LAYERS, num_workers=2)
    gradients = random_gradients(LAYERS, num_workers=8, seed=0)
    assert alone.step(means_of_machines(gradients, 4))
    assert several.step(gradients)
    whole = alone.engines[0].state.memory_bytes()
    parts = [engine.state.memory_bytes() for engine in several.engines[:4]]
    assert whole <= sum(parts) <= 1.05 * whole
    assert max(parts) <= 1.5 * whole / 4 + 64  # six layers for four processes


@pytest.mark.parametrize("algorithm", [PowerSGD(matrix_rank=2), BatchedPowerSGD(matrix_rank=2)], ids=str)
def test_a_plan_that_one_process_asks_for_changes_nothing(algorithm: Algorithm) -> None:
    asked, expected = machines(algorithm, LAYERS), machines(algorithm, LAYERS)
    for step in range(2):
        assert asked.syncs[1].plan.compression_ratio > 1
        assert "process" in str(asked.syncs[1])
        assert all(map(torch.equal, averaged(asked, step), averaged(expected, step)))


def test_a_state_has_what_only_one_process_of_a_machine_remembers() -> None:
    """As all do of a single matrix, and in a sharded model those whose shard of it is not empty."""
    algorithm = Quantize(bits=4, eigenbasis="0.*")
    algorithm.check_model([spec("0.weight", 0, 64)])
    sim = machines(algorithm, LAYERS)
    assert sim.step(random_gradients(LAYERS, num_workers=4, seed=0))
    first, *others = sim.state_dicts()
    assert [name for name, _ in first["eigenvectors"]] == ["0.weight"]
    for state in others:
        assert_same_state(state, first)
        assert state["slots"] == first["slots"]


@pytest.mark.parametrize("algorithm", [AllReduce(), Cast("bf16")], ids=str)
def test_one_overflow_reaches_all_processes(algorithm: Algorithm) -> None:
    sim = machines(algorithm, LAYERS)
    gradients = random_gradients(LAYERS, num_workers=4, seed=0)
    gradients[1][2][7] = torch.nan
    # Without memory there is nothing to take back, so nobody is asked, as with a process for each machine.
    assert sim.step(gradients)
    for worker in gradients:
        assert worker[2].isnan().any()
        torch.testing.assert_close(worker, gradients[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("host_check", [True, False])
def test_a_gather_that_fails_behind_the_commit_leaves_a_state_that_is_refused(host_check: bool) -> None:
    """Memory has written the step then, and the gradients have not come: until a checkpoint is loaded."""
    algorithm = PowerSGD(matrix_rank=2)
    sim = Simulation(algorithm, LAYERS, num_workers=4, workers_per_machine=2, host_check=host_check)
    assert sim.step(random_gradients(LAYERS, num_workers=4, seed=0))
    assert sim.syncs[0].plan.compression_ratio > 1
    saved = sim.state_dicts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessTransport, "gather_parts", Mock(side_effect=CommunicationError("gone")))
        with pytest.raises(CommunicationError, match="gone"):
            sim.step(random_gradients(LAYERS, num_workers=4, seed=1))
    engine, sync = sim.engines[0], sim.syncs[0]
    for call in (sync.state_dict, sync.local_state_dict, engine.begin):
        with pytest.raises(StepError, match=r"after step 1 had written the residual.*load_state_dict\(\)"):
            call()
    for sync, state in zip(sim.syncs, saved, strict=True):
        sync.load_state_dict(state)
    assert sim.step(random_gradients(LAYERS, num_workers=4, seed=1))
    assert sim.syncs[0].stats().steps == 2
