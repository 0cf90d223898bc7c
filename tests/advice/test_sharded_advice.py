"""`thinwire.advise` of a model that `fully_shard` holds: its bytes, and the link that its shards share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from advice.ways import network, only_priced
from processes import in_each_process
from thinwire import ConfigError
from thinwire.advice import sharded_subject
from thinwire.advice.prediction import SHARDING
from thinwire.errors import AttachError
from thinwire.probe import Probe, probe
from thinwire.tensors.layout import local_tensor
from training import told_by_all

ROWS, COLUMNS, RANK = 63, 128, 4
FEW = ["AllReduce()", 'Cast("bf16")', "Quantize(bits=4)", f"PowerSGD(matrix_rank={RANK})"]


def one_step(model: nn.Module) -> None:
    torch.autograd.backward(model(torch.ones(4, COLUMNS)).square().mean())


@in_each_process(4)
def test_the_shards_of_a_replica_share_its_link() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3)
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    fully_shard(model, mesh=mesh["shard"])
    one_step(model)
    state = _state(model)
    advise = partial(thinwire.advise, model, one_step, budget_seconds=0.05, budget_loss=float("inf"))
    with only_priced(*FEW), patch.object(sharded_subject, "probe", _hardly_probed):
        # Two pairs of the four processes are near each other: the link joins one process of each pair.
        first = advise(network(1e4, world_size=4, nodes=[[0, 1], [2, 3]]))
    with only_priced(*FEW[:2]), patch.object(sharded_subject, "probe", _hardly_probed):
        probed = advise(replicas=mesh["replicate"])
    assert state == _state(model)
    with pytest.raises(ConfigError, match="pass a probe of one process per replica"):
        advise()
    sync = thinwire.attach(model, thinwire.AllReduce(), replicas=mesh)
    with pytest.raises(AttachError, match="already attached"):
        advise(network(1e6))
    assert (sync.steps, told_by_all(first.predictions)) == (0, [first.predictions] * 4)
    assert (first.shards, first.baseline.name) == (2, "native HSDP in bf16")
    by_name = {prediction.name: prediction for prediction in first.predictions}
    exact, few_bits = by_name[FEW[0]], by_name[FEW[2]]
    assert len(by_name) == len(FEW)
    # Of a machine, both ways alike: between two a ring sends each byte once.
    numbers = ROWS * COLUMNS
    flags = 2 * 2  # a byte of each process: which parameters have gradients
    assert exact.sent_bytes == pytest.approx(4 * numbers, abs=flags + 16)
    assert first.baseline.sent_bytes == pytest.approx(2 * numbers, abs=flags + 16)
    assert few_bits.sent_bytes < numbers
    # docs/sharded.md: r (m + W n) numbers.
    assert by_name[FEW[3]].sent_bytes == pytest.approx(4 * RANK * (ROWS + 2 * COLUMNS), abs=40)
    # Ten kilobits a second, so that nothing else counts: what two processes send goes over one link.
    assert exact.step_seconds == pytest.approx(8 * 4 * numbers / 1e4, rel=0.2)
    assert probed.baseline.step_seconds > 0
    assert first.best.is_lossy
    assert first.lines == {"FSDP2": f"import thinwire\n{first.best.code}"}
    assert first.best.code.startswith(SHARDING)
    assert any("2 replicas of 2 shards; the 2 of a replica share one link" in note for note in first.notes)


def _hardly_probed(group: dist.ProcessGroup) -> Probe:
    """In a tenth of a second a busy machine tells no rate."""
    return replace(probe(group, budget_seconds=0.1), timings=network(1e6).timings)


def _state(model: nn.Module) -> Any:
    """Weights, gradients and number of hooks: what must be as it was."""
    (weight,) = model.parameters()
    assert weight.grad is not None
    hooks = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
    return local_tensor(weight).tolist(), local_tensor(weight.grad).tolist(), len(hooks)
