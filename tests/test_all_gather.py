"""The gather that gradients flow through, against autograd in one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from processes import in_each_process
from thinwire.comm import ProcessGroupTransport, Recording
from thinwire.integrations.all_gather import AllGatherGrad, all_gather_grad


def inputs(world_size: int, shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(world_size)]


def loss_of(stacked: Tensor, process_rank: int) -> Tensor:
    """A loss of one process that depends on everyone's tensor, and differs between processes."""
    weights = torch.arange(1, len(stacked) + 1, dtype=torch.float64) + 10 * process_rank
    weighted = stacked * weights.view(-1, *[1] * (stacked.dim() - 1))
    return weighted.sin().sum() * (process_rank + 1)


def reference(tensors: list[Tensor]) -> list[Tensor]:
    """Gradients of the sum of all processes' losses, by autograd in one process."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    total = torch.stack([loss_of(torch.stack(leaves), rank) for rank in range(len(leaves))]).sum()
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [0, 2, 3]], ids=["all", "a subgroup"])
@in_each_process(4)
def test_forward_and_gradient(members: list[int]) -> None:
    group = dist.new_group(members)
    for shape in ((), (3,), (0, 2), (4, 5), (2, 3, 4)):
        _check(shape, group, "contiguous")
    for layout in ("transposed", "strided"):
        _check((4, 6), group, layout)


def _check(shape: tuple[int, ...], group: Any, layout: str) -> None:
    own_rank = dist.get_rank(group)
    if own_rank < 0:
        return
    tensors = inputs(dist.get_world_size(group), shape)
    tensor = tensors[own_rank].clone()
    if layout == "transposed":
        tensor = tensor.t().contiguous().t()
    elif layout == "strided":
        tensor = tensor.repeat_interleave(2, dim=-1)[..., ::2]
    assert tensor.is_contiguous() == (layout == "contiguous")
    tensor.requires_grad_()
    stacked = all_gather_grad(tensor, group)
    torch.autograd.backward(loss_of(stacked, own_rank))
    assert torch.equal(stacked, torch.stack(tensors))
    torch.testing.assert_close(tensor.grad, reference(tensors)[own_rank])


@in_each_process(4)
def test_the_way_back_is_an_exchange_of_slices() -> None:
    """An all-reduce of everything would be twice the bytes, of which each process needs one part."""
    recordings = []

    def recorded(*arguments: Any) -> Recording:
        recordings.append(Recording(ProcessGroupTransport(*arguments)))
        return recordings[-1]

    with patch("thinwire.integrations.all_gather.ProcessGroupTransport", recorded):
        torch.autograd.backward(all_gather_grad(torch.ones(1000, requires_grad=True)).square().sum())
    sent = [(note.collective, note.handed_bytes) for note in recordings[0].notes[1:]]
    assert sent == [("all_gather", 4000), ("all_to_all", 4 * 4000)]


def test_without_a_process_group() -> None:
    with pytest.raises(thinwire.AttachError, match="init_process_group"):
        all_gather_grad(torch.zeros(3))


@in_each_process(2)
def test_the_same_as_lightnings_name() -> None:
    stacked: Any = AllGatherGrad.apply(torch.tensor([float(dist.get_rank())]))  # type: ignore[no-untyped-call]
    assert stacked.tolist() == [[0.0], [1.0]]


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(thinwire.ConfigError, match=r"expected a tensor to gather, got \[1\.0\]"):
        all_gather_grad([1.0])  # type: ignore[arg-type]
