"""The mean in few bits: what any algorithm may ask for in the middle of its exchange."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.algorithms.requests import AllGather, AllToAll, Message, Request
from thinwire.kernels.base import Averaging, CodeKernels
from thinwire.kernels.dispatch import code_kernels_for
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded
from thinwire.tensors.rounding import Draws


@dataclass(frozen=True)
class LowBitMean:
    """The mean over the members, and what coding has lost on the way.

    Attributes:
        coded: The mean, the same on all members.
        sent: What this member has sent.
        lost: What coding the mean has lost of the blocks that this member averages, shape (blocks, block);
            None if that was not asked for.
        own: Which blocks those are.
        blocks: Of all.
        codebook: The levels.
        kernels: What decodes.
    """

    coded: Coded
    sent: Coded
    lost: torch.Tensor | None
    own: slice
    blocks: Blocks
    codebook: Codebook
    kernels: CodeKernels

    @property
    def scales(self) -> torch.Tensor:
        """Those of the mean, the same on all members: finite where all that was sent is finite."""
        return self.coded.scales

    def write(self, flat: torch.Tensor) -> None:
        """Write the mean."""
        self.kernels.decode(self.coded, self.blocks, self.codebook, flat)

    def unsent(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this member's residual.

        Its mean over the members and the mean in few bits add up to the true mean: what coding the mean has
        lost is in the residual of the member that knows it, for all.
        """
        residual = self.kernels.remainder(flat, self.sent, self.blocks, self.codebook)
        if self.lost is not None:
            # Times the members: of the mean over them, what one alone keeps counts by that much less.
            lost = (self.blocks.num_members * self.lost).view(-1)
            pieces = list(self.blocks.pieces(self.own))
            # All parameters at once: on an accelerator each by itself would be a launch.
            if pieces:
                torch._foreach_add_(
                    [residual[here] for here, _ in pieces], [lost[there] for _, there in pieces]
                )
        return residual


def low_bit_mean(
    flat: torch.Tensor,
    blocks: Blocks,
    codebook: Codebook,
    rank: int,
    draws: tuple[Draws, Draws] | None = None,
    *,
    keeps_lost: bool = False,
) -> Generator[Request | tuple[Message, ...], Any, LowBitMean]:
    """Average in few bits: send everyone its share, average one's own, gather those of the others.

    The mean is the same on all members, to the bit.

    Cost: two rounds, a message each, all in all the bytes of an all-reduce of codes and scales.
    """
    # Not an all-reduce of codes: a ring would round every partial sum again. Here each number is rounded
    # twice (by its member, and as a mean), the sum is of full precision, and all members decode the same
    # bytes.
    own, kernels = blocks.own(rank), code_kernels_for(flat)
    of_member, of_mean = draws or (None, None)
    sent = kernels.encoded(flat, blocks, codebook, of_member)
    received = Coded.arrived((yield AllToAll(sent.message)), blocks.share)
    lost = flat.new_empty(own.stop - own.start, blocks.block) if keeps_lost else None
    # By parameter and place, not by member: whoever averages a block draws the same for it.
    of_share = None if of_mean is None else of_mean.of(own)
    mean = kernels.averaged(Averaging(received, blocks, own, codebook, of_share, lost, flat.dtype))
    coded = Coded.arrived((yield AllGather(mean.message.view(-1))), blocks.share)
    return LowBitMean(coded, sent, lost, own, blocks, codebook, kernels)
