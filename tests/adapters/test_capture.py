"""Steps that a CUDA graph would capture are refused, whatever the adapter, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pool import in_each_process
from thinwire import DiLoCo, PowerSGD, StepError
from thinwire.powersgd import AlgorithmAggregator
from thinwire.sync.step import Step

POWER = PowerSGD(matrix_rank=2)


def of_ddp() -> tuple[Any, Callable[[], object]]:
    # A pass that failed leaves a DDP model unusable: each has its own.
    models = [DistributedDataParallel(nn.Linear(30, 40)) for _ in range(2)]
    syncs = [thinwire.attach(model, POWER) for model in models]
    return syncs[-1], lambda: torch.autograd.backward(models.pop(0)(torch.ones(2, 30)).sum())


def of_a_list() -> tuple[Any, Callable[[], object]]:
    aggregator = AlgorithmAggregator([nn.Parameter(torch.randn(40, 30))], POWER)
    return aggregator, lambda: aggregator.aggregate([torch.randn(40, 30)])


def of_averaged_models() -> tuple[Any, Callable[[], object]]:
    model = nn.Linear(30, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(model, optimizer, every_steps=1, algorithm=POWER).__enter__(), optimizer.step


@pytest.mark.parametrize("make", [of_ddp, of_a_list, of_averaged_models])
@in_each_process(2)
def test_a_step_that_is_captured(make: Callable[[], tuple[Any, Callable[[], object]]]) -> None:
    """There is no such stream on the CPU: its refusal is put in."""
    averaging, step = make()
    refusal = patch.object(Step, "start", side_effect=StepError("a graph is captured"))
    # What a hook raises, DDP passes on in a type of its own.
    with refusal, pytest.raises(Exception, match="a graph is captured"):
        step()
    assert averaging.stats().rounds == 0
    if make is not of_averaged_models:
        step()
        assert averaging.stats().compression_ratio > 5
