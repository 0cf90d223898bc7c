"""Random numbers for stochastic rounding, computed from their position: no generator has a state to keep.

Each depends on the seed, the step, the parameter's name, the element, and the rounding member; not on the
bucket, its order, or how many were drawn before. So a resumed run draws the same numbers as one that goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import torch

from thinwire.plan import ParameterSpec
from thinwire.tensors.accelerators import DeviceCopies, to_device_async
from thinwire.tensors.blocks import Blocks

WORD = 0xFFFFFFFF
KEY_BYTES = 4


class RandomBits(NamedTuple):
    """Random numbers for each element of some blocks."""

    keys: torch.Tensor  # one per parameter, int32
    bases: torch.Tensor  # per parameter: the position in it that block 0 of the bucket would have, int64
    owners: torch.Tensor  # the parameter of each of these blocks, int32
    first: int = 0  # the index of the first of these blocks

    def of(self, some: slice) -> RandomBits:
        """Return the random numbers of some of the blocks."""
        return RandomBits(self.keys, self.bases, self.owners[some], self.first + some.start)

    def uniform(self, block: int, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers from 0 to below 1, shape (blocks, block)."""
        # The finalizer with the lowest bias of Ellis and Wellons' hash search ("lowbias32"): only integers,
        # so that every device draws the same. In 64 bits, as torch has no product of unsigned 32-bit ones.
        device = self.owners.device
        numbers = torch.arange(self.first, self.first + len(self.owners), device=device)
        firsts = numbers * block + self.bases.index_select(0, self.owners)
        positions = firsts[:, None] + torch.arange(block, device=device)
        words = (positions * 0x9E3779B1 + self.keys.index_select(0, self.owners)[:, None]) & WORD
        words ^= words >> 16
        words = (words * 0x21F0AAAD) & WORD
        words ^= words >> 15
        words = (words * 0x735A2D97) & WORD
        words ^= words >> 15
        return (words >> 8).to(dtype) / (1 << 24)


@dataclass(frozen=True)
class CounterRNG:
    """The source of a bucket's draws: only one key per parameter changes from step to step."""

    blocks: Blocks
    specs: Sequence[ParameterSpec]
    seed: int

    def draws(self, step: int, rounders: Iterable[int], device: torch.device) -> list[RandomBits]:
        """Return the draws of each rounding member, in one step."""
        digests = bytearray()
        for rounder in rounders:
            common = blake2b(f"{self.seed} {step} {rounder} ".encode(), digest_size=KEY_BYTES)
            for name in self._names:
                (of_name := common.copy()).update(name)
                digests += of_name.digest()
        # Copy once: with an accelerator, each copy costs the host as much as several launches.
        keys = to_device_async(device, torch.frombuffer(digests, dtype=torch.int32))
        count = len(self.specs)
        return [
            RandomBits(keys[first : first + count], self._bases[device], self._owners[device])
            for first in range(0, len(keys), count)
        ]

    @cached_property
    def _names(self) -> list[bytes]:
        return [spec.name.encode() for spec in self.specs]

    @cached_property
    def _bases(self) -> DeviceCopies:
        # A part of a parameter draws the same numbers as the whole one would there.
        starts = zip(self.specs, self.blocks.starts, strict=False)
        return DeviceCopies(
            torch.tensor([spec.start - first * self.blocks.block for spec, first in starts], device="cpu")
        )

    @cached_property
    def _owners(self) -> DeviceCopies:
        return DeviceCopies(self.blocks.spread(range(len(self.specs))).int())
