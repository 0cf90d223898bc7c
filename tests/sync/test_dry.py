"""`sync.dry()`: steps that leave no trace, unless they are kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from adapters.test_sharded import attached, backward, runs_on_cpus, whole, wide
from algorithms.test_conformance import assert_same_state, first_steps
from catalog import ENTRIES, Entry, averaged, buckets, random_gradients, resumed
from processes import in_each_process
from thinwire import GradientSync, PowerSGD, Quantize, StepError, TopK
from thinwire.algorithms.error_feedback import ERROR
from thinwire.simulation import Simulation
from training import are_alike, ddp_of, gradient_of, refused

WAYS: list[dict[str, Any]] = [{}, {"host_check": False}, {"num_workers": 4, "workers_per_machine": 2}]


def made(simulation: Simulation, seed: int, *, bad: bool = False) -> Tensor:
    """Make a step, and return the means."""
    gradients = random_gradients(buckets(), num_workers=len(simulation.syncs), seed=seed)
    if bad:
        gradients[0][1][7] = torch.nan
    simulation.step(gradients)
    return torch.cat(gradients[0])


def made_dry(simulation: Simulation, seeds: list[int], *, keeps: bool, bad: bool = False) -> None:
    with ExitStack() as contexts:
        kept = [contexts.enter_context(sync.dry()) for sync in simulation.syncs]
        for seed in seeds:
            made(simulation, seed, bad=bad)
        for keep in kept if keeps else ():
            keep()


@pytest.mark.parametrize(
    ("entry", "way", "is_resumed"), [*zip(ENTRIES, cycle(WAYS), cycle([False, True]))], ids=str
)
def test_steps_inside_leave_no_trace_unless_they_are_kept(
    entry: Entry, way: dict[str, Any], is_resumed: bool
) -> None:
    """Before the first step, between steps, several together, and those that are not finite."""
    first, straight, other = (
        Simulation(entry.algorithm, buckets(), **{"num_workers": 2, **way}) for _ in range(3)
    )
    if is_resumed:  # what was loaded, and is divided among the workers in their next step, is there again
        averaged(first, 50)
        (state, *_) = first.state_dicts()
        resumed(straight, state)
        resumed(other, state)
    start = straight.syncs[0].steps
    for step in range(max(3, first_steps(entry).stop)):
        made_dry(other, [100, 200] if step < 2 else [300], keeps=False, bad=step == 2)
        assert other.syncs[0].steps == start + step
        if step == 1:
            made(straight, step)
            made_dry(other, [step], keeps=True)
        else:
            assert torch.equal(made(straight, step), made(other, step))
    assert [sync.stats().nonfinite_steps for sync in other.syncs] == [0] * len(other.syncs)
    for mine, theirs in zip(straight.state_dicts(), other.state_dicts(), strict=True):
        assert_same_state(mine, theirs)
    if entry.compresses and not getattr(entry.algorithm, "warmup_steps", 0):
        assert other.syncs[0].stats().compression_ratio > 1.5


def test_an_exception_leaves_no_trace_either_and_calls_that_would_be_undone_are_refused() -> None:
    simulation = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=1)
    sync = simulation.syncs[0]
    made(simulation, 0)
    before = {name: error.clone() for name, error in simulation.engines[0].state.memory[ERROR].items()}
    assert before
    with suppress(KeyError), sync.dry() as keep:
        made(simulation, 1)
        for call in (sync.state_dict, lambda: sync.use(Quantize(bits=4))):
            with refused(StepError, "was called inside dry()"):
                call()
        raise KeyError
    with refused(StepError, "keep() was called after its dry() had ended"):
        keep()
    after = simulation.engines[0].state.memory[ERROR]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sync.steps == 1
    with sync.dry() as keep_outer:
        made(simulation, 2)
        with sync.dry():
            made(simulation, 3)
        keep_outer()
    assert sync.steps == 2


# Loops that drop averaged gradients, with DDP and FSDP2.


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


def check_no_trace(start: Callable[[], tuple[Any, GradientSync]], make_pass: Callable[..., object]) -> None:
    """Compare a model that also makes dry passes, as of a GAN's generator, with one that makes none."""
    (model, sync), (straight, other) = start(), start()
    for step in range(4):
        with sync.dry():
            make_pass(model, 100 + step)
        assert are_alike(gradients_of(model))
        means = []
        for trained in (model, straight):
            trained.zero_grad()
            make_pass(trained, step)
            means.append(gradients_of(trained))
            trained.zero_grad()
        assert all(map(torch.equal, *means))
    assert sync.steps == other.steps == 4
    assert sync.stats().compression_ratio > 1.5


@in_each_process(2)
def test_a_ddp_model() -> None:
    def start() -> tuple[Any, GradientSync]:
        model = ddp_of()
        return model, thinwire.attach(model, TopK(density=1 / 20, chunk=100))

    check_no_trace(start, gradient_of)


@runs_on_cpus
@in_each_process(4)
def test_a_sharded_model() -> None:
    check_no_trace(lambda: attached(PowerSGD(matrix_rank=2), wide()), backward)
