"""The two rounds of PowerSGD on a list of matrices."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.algorithms.base import Bucket, Memory
from thinwire.algorithms.lowrank.bases import StartingBases
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.factor_messages import average_factors
from thinwire.algorithms.requests import Jointly, Message, Request
from thinwire.kernels.dispatch import orthonormal_rows, products, projections
from thinwire.kernels.matrices import Asked, Factors, MatrixGroup, Terms


@dataclass(frozen=True)
class Approximation:
    """What the rounds of a step make known.

    Attributes:
        terms: The factors of each group.
        uncompressed: The means of the flat gradients that travelled with them.
        received: What must be finite: all means, flat.
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

    Cost: two rounds for each power iteration; in each iteration, every matrix is read twice (and once
    written).
    """
    starts = rights = bases.of(memory, groups, left=False)
    dtype, scale = config.message_dtype(bucket.flat.dtype), bucket.loss_scale
    received: list[torch.Tensor] = []
    uncompressed_mean: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        is_first, is_last = iteration == 0, iteration + 1 == config.power_iterations
        # The residual only once: later iterations find it in the matrices already.
        asked = [Asked(*each, scale, is_first) for each in zip(groups, rights, strict=True)]
        lefts = yield Jointly(products, asked)
        beside = uncompressed if is_first else ()
        arrived = yield from average_factors(lefts, dtype, beside, as_sent=False)
        received.append(arrived.received)
        if is_first:
            uncompressed_mean = arrived.uncompressed
        lefts = yield Jointly(orthonormal_rows, arrived.means)

        asked = [Asked(*each, scale, add_error=False) for each in zip(groups, lefts, strict=True)]
        own = yield Jointly(projections, asked)
        arrived = yield from average_factors(own, dtype, as_sent=is_last)
        received.append(arrived.received)
        own, means = arrived.own, arrived.means
        if not is_last:
            rights = yield Jointly(orthonormal_rows, means)
    # The last iteration alone: each approximates all of M again, and better than those before it.
    terms = [[Factors(*each)] for each in zip(lefts, own, means, strict=True)]
    return Approximation(terms, uncompressed_mean, received, starts)
