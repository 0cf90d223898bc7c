"""One round per iteration: project on the left factor in one, on the right factor in the next.

Sources: Zhang et al., "ACP-SGD" (ICDCS 2023); Vogels et al., "PowerGossip" (arXiv 2008.01425), algorithm
2, whose form the reference implementation of PowerSGD has: several iterations per step each send a part
of what the ones before left over, and their results add up.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from thinwire.algorithms.base import Bucket, Memory
from thinwire.algorithms.lowrank.bases import StartingBases
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.factor_messages import average_factors
from thinwire.algorithms.lowrank.two_rounds import Approximation
from thinwire.algorithms.requests import Jointly, Message, Request
from thinwire.kernels.dispatch import orthonormal_rows, products, projections, subtract_own
from thinwire.kernels.matrices import Asked, Factors, MatrixGroup


def alternate(
    config: LowRank,
    bases: StartingBases,
    groups: Sequence[MatrixGroup],
    uncompressed: Sequence[torch.Tensor],
    memory: Memory,
    bucket: Bucket,
) -> Generator[Request | tuple[Message, ...], Any, Approximation]:
    """As `two_rounds.approximate`, with one round for each iteration.

    Cost: one round for each iteration, which reads every matrix once and, but for the last, updates it.
    """
    # By the count of committed steps, which all members have and a saved state keeps: the factor in memory is
    # of the side whose turn it is.
    turn = (memory.step - config.warmup_steps) * config.power_iterations
    starts = fixed = bases.of(memory, groups, left=turn % 2 == 0)
    dtype, scale = config.message_dtype(bucket.flat.dtype), bucket.loss_scale
    terms: list[list[Factors]] = [[] for _ in groups]
    received: list[torch.Tensor] = []
    uncompressed_mean: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        is_first, is_left = iteration == 0, (turn + iteration) % 2 == 0
        project = projections if is_left else products
        asked = [Asked(*each, scale, is_first) for each in zip(groups, fixed, strict=True)]
        own = yield Jointly(project, asked)
        beside = uncompressed if is_first else ()
        arrived = yield from average_factors(own, dtype, beside, as_sent=True)
        received.append(arrived.received)
        if is_first:
            uncompressed_mean = arrived.uncompressed
        own, means = arrived.own, arrived.means
        for of_group, basis, projection, group_mean in zip(terms, fixed, own, means, strict=True):
            of_group.append(Factors(basis, projection, group_mean, basis_is_left=is_left))
        # What the last one has not sent, `reconstruct` writes to the residual, in the pass it makes anyway.
        if iteration + 1 < config.power_iterations:
            subtract_own(groups, [of_group[-1] for of_group in terms])
            fixed = yield Jointly(orthonormal_rows, means)
    return Approximation(terms, uncompressed_mean, received, starts)
