"""Steps of which the host does not learn whether they were healthy: the device keeps old or new."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["spoiled_unless", "written_where"]


def written_where(
    items: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
) -> list[torch.Tensor]:
    """Return what is new if the step is healthy, else what was before; of all buckets with a few launches.

    Args:
        items: Whether the step is healthy, one bool; what is new; what was (None for zeros).
    """

    def kept(alike: Sequence[int]) -> Sequence[torch.Tensor]:
        new = [items[index][1] for index in alike]
        were = [items[index][2] for index in alike]
        old = [
            torch.zeros_like(each) if was is None or was.shape != each.shape else was
            for each, was in zip(new, were, strict=True)
        ]
        # Joined, chosen and parted: launches for a kind of tensors, and not for each.
        joined_new, joined_old = (torch.cat([each.reshape(-1) for each in side]) for side in (new, old))
        chosen = torch.where(items[alike[0]][0], joined_new, joined_old)
        parts = chosen.split_with_sizes([each.numel() for each in new])
        return [part.view_as(each) for part, each in zip(parts, new, strict=True)]

    return _by_kind([new for _, new, _ in items], kept)


def spoiled_unless(items: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Make tensors NaN, in place, unless the step is healthy, and return them.

    Args:
        items: Whether it is, one bool; the tensor, floating.
    """

    def spoiled(alike: Sequence[int]) -> Sequence[torch.Tensor]:
        is_healthy, tensors = items[alike[0]][0], [items[index][1] for index in alike]
        # Times one or NaN: to fill where a condition holds there is no operation on many tensors.
        torch._foreach_mul_(tensors, torch.where(is_healthy, 1.0, torch.nan).to(tensors[0].dtype))
        return tensors

    return _by_kind([tensor for _, tensor in items], spoiled)


def _by_kind(
    tensors: Sequence[torch.Tensor], made: Callable[[Sequence[int]], Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Return what is made of tensors of one device and type at a time, in the order of the tensors."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    results: dict[int, torch.Tensor] = {}
    for alike in kinds.values():
        results.update(zip(alike, made(alike), strict=True))
    # Back in the order in which they came, which the caller's places go by.
    return [results[index] for index in range(len(tensors))]
