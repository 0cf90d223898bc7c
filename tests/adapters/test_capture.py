"""Steps that a CUDA graph would capture are refused, whatever the adapter, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import in_each_process
from thinwire import DiLoCo, LocalSGD, PowerSGD, StepError
from thinwire.adapters.tensors import GradientListAdapter
from thinwire.comm import InProcessTransport
from thinwire.sync.step import Step


def refused(action: Callable[[], object]) -> str:
    """Name the error where the stream is being captured; there is no such stream on the CPU."""
    refusal = patch.object(Step, "start", side_effect=StepError("a graph is captured"))
    with refusal, pytest.raises(Exception, match="a graph is captured") as caught:
        action()
    return type(caught.value).__name__


def test_in_the_adapter_of_tensors() -> None:
    parameters = [nn.Parameter(torch.randn(40, 30))]
    (transport,) = InProcessTransport.group(1)
    adapter = GradientListAdapter(parameters, PowerSGD(matrix_rank=2), transport=transport)
    gradients = [torch.randn(40, 30)]
    assert refused(lambda: adapter.average(gradients)) == "StepError"
    adapter.average(gradients)
    assert (adapter.sync.stats().steps, adapter.sync.stats().compression_ratio > 5) == (1, True)


@pytest.mark.parametrize("make", [LocalSGD, DiLoCo])
def test_in_local_sgd(make: type[LocalSGD] | type[DiLoCo]) -> None:
    model = nn.Linear(30, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (transport,) = InProcessTransport.group(1)
    with make(model, optimizer, every_steps=1, replicas=transport) as local:
        assert refused(optimizer.step) == "StepError"
        assert local.sync.stats().averagings == 0


@in_each_process(2)
def test_in_ddp() -> None:
    model = DistributedDataParallel(nn.Linear(30, 40))
    sync = thinwire.attach(model, PowerSGD(matrix_rank=2))
    # What a hook raises, DDP passes on in a type of its own.
    refused(lambda: torch.autograd.backward(model(torch.ones(2, 30)).sum()))
    assert sync.stats().steps == 0
    sync.abandon()
    other = DistributedDataParallel(nn.Linear(30, 40))
    other_sync = thinwire.attach(other, PowerSGD(matrix_rank=2))
    torch.autograd.backward(other(torch.ones(2, 30)).sum())
    assert (other_sync.stats().steps, other_sync.stats().compression_ratio > 5) == (1, True)
