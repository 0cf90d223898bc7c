"""Uneven inputs: members without input shadow the steps of the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from members import Member, run
from pool import Pool
from thinwire import Warmup
from thinwire.algorithms import PowerSGD
from thinwire.localsgd import LocalSGD
from training import agreed, batch_of, flat, new_model, new_optimizer, train, train_step

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def train_unevenly(member: Member, local: LocalSGD, num_batches: list[int], **options: Any) -> None:
    """As `Join` drives the members: those that have run out shadow, and at the end all average."""
    hook = local.join_hook(**options)
    own, most = num_batches[member.rank], max(num_batches)
    member.train(own)
    for _ in range(own, most):
        hook.main_hook()
    hook.post_hook(own == most)


@pytest.mark.parametrize("by_contributors", [False, True], ids=["by initial size", "by contributors"])
@pytest.mark.parametrize("num_batches", [(6, 3), (2, 7), (5, 0), (4, 4), (0, 0), (5, 2, 4)], ids=str)
def test_changes_are_divided_by_the_members_or_the_contributors(
    num_batches: tuple[int, ...], by_contributors: bool
) -> None:
    expected = _by_itself(num_batches, by_contributors)
    for parameters, is_agreed, steps in run(len(num_batches), _uneven, num_batches, by_contributors):
        assert (parameters - expected).abs().max() < 1e-12
        assert is_agreed
        assert steps == max(num_batches)


def _uneven(member: Member, num_batches: tuple[int, ...], by_contributors: bool) -> tuple[Tensor, bool, int]:
    member.take(new_model(dtype=torch.float64))
    with member.local() as local:
        train_unevenly(member, local, list(num_batches), divide_by_initial_world_size=not by_contributors)
    return flat(member.model), member.agreed(), local.stats().steps


def _by_itself(num_batches: tuple[int, ...], by_contributors: bool) -> Tensor:
    """Sums of changes over all workers, or over those that had input, after every second step."""
    workers = [new_model(dtype=torch.float64) for _ in num_batches]
    optimizers = [new_optimizer(worker) for worker in workers]
    last, contributors = flat(workers[0]), set()
    for step in range(max(num_batches)):
        for place, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            if step < num_batches[place]:
                train_step(worker, optimizer, batch_of(step, place).double())
                contributors.add(place)
        if step % 2 == 1 or step == max(num_batches) - 1:
            total = sum((flat(worker) - last for worker in workers), start=torch.zeros_like(last))
            last = last + total / (len(contributors) if by_contributors else len(num_batches))
            contributors = set()
            for worker in workers:
                nn.utils.vector_to_parameters(last.clone(), worker.parameters())
    return last


@pytest.mark.parametrize("subgroups", [False, True])
def test_with_all_that_there_is(subgroups: bool) -> None:
    """Compression, an outer optimizer, a warm-up, subgroups."""
    for is_agreed, steps, ratio in run(4, _with_all, subgroups):
        assert is_agreed
        assert steps == 6
        assert ratio > 3


def _with_all(member: Member, subgroups: bool) -> tuple[bool, int, float]:
    subgroup = member.pair if subgroups else None
    with member.local(warmup=Warmup(1), algorithm=PowerSGD(), outer=NESTEROV, subgroup=subgroup) as local:
        train_unevenly(member, local, [6, 1, 4, 3])
    return member.agreed(), local.stats().steps, local.stats().compression_ratio


# In torch's own join context, in real processes.


@pytest.mark.parametrize("by_contributors", [False, True], ids=["by initial size", "by contributors"])
@pytest.mark.parametrize("num_batches", [(2, 7), (5, 0)], ids=str)
def test_in_a_join_context(pool2: Pool, num_batches: tuple[int, int], by_contributors: bool) -> None:
    expected = _by_itself(num_batches, by_contributors)
    results = pool2.run(_joined, num_batches, by_contributors)
    assert len(results) == 2
    for parameters, is_agreed, steps in results:
        assert (parameters - expected).abs().max() < 1e-12
        assert is_agreed
        assert steps == max(num_batches)


def _joined(num_batches: tuple[int, int], by_contributors: bool) -> tuple[Tensor, bool, int]:
    model = new_model(dtype=torch.float64)
    optimizer = new_optimizer(model)
    with (
        LocalSGD(model, optimizer, every_steps=2) as local,
        Join([local], divide_by_initial_world_size=not by_contributors),
    ):
        train(model, optimizer, range(num_batches[dist.get_rank()]))
    assert not local._join_config.enable
    return flat(model), agreed(model), local.stats().steps


def test_early_termination_raises_on_all_processes(pool2: Pool) -> None:
    messages = pool2.run(_early_termination)
    assert messages[0].startswith("Detected at least one rank that exhausted inputs")
    assert messages[1] == "Rank 1 exhausted all inputs."


def _early_termination() -> str:
    model = new_model()
    optimizer = new_optimizer(model)
    local = LocalSGD(model, optimizer, every_steps=2)
    try:
        with local, Join([local], throw_on_early_termination=True):
            train(model, optimizer, range(4 - 2 * dist.get_rank()))
    except RuntimeError as error:
        return str(error)
    return ""
