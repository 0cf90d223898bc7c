"""Gathering and summing tensors over a process group, without compression."""

from __future__ import annotations

import torch
import torch.distributed as dist

from thinwire.channel.process_group import told_where
from thinwire.errors import CommunicationError

__all__ = ["gather_stacked", "sum_over"]

MOST_DIMENSIONS = 16


def gather_stacked(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all processes, stacked by process rank: shape (processes, *shape).

    Raises:
        CommunicationError: The processes brought different shapes or types (told on all of them), or the
            backend failed.
    """
    _check_alike(tensor, group)
    contiguous = tensor.contiguous()
    gathered = [torch.empty_like(contiguous) for _ in range(group.size())]
    with told_where(f"gathering {contiguous.numel()} × {contiguous.dtype}"):
        dist.all_gather(gathered, contiguous, group=group)
    return torch.stack(gathered)


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over all processes, as a new tensor."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    with told_where(f"summing {total.numel()} × {total.dtype}"):
        dist.all_reduce(total, group=group)
    return total


def _check_alike(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Compare shapes and types before the backend meets them: it would hang or mix them up."""
    if tensor.dim() > MOST_DIMENSIONS:
        raise CommunicationError(
            f"a tensor of {tensor.dim()} dimensions can't be gathered, at most {MOST_DIMENSIONS}"
        )
    own = torch.full((MOST_DIMENSIONS + 2,), -1, device=tensor.device)
    described = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    own[: len(described)] = torch.tensor(described)
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    with told_where("comparing the shapes to gather"):
        dist.all_gather(everyone, own, group=group)
    if any(not torch.equal(other, everyone[0]) for other in everyone):
        kinds = "; ".join(f"process {index}: {_told(each.tolist())}" for index, each in enumerate(everyone))
        raise CommunicationError(
            f"all processes must gather one shape and type, got {kinds}; pad or cast first"
        )


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def _told(described: list[int]) -> str:
    dtype, dimensions, *shape = described
    return f"{tuple(shape[:dimensions])} {_DTYPES[dtype]}"
