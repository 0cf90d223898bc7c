"""Random numbers for stochastic rounding, made of where they are used: no generator has a state to keep.

Each depends on the seed, the step, the parameter's name, the element, and on who rounds; not on the bucket,
its order, or how many have been drawn before. So a resumed run draws what the run that goes on draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from thinwire.plan import ParameterSpec
from thinwire.tensors.accelerators import sent_to
from thinwire.tensors.blocks import Blocks

WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Draws:
    """A number for each element of some blocks."""

    keys: torch.Tensor  # of each block: that of its parameter, int64
    first: torch.Tensor  # the place of each block's first element in its parameter, int64

    def of(self, some: slice) -> Draws:
        """Return those of some blocks."""
        return Draws(self.keys[some], self.first[some])

    def uniform(self, block: int, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers from 0 to below 1, shape (blocks, block)."""
        # The finalizer with the lowest bias of Ellis and Wellons' hash search ("lowbias32"): whole numbers
        # only, so that every device draws the same. In 64 bits, for torch has no product of unsigned 32.
        places = self.first[:, None] + torch.arange(block, device=self.first.device)
        words = (places * 0x9E3779B1 + self.keys[:, None]) & WORD
        words ^= words >> 16
        words = (words * 0x21F0AAAD) & WORD
        words ^= words >> 15
        words = (words * 0x735A2D97) & WORD
        words ^= words >> 15
        return (words >> 8).to(dtype) / (1 << 24)


def draws_for(
    blocks: Blocks, specs: Sequence[ParameterSpec], seed: int, step: int, who: int, device: torch.device
) -> Draws:
    """Return the draws of one who rounds, in one step."""
    keys = [
        int.from_bytes(blake2b(f"{seed} {step} {who} {spec.name}".encode(), digest_size=4).digest(), "little")
        for spec in specs
    ]
    places = (torch.arange(blocks.total) - blocks.spread(blocks.starts[:-1])) * blocks.block
    # A part of a parameter draws what the whole one would there.
    places += blocks.spread([spec.start for spec in specs])
    return Draws(sent_to(device, blocks.spread(keys)), sent_to(device, places))
