"""How factors are packed into messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.algorithms import accelerators
from thinwire.algorithms.kernels.matrices import widened

__all__ = ["as_sent", "packed", "uncompressed_means", "unpacked"]


def packed(
    factors: Sequence[torch.Tensor], dtype: torch.dtype, uncompressed: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Return a new flat tensor with all factors, and flat gradients behind them.

    Args:
        factors: Of any shapes.
        dtype: Of the message.
        uncompressed: Flat gradients.
    """
    if dtype == torch.float16:
        # Cut off at its range: what is beyond stays in the residual, where an infinite factor would have the
        # step skipped. One that was infinite stays so, for then it should be.
        limit = torch.finfo(dtype).max
        factors = [torch.where(each.isinf(), each, each.clamp(-limit, limit)) for each in factors]
    if factors and accelerators.pays_per_launch(factors[0].device):
        uncompressed = widened(uncompressed, factors[0].dtype)  # torch joins unlike types one by one
    return torch.cat([part.reshape(-1) for part in [*factors, *uncompressed]]).to(dtype)


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the head of `flat` as tensors of the shapes and the type of `like`.

    Args:
        flat: A message.
        like: Of one type.
    """
    sizes = [tensor.numel() for tensor in like]
    parts = flat[: sum(sizes)].to(like[0].dtype).split_with_sizes(sizes)
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def uncompressed_means(
    mean: torch.Tensor, factors: Sequence[torch.Tensor], uncompressed: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return the means of the flat gradients that stood behind the factors of a message.

    Args:
        mean: Of the message.
        factors: As they were packed.
        uncompressed: Of the lengths that were packed.
    """
    behind = mean[sum(factor.numel() for factor in factors) :]
    return behind.split_with_sizes([gradient.numel() for gradient in uncompressed])


def as_sent(wire_dtype: object, message: torch.Tensor, projections: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return projections as they travel: rounded, if in 16 bits.

    Args:
        wire_dtype: The setting, None for no rounding.
        message: With the projections at its head.
        projections: As computed.
    """
    # What travels is what leaves the residual; so the residual takes up what was rounded off.
    return projections if wire_dtype is None else unpacked(message, like=projections)
