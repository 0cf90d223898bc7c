"""What each process saves for itself: nothing of it is lost, however the work is divided afterwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.test_conformance import assert_same_state
from catalog import Sums, averaged, buckets, whole_residual
from thinwire import PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.checkpoint import load_local, merge, save_local
from thinwire.comm import Machines
from thinwire.errors import StateError
from thinwire.simulation import Simulation
from thinwire.sync import Engine, GradientSync

POWER = PowerSGD(matrix_rank=1, min_compression_ratio=1)
FED_BACK = Quantize(bits=2, error_feedback=True)
WHOLE_BUCKETS = BatchedPowerSGD(matrix_rank=1)
ENTRIES = TopK(density=1 / 100, error_decay=1, merge="members")
TOGETHER = [tuple(parameter for bucket in buckets() for parameter in bucket)]
CROSSWISE = ((0, 2), (1, 3))


def pairs(algorithm: Algorithm) -> Simulation:
    """Of four processes on two machines."""
    return Simulation(algorithm, buckets(), num_workers=4, workers_per_machine=2)


def crosswise(algorithm: Algorithm) -> Simulation:
    """As `pairs`, but processes 0 and 2 share a machine."""
    simulation = pairs(algorithm)
    by_machine = dict(
        zip([rank for row in CROSSWISE for rank in row], Machines.in_process(2, 2), strict=True)
    )
    simulation.engines = [
        Engine(algorithm, engine.transport, engine.specs, machines=replace(by_machine[rank], rows=CROSSWISE))
        for rank, engine in enumerate(simulation.engines)
    ]
    simulation.syncs = [GradientSync(engine) for engine in simulation.engines]
    return simulation


def flat(algorithm: Algorithm) -> Simulation:
    return Simulation(algorithm, buckets(), num_workers=4)


def in_one_bucket(algorithm: Algorithm) -> Simulation:
    simulation = pairs(algorithm)
    simulation.buckets = TOGETHER
    return simulation


def used_before_the_first_step(algorithm: Algorithm) -> Simulation:
    """Made with a different algorithm: it is switched after loading, by `switched`."""
    return pairs(POWER if algorithm != POWER else FED_BACK)


def residual(state: dict[str, Any]) -> Tensor:
    return whole_residual(state, buckets())


def trained(simulation: Simulation) -> tuple[Simulation, Sums]:
    sums = Sums()
    for step in range(3):
        averaged(simulation, step, sums)
    return simulation, sums


def with_own(simulation: Simulation, states: list[dict[str, Any]]) -> Simulation:
    """Load what each process has saved for itself."""
    for sync, state in zip(simulation.syncs, states, strict=True):
        sync.load_state_dict(state)
    return simulation


def merged(simulation: Simulation) -> dict[str, Any]:
    """The state of all, without a message."""
    return merge([sync.local_state_dict() for sync in simulation.syncs])


@pytest.mark.parametrize(
    ("first", "then", "again"),
    [
        (POWER, FED_BACK, pairs),
        (FED_BACK, POWER, pairs),
        (POWER, WHOLE_BUCKETS, pairs),
        (ENTRIES, POWER, pairs),
        (POWER, FED_BACK, used_before_the_first_step),
        (FED_BACK, POWER, used_before_the_first_step),
        (WHOLE_BUCKETS, WHOLE_BUCKETS, in_one_bucket),
        (POWER, POWER, crosswise),
        (FED_BACK, FED_BACK, crosswise),
        (POWER, POWER, flat),
        (FED_BACK, POWER, flat),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_nothing_is_lost_with_another_algorithm_other_buckets_or_another_layout(
    first: Algorithm, then: Algorithm, again: Callable[[Algorithm], Simulation], tmp_path: Path
) -> None:
    simulation, sums = trained(pairs(first))
    assert simulation.syncs[0].stats().compression_ratio > 1.5
    for sync in simulation.syncs:
        save_local(sync, tmp_path)
    another = again(then)
    for sync in another.syncs:
        load_local(sync, tmp_path)
        if sync.algorithm != then:
            sync.use(then)
    for step in range(3, 5):
        averaged(another, step, sums)
    assert sums.lost(another).norm() <= 1e-5


@pytest.mark.parametrize(
    ("made", "algorithm", "is_averaged"),
    [
        (flat, POWER, False),
        (flat, FED_BACK, True),
        (pairs, POWER, True),
        (pairs, FED_BACK, False),
        (pairs, WHOLE_BUCKETS, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_loaded_is_in_every_state_that_is_saved_before_the_next_step(
    made: Callable[[Algorithm], Simulation], algorithm: Algorithm, is_averaged: bool
) -> None:
    simulation, sums = trained(made(algorithm))
    if is_averaged:
        simulation.state_dicts()
    states = [sync.local_state_dict() for sync in simulation.syncs]
    expected = residual(merge(states))
    assert expected.norm() > 0
    # By each process for itself, of all, and both again of what was loaded and averaged already.
    again = with_own(made(algorithm), states)
    torch.testing.assert_close(residual(merged(again)), expected, rtol=1e-6, atol=0)
    for _ in range(2):
        saved = again.state_dicts()
        for state in saved:
            torch.testing.assert_close(residual(state), expected, rtol=1e-5, atol=1e-6)
            assert_same_state(state, saved[0])
        torch.testing.assert_close(residual(merged(again)), residual(saved[0]), rtol=0, atol=0)
        for tensor in [tensor for state in saved for tensor in dict(state["error"]).values()]:
            tensor.zero_()  # the caller's own
    # And it is sent.
    for step in range(3, 5):
        averaged(again, step, sums)
    assert sums.lost(again).norm() <= 1e-5


def test_a_parameter_that_is_never_used_again_keeps_what_it_is_owed() -> None:
    for made in (flat, pairs):
        simulation, _ = trained(made(FED_BACK))
        states = [sync.local_state_dict() for sync in simulation.syncs]
        expected = residual(merge(states))
        again = with_own(made(FED_BACK), states)
        again.buckets = buckets()[:1]
        for step in range(3, 5):
            averaged(again, step)
        numel = sum(spec.numel for spec in buckets()[0])
        for both in (merged(again), again.state_dicts()[0], merged(again)):
            torch.testing.assert_close(residual(both)[numel:], expected[numel:], rtol=1e-5, atol=1e-6)


def test_on_a_machine_that_others_share_one_own_file_is_refused() -> None:
    simulation, _ = trained(pairs(POWER))
    other = crosswise(POWER)
    with pytest.raises(StateError, match="with local rank 1, but this is process 1 of 4"):
        other.syncs[1].load_state_dict(simulation.syncs[1].local_state_dict())
    assert other.syncs[1].steps == 0


def damaged(state: Any, draw: random.Random) -> Any:
    """A copy in which an entry, at any depth, is gone or is something else."""
    if isinstance(state, dict | tuple | list) and len(state) and draw.random() < 0.85:
        keys = list(state) if isinstance(state, dict) else range(len(state))
        key, inner = draw.choice(keys), {k: state[k] for k in keys}
        if draw.random() < 0.25:
            del inner[key]
        else:
            inner[key] = damaged(state[key], draw)
        return inner if isinstance(state, dict) else tuple(inner.values())
    plain: list[Any] = [None, -1, 7, 0, "x", 1.5, True, (), {}, ("a", "b"), ((3, 4), 5)]
    return draw.choice([*plain, torch.zeros(3), torch.zeros(())])


@pytest.mark.parametrize("made", [flat, pairs])
def test_damaged_states_are_refused_in_words_or_merged(made: Callable[[Algorithm], Simulation]) -> None:
    simulation, _ = trained(made(POWER))
    states = [sync.local_state_dict() for sync in simulation.syncs]
    assert residual(merge(copy.deepcopy(states))).norm() > 0
    draw, refused = random.Random(0), 0
    for _ in range(100):
        some, rank = list(states), draw.randrange(4)
        some[rank] = damaged(some[rank], draw)
        try:
            merge(some)
        except StateError:
            refused += 1
    assert refused > 50
