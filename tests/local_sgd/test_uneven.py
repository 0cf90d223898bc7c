"""Uneven inputs: members without input shadow the steps of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from members import NESTEROV, Member, in_each_member, once
from processes import in_each_process
from thinwire import Streaming, Warmup
from thinwire.algorithms import PowerSGD
from thinwire.local_sgd import LocalSGD
from training import agreed, batch_of, flat, new_model, new_optimizer, train, train_step

NUM_BATCHES = [(2, 7), (0, 0), (5, 2, 4)]


@pytest.mark.parametrize("by_contributors", [False, True], ids=["by initial size", "by contributors"])
@pytest.mark.parametrize(("size", "num_batches"), [(len(each), each) for each in NUM_BATCHES], ids=str)
@in_each_member()
def test_changes_are_divided_by_the_members_or_the_contributors(
    member: Member, num_batches: tuple[int, ...], by_contributors: bool
) -> None:
    expected = _by_itself(num_batches, by_contributors)
    member.take(new_model(dtype=torch.float64))
    with member.local() as local:
        member.train_unevenly(local, num_batches, divide_by_initial_world_size=not by_contributors)
    assert (flat(member.model) - expected).abs().max() < 1e-12
    assert member.agreed()
    assert local.stats().steps == max(num_batches)


@once
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
@in_each_member(4)
def test_with_all_that_there_is(member: Member, subgroups: bool) -> None:
    """Compression, an outer optimizer, a warm-up; subgroups, or fragments and a delay."""
    own: dict[str, Any] = {"streaming": Streaming(fragments=2, delay_steps=1), "every_steps": 4}
    own = {"subgroup": member.pair} if subgroups else own
    with member.local(warmup=Warmup(1), algorithm=PowerSGD(), outer=NESTEROV, **own) as local:
        member.train_unevenly(local, [6, 1, 4, 3])
    assert member.agreed()
    assert local.stats().steps == 6
    assert local.stats().compression_ratio > 3


# In torch's own join context, in real processes.


@pytest.mark.parametrize("by_contributors", [False, True], ids=["by initial size", "by contributors"])
@in_each_process(2)
def test_in_a_join_context(by_contributors: bool) -> None:
    num_batches = (2, 7)
    model = new_model(dtype=torch.float64)
    optimizer = new_optimizer(model)
    with (
        LocalSGD(model, optimizer, every_steps=2) as local,
        Join([local], divide_by_initial_world_size=not by_contributors),
    ):
        train(model, optimizer, range(num_batches[dist.get_rank()]))
    assert not local._join_config.enable
    assert (flat(model) - _by_itself(num_batches, by_contributors)).abs().max() < 1e-12
    assert agreed(model)
    assert local.stats().steps == max(num_batches)


@in_each_process(2)
def test_early_termination_raises_on_all_processes() -> None:
    model, process_rank = new_model(), dist.get_rank()
    optimizer = new_optimizer(model)
    words = ["Detected at least one rank that exhausted inputs", "Rank 1 exhausted all inputs."][process_rank]
    local = LocalSGD(model, optimizer, every_steps=2)
    with pytest.raises(RuntimeError, match=words), local, Join([local], throw_on_early_termination=True):
        train(model, optimizer, range(4 - 2 * process_rank))
