"""The two rounds in which members average what they have coded, each a share of the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from thinwire.algorithms.requests import AllGather, AllToAll, Round
from thinwire.kernels.base import CodeKernels, MeanArgs
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded
from thinwire.tensors.rounding import RandomBits


class CodedPart(NamedTuple):
    """What one member has coded."""

    sent: Coded
    blocks: Blocks
    codebook: Codebook
    draws: RandomBits | None = None  # for the mean of this member's share, if rounding is stochastic
    lost: torch.Tensor | None = None  # as of `MeanArgs`


def average_codes(
    kernels: CodeKernels, parts: Sequence[CodedPart], rank: int, dtype: torch.dtype
) -> Round[list[Coded]]:
    """Return the coded means of all blocks, the same bytes on all members; all parts travel together.

    An all-reduce of codes would round every partial sum again, on a ring. Here each number is rounded twice:
    by its member, and as a mean.
    """
    rows = yield tuple(AllToAll(part.sent.message) for part in parts)
    means = []
    for part, row in zip(parts, rows, strict=True):
        blocks, received = part.blocks, Coded.arrived(row, part.blocks.share)
        args = MeanArgs(received, blocks, blocks.shares[rank], part.codebook, part.draws, part.lost, dtype)
        means.append(kernels.averaged(args))
    gathered = yield tuple(AllGather(mean.message.view(-1)) for mean in means)
    return [Coded.arrived(message, part.blocks.share) for part, message in zip(parts, gathered, strict=True)]
