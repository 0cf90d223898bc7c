"""How factors travel: packed into one message, as they are or in 16 bits; or in 8 bits, in blocks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from thinwire.algorithms.low_bit.blocks import Blocks
from thinwire.algorithms.low_bit.codebooks import CODEBOOKS
from thinwire.algorithms.low_bit.coded import block_bytes
from thinwire.algorithms.low_bit.mean import LowBitMean, low_bit_mean
from thinwire.algorithms.lowrank.joint import all_packed
from thinwire.algorithms.lowrank.packing import as_sent, packed, uncompressed_means, unpacked
from thinwire.algorithms.requests import Jointly, Mean, Message, Request

__all__ = ["BLOCK", "FactorMeans", "FactorWire", "coded_bytes", "num_blocks"]

# Elements of a factor that share a scale: a scale adds a quarter of a bit to each.
BLOCK = 64


def num_blocks(side: int, matrix_rank: int) -> int:
    """Return the blocks of one factor, the last of which may be shorter.

    Args:
        side: Rows or columns of the matrix.
        matrix_rank: Of the factor.
    """
    return -(-side * matrix_rank // BLOCK)


def coded_bytes(blocks: int, bits: int) -> int:
    """Return the bytes that blocks of factors take, with their scales.

    Args:
        blocks: How many.
        bits: Of each element.
    """
    return blocks * block_bytes(BLOCK, bits)


class FactorMeans(NamedTuple):
    """What a round of factors makes known.

    Attributes:
        means: Of the factors, the same on all members.
        own: This member's factors as they count in the means: the mean over the members of what they are is
            `means`, to the rounding of the types on the way. As they were, where nobody asked.
        uncompressed: The means of the flat gradients that travelled with them.
        received: What must be finite, the same on all members.
    """

    means: list[torch.Tensor]
    own: list[torch.Tensor]
    uncompressed: Sequence[torch.Tensor]
    received: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class FactorWire:
    """How the factors of a bucket travel.

    Args:
        wire_dtype: The setting, None for the factors' own type.
        bits: Of each element, in blocks with a scale of their own; None for one of torch's types.
        num_members: Of the group.
        keeps_lost: Whether there is a residual, which takes up what coding the mean has lost.
    """

    wire_dtype: object = None
    bits: int | None = None
    num_members: int = 1
    keeps_lost: bool = True
    _blocks: dict[tuple[int, ...], Blocks] = field(default_factory=dict, compare=False, repr=False)

    def averaged(
        self,
        factors: list[torch.Tensor],
        uncompressed: Sequence[torch.Tensor],
        dtype: torch.dtype,
        rank: int,
        *,
        wants_own: bool,
    ) -> Generator[Request | tuple[Message, ...], Any, FactorMeans]:
        """Average factors over the members, and flat gradients with them.

        Args:
            factors: Of each group (matrices, r, elements), fp32 or fp64.
            uncompressed: Flat gradients that travel along.
            dtype: In which the uncompressed travel, and factors that are not coded.
            rank: This member's place in the group.
            wants_own: Whether they are projections, and what is sent of them leaves the residual.

        Cost: one round; of coded factors two.
        """
        if self.bits is not None:
            return (yield from self._coded(factors, uncompressed, dtype, rank, wants_own=wants_own))
        if uncompressed:
            message = packed(factors, dtype, uncompressed)
        else:
            (message,) = yield Jointly(all_packed, [(factors, dtype)])
        # Before the message is handed over, which is given away: the mean may come to lie in it.
        own = as_sent(self.wire_dtype, message, factors) if wants_own else factors
        mean = yield Mean(message)
        beside = uncompressed_means(mean, factors, uncompressed) if uncompressed else ()
        return FactorMeans(unpacked(mean, like=factors), own, beside, (mean,))

    def _coded(
        self,
        factors: list[torch.Tensor],
        uncompressed: Sequence[torch.Tensor],
        dtype: torch.dtype,
        rank: int,
        *,
        wants_own: bool,
    ) -> Generator[Request | tuple[Message, ...], Any, FactorMeans]:
        assert self.bits is not None
        flat = torch.cat([factor.reshape(-1) for factor in factors])
        # Each matrix begins a new block: what becomes of it does not depend on its neighbours in the bucket.
        numels = tuple(factor[0].numel() for factor in factors for _ in range(len(factor)))
        # Kept: the lengths are those of the plan, and the same in every step.
        if numels not in self._blocks:
            self._blocks[numels] = Blocks(numels, BLOCK, self.num_members)
        blocks = self._blocks[numels]
        keeps_lost = wants_own and self.keeps_lost
        coding = low_bit_mean(flat, blocks, CODEBOOKS[self.bits], rank, keeps_lost=keeps_lost)
        beside: Sequence[torch.Tensor] = ()
        received: tuple[torch.Tensor, ...] = ()
        answer: Any = None
        while True:
            try:
                request: Any = coding.send(answer)
            except StopIteration as end:
                mean: LowBitMean = end.value
                break
            if uncompressed and not received:
                # With the first message: in a round of their own they would cost a latency more.
                message = torch.cat([gradient.to(dtype) for gradient in uncompressed])
                answer, flat_mean = yield request, Mean(message)
                beside = flat_mean.split_with_sizes([gradient.numel() for gradient in uncompressed])
                received = (flat_mean,)
            else:
                answer = yield request
        decoded = torch.empty_like(flat)
        mean.write(decoded)
        own = factors
        if wants_own:
            sent = torch.empty_like(flat)
            mean.as_sent(sent)
            if mean.lost is not None:
                # What coding the mean has lost has reached nobody, so it must not leave the residual: the
                # member that knows it keeps it for all, times their number.
                lost = mean.lost.view(-1)
                pieces = list(blocks.pieces(mean.own))
                # All matrices at once: on an accelerator each by itself would be a launch.
                if pieces:
                    torch._foreach_sub_(
                        [sent[here] for here, _ in pieces],
                        [lost[there] for _, there in pieces],
                        alpha=self.num_members,
                    )
            own = unpacked(sent, like=factors)
        # Only the gathered scales are the same on all members; one that is not finite shows what is not.
        return FactorMeans(unpacked(decoded, like=factors), own, beside, (mean.scales.float(), *received))
