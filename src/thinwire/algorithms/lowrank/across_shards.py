"""The two rounds of PowerSGD on whole matrices of which each process holds the rows of a shard.

With M = [M₁; …; M_W] over the W shards of a replica, the left factor M Q has a block of rows for each shard,
and the right one is a sum over shards, P̂ᵀ M = Σ P̂ᵀ_w M_w. So the shards of a replica put the one together
and add up the other over their fast links. Over the slow ones each sends its rows of the left factor and its
part, one in W, of the right one: r (m + n) numbers for a replica and an m × n matrix, and the result is that
of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from thinwire.algorithms import accelerators
from thinwire.algorithms.base import Bucket, Memory
from thinwire.algorithms.kernels.dispatch import orthonormal_rows, products, projections
from thinwire.algorithms.kernels.matrices import Factors, MatrixGroup
from thinwire.algorithms.lowrank.bases import StartingBases
from thinwire.algorithms.lowrank.config import LowRank
from thinwire.algorithms.lowrank.packing import packed, uncompressed_means, unpacked
from thinwire.algorithms.lowrank.two_rounds import Approximation
from thinwire.algorithms.requests import Jointly, Mean, Message, Request, ShardGather, ShardSum
from thinwire.plan import Cut

__all__ = ["approximate_whole", "norm_of_rows"]


def approximate_whole(
    config: LowRank,
    bases: StartingBases,
    groups: Sequence[MatrixGroup],
    uncompressed: Sequence[torch.Tensor],
    memory: Memory,
    bucket: Bucket,
    cuts: Sequence[Cut],
) -> Generator[Request | tuple[Message, ...], Any, Approximation]:
    """As `two_rounds.approximate`, of whole matrices: each group has this shard's rows of its matrices.

    The bases of the terms are this shard's rows of P̂; `own` and `mean` are whole.

    Args:
        config: Power iterations and wire type.
        bases: Makes the first ones.
        groups: The rows of this shard.
        uncompressed: Flat gradients that travel in the first message: this shard's.
        memory: Only read.
        bucket: Its type decides that of the messages; its loss scale that of the matrices.
        cuts: Of each group.

    Cost: as of `two_rounds.approximate`; between the shards, a gather of the left factor, a sum of the right
    one and a gather of its mean.
    """
    starts = rights = bases.of(memory, groups, left=False)
    dtype = config.message_dtype(bucket.flat.dtype)
    received: list[torch.Tensor] = []
    uncompressed_mean: Sequence[torch.Tensor] = ()
    for iteration in range(config.power_iterations):
        is_first, is_last = iteration == 0, iteration + 1 == config.power_iterations
        rows = products(groups, rights, bucket.loss_scale, add_error=is_first)
        mean = yield Mean(packed(rows, dtype, uncompressed if is_first else ()))
        received.append(mean)
        if is_first:
            uncompressed_mean = uncompressed_means(mean, rows, uncompressed)
        # Padded, since the last shards may have fewer rows: a gather takes as much from each.
        padded = [
            pad(each, (0, cut.height - each.shape[2]))
            for each, cut in zip(unpacked(mean, like=rows), cuts, strict=True)
        ]
        of_shards = yield ShardGather(torch.cat([each.reshape(-1) for each in padded]))
        # Of whole factors, on every shard: so the bases are those of the whole matrices, dead rows included.
        lefts = yield Jointly(orthonormal_rows, _whole_lefts(of_shards, padded, cuts))
        # Of the bases again this shard's rows; the last shards may have fewer, or none.
        first_rows = [min(cut.shard * cut.height, cut.shape[0]) for cut in cuts]
        lefts = [
            left[:, :, first : first + of.shape[2]].contiguous()
            for left, first, of in zip(lefts, first_rows, rows, strict=True)
        ]

        parts = projections(groups, lefts, bucket.loss_scale, add_error=False)
        total = yield ShardSum(torch.cat([part.reshape(-1) for part in parts]))
        message = packed([total], dtype)
        own = unpacked(message if config.wire_dtype is not None else total, like=parts)
        # Each shard averages a share: so it travels once between replicas, and not once for each shard.
        shard, num_shards = cuts[0].shard, cuts[0].num_shards
        length = -(-len(message) // num_shards)
        share = pad(message, (0, length * num_shards - len(message))).view(num_shards, length)[shard]
        mean = yield Mean(share)
        received.append(mean)
        of_shards = yield ShardGather(mean)
        means = unpacked(of_shards.reshape(-1), like=own)
        if not is_last:
            rights = yield Jointly(orthonormal_rows, means)
    terms = [[Factors(*each)] for each in zip(lefts, own, means, strict=True)]
    return Approximation(terms, uncompressed_mean, received, starts)


def _whole_lefts(
    of_shards: torch.Tensor, padded: Sequence[torch.Tensor], cuts: Sequence[Cut]
) -> list[torch.Tensor]:
    """Return whole left factors, (matrices, r, rows), of what the shards have sent one after the other."""
    num_shards = len(of_shards)
    wholes = []
    parts = of_shards.split_with_sizes([each.numel() for each in padded], dim=1)
    for part, like, cut in zip(parts, padded, cuts, strict=True):
        count, matrix_rank, height = like.shape
        side_by_side = part.reshape(num_shards, count, matrix_rank, height).permute(1, 2, 0, 3)
        # What is padded stands behind the last row of all: only the last shards lack rows.
        wholes.append(side_by_side.reshape(count, matrix_rank, -1)[:, :, : cut.shape[0]].contiguous())
    return wholes


def norm_of_rows(term: Factors) -> torch.Tensor:
    """Return, for each matrix, the norm of what was sent of this shard's rows, ‖P̂_w P̂ᵀ M‖: (matrices, 1).

    Args:
        term: Its basis is this shard's rows of P̂.
    """
    # From two Gram matrices of r × r: the product itself would have all the elements of the shard.
    dtype = accelerators.widest_dtype(term.own.device)
    grams = [side.to(dtype) @ side.to(dtype).mT for side in (term.basis, term.own)]
    squares = (grams[0] * grams[1]).sum(dim=(1, 2))
    return squares.clamp(min=0).sqrt().to(term.own.dtype).unsqueeze(1)
