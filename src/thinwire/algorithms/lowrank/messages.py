"""How the factors of a bucket travel: in one message, with what is not compressed behind the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.algorithms.lowrank.matrices import Workspace
from thinwire.algorithms.requests import Jointly, Mean, Round
from thinwire.kernels.matrices import widened
from thinwire.tensors import accelerators


class FactorMessages:
    """The messages of a bucket's step: factors in one of them, flat gradients with the first.

    Attributes:
        received: The means of all messages, which must be finite.
        uncompressed: The means of the flat gradients.
    """

    def __init__(
        self, dtype: torch.dtype, workspace: Workspace, uncompressed: Sequence[torch.Tensor]
    ) -> None:
        self._dtype, self._workspace, self._beside = dtype, workspace, uncompressed
        self.received: list[torch.Tensor] = []
        self.uncompressed: Sequence[torch.Tensor] = ()

    def average(
        self, factors: list[torch.Tensor], *, as_sent: bool
    ) -> Round[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return factors, (matrices, r, elements) each, and their means over the members.

        `as_sent` is for factors that leave the residual: it must lose what travelled, rounded to 16 bits, and
        keep what rounding lost.
        """
        like, beside = factors[0], [] if self.received else self._beside
        item = MessageParts(factors, beside, self._dtype, self._workspace, len(self.received))
        (message,) = yield Jointly(all_packed, [item], (like.device, like.dtype, self._dtype))
        own = factors
        if as_sent and message.dtype != like.dtype:
            # Read before the message is given away: the mean may come to lie in it.
            own = unpacked(message, factors)
        mean = yield Mean(message)
        if beside:
            sizes = list(map(torch.numel, beside))
            self.uncompressed = mean[len(mean) - sum(sizes) :].split_with_sizes(sizes)
        self.received.append(mean)
        return own, unpacked(mean, factors)


@dataclass(eq=False)
class MessageParts:
    """Factors that are to travel as one message, with flat gradients behind them."""

    factors: Sequence[torch.Tensor]
    uncompressed: Sequence[torch.Tensor]
    dtype: torch.dtype  # in which they travel
    workspace: Workspace
    number: int  # of the message in its step


def all_packed(items: Sequence[MessageParts]) -> Sequence[torch.Tensor]:
    """Return the messages of all buckets, views of one tensor: so they are sent without a further copy."""
    first = items[0]
    like, dtype = first.factors[0], first.dtype
    parts, sizes = list[torch.Tensor](), list[int]()
    for item in items:
        factors, uncompressed = item.factors, item.uncompressed
        if dtype == torch.float16:
            factors = [clamped(factor) for factor in factors]
        if uncompressed and accelerators.is_accelerator(like.device):
            uncompressed = widened(uncompressed, like.dtype)  # torch joins unlike types one by one
        of_item = list(map(torch.flatten, (*factors, *uncompressed)))
        sizes.append(sum(map(torch.numel, of_item)))
        parts += of_item
    out = first.workspace.buffer(("message", first.number, like.shape), (sum(sizes),), like)
    return torch.cat(parts, out=out).to(dtype).split_with_sizes(sizes)


def clamped(factor: torch.Tensor) -> torch.Tensor:
    """Return a factor within fp16's range: the residual keeps what is cut off.

    One that was infinite before stays infinite, because then the step should be skipped.
    """
    limit = torch.finfo(torch.float16).max
    return torch.where(factor.isinf(), factor, factor.clamp(-limit, limit))


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the head of `flat` as tensors of the shapes and the type of `like`."""
    sizes = list(map(torch.numel, like))
    head = flat[: sum(sizes)].to(like[0].dtype)
    return list(map(torch.Tensor.view_as, head.split_with_sizes(sizes), like))
