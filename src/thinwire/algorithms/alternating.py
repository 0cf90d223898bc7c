"""One round an iteration: project on the left factor in one, on the right factor in the next.

Sources: Zhang et al., "ACP-SGD" (ICDCS 2023); Vogels et al., "PowerGossip" (arXiv 2008.01425), algorithm
2, whose form the reference implementation of PowerSGD has: several iterations a step each send a part
of what the ones before left over, and their results add up.
"""

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
from thinwire.algorithms.passes import products, projections, subtract_own
from thinwire.algorithms.rounds import as_sent, packed, riders, unpacked

__all__ = ["alternate"]


def alternate(
    config: LowRank,
    groups: Sequence[MatrixGroup],
    whole: Sequence[torch.Tensor],
    memory: Memory,
    bucket: Bucket,
) -> Generator[torch.Tensor, torch.Tensor, tuple[list[Terms], Sequence[torch.Tensor]]]:
    """Like `rounds.approximate`, with one round an iteration.

    Args:
        config: Iterations a step and wire type.
        groups: The matrices; on return less the own projections of all iterations but the last.
        whole: Flat gradients that ride along in the first message.
        memory: Only read; its step tells whose turn it is.
        bucket: Its type is that of the messages; its loss scale that of the matrices.

    Returns:
        The factors of each group, one an iteration, and the means of `whole`.

    Cost: one round an iteration, which reads every matrix once and, but for the last, updates it.
    """
    turn = (memory.step - config.warmup_steps) * config.power_iterations
    bases = starting_bases(config, memory, groups, left=turn % 2 == 0)
    terms: list[list[Factors]] = [[] for _ in groups]
    whole_means: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        first, left = iteration == 0, (turn + iteration) % 2 == 0
        owns = [
            _projected(group, basis, bucket.loss_scale, left=left, add_error=first)
            for group, basis in zip(groups, bases, strict=True)
        ]
        dtype = config.message_dtype(bucket.flat.dtype)
        message = packed(owns, dtype, riding=whole if first else ())
        owns = as_sent(config, message, owns)
        mean = yield message
        if first:
            whole_means = riders(mean, owns, whole)
        means = unpacked(mean, like=owns)
        for found, basis, own, group_mean in zip(terms, bases, owns, means, strict=True):
            found.append(Factors(basis, own, group_mean, basis_is_left=left))
        if iteration + 1 < config.power_iterations:
            for group, found in zip(groups, terms, strict=True):
                subtract_own(group, found[-1])
            bases = orthonormal_rows(means)
    return list(terms), whole_means


def _projected(
    group: MatrixGroup, basis: torch.Tensor, loss_scale: torch.Tensor | None, *, left: bool, add_error: bool
) -> torch.Tensor:
    """P̂ᵀ M or Q̂ᵀ Mᵀ of every matrix, after adding its error to it."""
    if not left:
        return products(group, basis, loss_scale, add_error=add_error)
    if add_error:
        group.add_errors(loss_scale)
    return projections(group, basis)
