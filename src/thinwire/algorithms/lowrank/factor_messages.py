"""How factors travel: packed into one message, in their own type or in 16 bits."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch

from thinwire.algorithms.requests import Jointly, Mean, Message, Request
from thinwire.kernels.matrices import widened
from thinwire.tensors import accelerators


class FactorMeans(NamedTuple):
    """What a round of factors makes known.

    Attributes:
        means: Of the factors, the same on all members.
        own: This member's factors: as they travelled, rounded in 16 bits, if the caller has asked for that.
        uncompressed: The means of the flat gradients that travelled with them.
        received: The mean of the message, which must be finite.
    """

    means: list[torch.Tensor]
    own: list[torch.Tensor]
    uncompressed: Sequence[torch.Tensor]
    received: torch.Tensor


def average_factors(
    factors: list[torch.Tensor],
    dtype: torch.dtype,
    uncompressed: Sequence[torch.Tensor] = (),
    *,
    as_sent: bool,
) -> Generator[Request | tuple[Message, ...], Any, FactorMeans]:
    """Average factors, (matrices, r, elements) each, and flat gradients with them, in messages of `dtype`.

    `as_sent` is for factors that leave the residual: it must lose what travelled, and keep what was rounded.
    """
    if uncompressed:
        message = packed(factors, dtype, uncompressed)
    else:
        (message,) = yield Jointly(all_packed, [(factors, dtype)])
    own = factors
    if as_sent and message.dtype != factors[0].dtype:
        # Read before the message is given away: the mean may come to lie in it.
        own = unpacked(message, like=factors)
    mean = yield Mean(message)
    behind = mean[sum(factor.numel() for factor in factors) :]
    flat_means = behind.split_with_sizes([gradient.numel() for gradient in uncompressed])
    return FactorMeans(unpacked(mean, like=factors), own, flat_means, mean)


def all_packed(items: Sequence[tuple[Sequence[torch.Tensor], torch.dtype]]) -> list[torch.Tensor]:
    """Return the messages of factors of all buckets, `packed` as one: sent without a further copy."""
    kinds: dict[object, list[int]] = {}
    for index, (factors, dtype) in enumerate(items):
        kinds.setdefault((factors[0].device, factors[0].dtype, dtype), []).append(index)
    messages: dict[int, torch.Tensor] = {}
    for some in kinds.values():
        whole = packed([factor for index in some for factor in items[index][0]], items[some[0]][1])
        sizes = [sum(factor.numel() for factor in items[index][0]) for index in some]
        messages.update(zip(some, whole.split_with_sizes(sizes), strict=True))
    return [messages[index] for index in range(len(items))]


def packed(
    factors: Sequence[torch.Tensor], dtype: torch.dtype, uncompressed: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Return a new flat tensor with all factors, and flat gradients behind them."""
    if dtype == torch.float16:
        # Cut off at its range: what is beyond stays in the residual, where an infinite factor would have the
        # step skipped. One that was infinite stays so, for then it should be.
        limit = torch.finfo(dtype).max
        factors = [torch.where(each.isinf(), each, each.clamp(-limit, limit)) for each in factors]
    if factors and accelerators.pays_per_launch(factors[0].device):
        uncompressed = widened(uncompressed, factors[0].dtype)  # torch joins unlike types one by one
    return torch.cat([part.reshape(-1) for part in [*factors, *uncompressed]]).to(dtype)


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the head of `flat` as tensors of the shapes and the type of `like`."""
    sizes = [tensor.numel() for tensor in like]
    parts = flat[: sum(sizes)].to(like[0].dtype).split_with_sizes(sizes)
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
