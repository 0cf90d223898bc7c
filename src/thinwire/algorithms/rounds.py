"""The two rounds of PowerSGD on a list of matrices, and how factors are packed into messages."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from thinwire.algorithms.base import Bucket, Memory
from thinwire.algorithms.lowrank import LowRank
from thinwire.algorithms.matrices import (
    Factors,
    MatrixGroup,
    Terms,
    starting_bases,
)
from thinwire.algorithms.orthonormal import orthonormal_rows
from thinwire.algorithms.passes import products, projections

__all__ = ["approximate", "as_sent", "packed", "riders", "unpacked"]


def approximate(
    config: LowRank,
    groups: Sequence[MatrixGroup],
    whole: Sequence[torch.Tensor],
    memory: Memory,
    bucket: Bucket,
) -> Generator[torch.Tensor, torch.Tensor, tuple[list[Terms], Sequence[torch.Tensor]]]:
    """Add its error to every matrix, in place, and find the factors of the mean: the rounds of a step.

    Args:
        config: Power iterations and wire type.
        groups: The matrices.
        whole: Flat gradients that ride along in the first message.
        memory: Only read.
        bucket: Its type decides that of the messages; its loss scale that of the matrices.

    Returns:
        The factors of each group, and the means of `whole`.

    Cost: two rounds a power iteration; in each, every matrix is read twice (and once written).
    """
    rights = starting_bases(config, memory, groups, left=False)
    dtype = config.message_dtype(bucket.flat.dtype)
    whole_means: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        first, last = iteration == 0, iteration + 1 == config.power_iterations
        lefts = [
            products(*pair, bucket.loss_scale, add_error=first) for pair in zip(groups, rights, strict=True)
        ]
        mean = yield packed(lefts, dtype, riding=whole if first else ())
        if first:
            whole_means = riders(mean, lefts, whole)
        lefts = orthonormal_rows(unpacked(mean, like=lefts))

        owns = [projections(group, left) for group, left in zip(groups, lefts, strict=True)]
        message = packed(owns, dtype)
        owns = as_sent(config, message, owns)
        means = unpacked((yield message), like=owns)
        if not last:
            rights = orthonormal_rows(means)
    return [[Factors(*each)] for each in zip(lefts, owns, means, strict=True)], whole_means


def packed(
    factors: Sequence[torch.Tensor], dtype: torch.dtype, riding: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """A new flat tensor with all factors, cut off at the range of fp16, and what rides along.

    A factor that was infinite stays so: it tells all processes to skip the step.
    """
    if dtype == torch.float16:
        factors = [_saturated(factor, torch.finfo(dtype).max) for factor in factors]
    return torch.cat([part.reshape(-1) for part in [*factors, *riding]]).to(dtype)


def _saturated(factor: torch.Tensor, most: float) -> torch.Tensor:
    return torch.where(factor.isinf(), factor, factor.clamp(-most, most))


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The head of `flat` as tensors of the shapes and the type of `like`."""
    sizes = [tensor.numel() for tensor in like]
    parts = flat[: sum(sizes)].to(like[0].dtype).split_with_sizes(sizes)
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def riders(
    mean: torch.Tensor, factors: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The means of what rode along behind the factors of a first message."""
    rest = mean[sum(factor.numel() for factor in factors) :]
    return rest.split_with_sizes([gradient.numel() for gradient in whole])


def as_sent(config: LowRank, message: torch.Tensor, owns: list[torch.Tensor]) -> list[torch.Tensor]:
    """`owns` as they travel: rounded, if in 16 bits. What travels is what counts as paid."""
    return owns if config.wire_dtype is None else unpacked(message, like=owns)
