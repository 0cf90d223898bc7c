"""The two rounds of PowerSGD on a list of matrices."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.algorithms.base import Bucket, Memory
from thinwire.algorithms.kernels.dispatch import orthonormal_rows, products, projections
from thinwire.algorithms.kernels.matrices import Factors, MatrixGroup, Terms
from thinwire.algorithms.lowrank.bases import StartingBases
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.packing import as_sent, packed, uncompressed_means, unpacked
from thinwire.algorithms.requests import Jointly, Mean, Message, Request

__all__ = ["Approximation", "approximate"]


@dataclass(frozen=True)
class Approximation:
    """What the rounds of a step make known.

    Attributes:
        terms: The factors of each group.
        uncompressed: The means of the flat gradients that travelled with them.
        received: All means, flat.
        starts: The bases that the step started from, of each group.
    """

    terms: Sequence[Terms]
    uncompressed: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor]
    starts: Sequence[torch.Tensor]


def approximate(
    config: LowRank,
    bases: StartingBases,
    groups: Sequence[MatrixGroup],
    uncompressed: Sequence[torch.Tensor],
    memory: Memory,
    bucket: Bucket,
) -> Generator[Request | tuple[Message, ...], Any, Approximation]:
    """Add its residual to every matrix, in place, and find the factors of the mean.

    Args:
        config: Power iterations and wire type.
        bases: Makes the first ones.
        groups: The matrices.
        uncompressed: Flat gradients that travel in the first message.
        memory: Only read.
        bucket: Its type decides that of the messages; its loss scale that of the matrices.

    Cost: two rounds for each power iteration; in each, every matrix is read twice (and once written).
    """
    starts = rights = bases.of(memory, groups, left=False)
    dtype = config.message_dtype(bucket.flat.dtype)
    received: list[torch.Tensor] = []
    uncompressed_mean: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        is_first, is_last = iteration == 0, iteration + 1 == config.power_iterations
        # The residual only once: later iterations find it in the matrices already.
        lefts = products(groups, rights, bucket.loss_scale, add_error=is_first)
        mean = yield Mean(packed(lefts, dtype, uncompressed if is_first else ()))
        received.append(mean)
        if is_first:
            uncompressed_mean = uncompressed_means(mean, lefts, uncompressed)
        lefts = yield Jointly(orthonormal_rows, unpacked(mean, like=lefts))

        own = projections(groups, lefts, bucket.loss_scale, add_error=False)
        message = packed(own, dtype)
        # Before the message is handed over, which is given away: the mean may come to lie in it. Of the left
        # factors nobody need know how they were rounded: any basis will do that all members have.
        own = as_sent(config.wire_dtype, message, own)
        mean = yield Mean(message)
        received.append(mean)
        means = unpacked(mean, like=own)
        if not is_last:
            rights = yield Jointly(orthonormal_rows, means)
    terms = [[Factors(*each)] for each in zip(lefts, own, means, strict=True)]
    return Approximation(terms, uncompressed_mean, received, starts)
