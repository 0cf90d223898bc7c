"""What gradients may become in few bits, on trial: each idea is a plan that changes a little of `Quantize`'s.

What does not win is dropped from here; what wins moves into the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from thinwire import Quantize
from thinwire.algorithms import Bucket, Commit, Memory, Slot, quantize
from thinwire.algorithms.base import Algorithm, BucketPlan
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.quantize import QuantizePlan
from thinwire.algorithms.requests import Requests
from thinwire.kernels.torch_codes import CODES
from thinwire.plan import ParameterSpec
from thinwire.tensors.coded import CODEBOOKS, Codebook
from thinwire.tensors.rounding import WORD, Draws

KINDS = ("embeddings", "vectors", "matrices")


def kind_of(spec: ParameterSpec) -> str:
    """Return one of `KINDS`; the head counts as an embedding, biases and LayerNorms as vectors."""
    if len(spec.shape) < 2:
        return "vectors"
    return "embeddings" if spec.name.partition(".")[0] in ("bytes", "positions", "head") else "matrices"


@dataclass(frozen=True, kw_only=True)
class Tried(Quantize):
    """Few bits, differently."""

    planned: type[QuantizePlan]
    decay: float = 1.0
    least: float = 0.0
    first_steps: int = 0
    codebook: Codebook | None = None

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        plan = super().prepare(specs, num_members=num_members)
        assert isinstance(plan, QuantizePlan)
        return self.planned(plan.specs, plan.routes, self, plan.blocks)


class Rotated(QuantizePlan):
    """Each block in a basis of chance, in which its elements are alike (SDP4Bit, arXiv 2410.15526)."""

    def exchange(self, bucket: Bucket, memory: Memory) -> Requests:
        assert self.blocks.are_whole, "blocks of the rotation would be other ones than those of the scales"
        flat, block = bucket.flat, self.blocks.block
        signs, basis = signs_of(len(flat), flat.device), hadamard(block, flat.device)
        turned = ((flat * signs).view(-1, block) @ basis).view(-1)
        yield from super().exchange(Bucket(bucket.specs, turned, bucket.loss_scale, bucket.rank), memory)
        torch.mul((turned.view(-1, block) @ basis).view(-1), signs, out=flat)


@cache
def signs_of(count: int, device: torch.device) -> Tensor:
    drawn = torch.randint(2, (count,), generator=torch.Generator().manual_seed(count))
    return (2.0 * drawn - 1).to(device)


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Return Hadamard's matrix, which is its own inverse; for a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(size)).to(device)


class OfLevels(QuantizePlan):
    """By a codebook of its own."""

    def exchange(self, bucket: Bucket, memory: Memory) -> Requests:
        assert isinstance(self.config, Tried)
        books = {**CODEBOOKS, self.config.bits: self.config.codebook}
        changed: dict[str, Any] = {"CODEBOOKS": books}
        if bucket.flat.device.type == "cpu":
            # Numba's kernels know the levels of the library's codebooks only.
            changed["code_kernels_for"] = lambda like: CODES
        inner, answer = super().exchange(bucket, memory), None
        while True:
            # Only while it computes: other exchanges take turns with it.
            with mock.patch.multiple(quantize, **changed):
                try:
                    request = inner.send(answer)
                except StopIteration:
                    return
            answer = yield request


class Decaying(QuantizePlan):
    """Error feedback that forgets a share of the residual in each step."""

    def exchange(self, bucket: Bucket, memory: Memory) -> Requests:
        assert isinstance(self.config, Tried)
        yield from super().exchange(bucket, memory)
        torch._foreach_mul_([memory[ERROR][name] for name in self.names], self.config.decay)


SIZES = Slot("sizes", is_saved=False)


class Sized(QuantizePlan):
    """Each element in units of what its means were lately: all members know those (as 1-bit Adam does it)."""

    def exchange(self, bucket: Bucket, memory: Memory) -> Requests:
        assert isinstance(self.config, Tried)
        assert self.blocks.are_whole
        flat, decay, block = bucket.flat, self.config.decay, self.blocks.block
        squares = memory[SIZES].setdefault(self.names[0], torch.zeros_like(flat))
        # An element is worth at least a share of its block's, however small it was.
        least = self.config.least * squares.view(-1, block).mean(1, keepdim=True)
        units = (squares.view(-1, block) + least).sqrt_().clamp_(min=1e-12).view(-1)
        divided = flat / units
        yield from super().exchange(Bucket(bucket.specs, divided, bucket.loss_scale, bucket.rank), memory)
        torch.mul(divided, units, out=flat)
        squares.mul_(decay).addcmul_(flat, flat, value=1 - decay)


NOW = Slot("now", is_saved=False)


class Drawn(QuantizePlan):
    """Stochastic rounding by a count of steps on the device, which a CUDA graph can raise."""

    def exchange(self, bucket: Bucket, memory: Memory) -> Requests:
        count = torch.zeros((), dtype=torch.int64, device=bucket.flat.device)
        count = memory[NOW].setdefault(self.names[0], count)
        yield from super().exchange(bucket, memory)
        count += 1

    @cached_property
    def _first_draws(self) -> dict[torch.device, Draws]:
        return {}

    def _draws(self, memory: Memory, bucket: Bucket) -> tuple[Draws, Draws]:
        device = bucket.flat.device
        if device not in self._first_draws:
            self._first_draws[device] = self._drawing.draws(0, [0], device)[0]
        return self._of(memory, bucket.rank, device), self._of(memory, quantize.OF_THE_MEAN, device)

    def _of(self, memory: Memory, who: int, device: torch.device) -> Draws:
        draws = self._first_draws[device]
        words = (draws.keys.long() + memory[NOW][self.names[0]] * 0x9E3779B1 + (who + 2) * 0x85EBCA6B) & WORD
        # Mixed: else a parameter would draw in one step what a different one has drawn in another.
        for factor in (0x21F0AAAD, 0x735A2D97):
            words = ((words ^ (words >> 15)) * factor) & WORD
        return draws._replace(keys=words.int())


class MoreFirst(QuantizePlan):
    """4 bits in the first steps. A graph has no branches: both are exchanged, and one is taken."""

    def exchange(self, bucket: Bucket, memory: Memory) -> Requests:
        assert isinstance(self.config, Tried)
        count = torch.zeros((), dtype=torch.int64, device=bucket.flat.device)
        count = memory[NOW].setdefault(self.names[0], count)
        flat, finer = bucket.flat, bucket.flat.clone()
        more = QuantizePlan(self.specs, self.routes, Quantize(bits=4), self.blocks)
        yield from uncommitted(
            more.exchange(Bucket(bucket.specs, finer, bucket.loss_scale, bucket.rank), memory)
        )
        yield from super().exchange(bucket, memory)
        flat.copy_(torch.where(count < self.config.first_steps, finer, flat))
        count += 1


def uncommitted(exchange: Requests) -> Requests:
    """Make an exchange as a part of a different one, which commits."""
    answer = None
    with suppress(StopIteration):
        while True:
            request = exchange.send(answer)
            answer = None if isinstance(request, Commit) else (yield request)


@dataclass(frozen=True, kw_only=True)
class ByKind(Algorithm):
    """Each kind of parameters by an algorithm of its own."""

    embeddings: Algorithm
    vectors: Algorithm
    matrices: Algorithm

    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        of_kind: Algorithm = getattr(self, kind_of(specs[0]))
        return of_kind.prepare(specs, num_members=num_members)

    @property
    def remembers(self) -> bool:
        return False


def symmetric(bits: int, *magnitudes: float) -> Codebook:
    """Return levels that are best for some distribution, times a block's root mean square."""
    levels = (*[-each for each in reversed(magnitudes)], *magnitudes)
    return Codebook(bits, levels, "root mean square")


# Max (1960): of a Laplacian; of a Gaussian, whose largest numbers are so cut off.
LAPLACIAN = symmetric(2, 0.4196, 1.8340)
THREE_LEVELS = Codebook(2, (-1.2240, 0.0, 0.0, 1.2240), "root mean square")
GAUSSIAN = symmetric(4, 0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)
TWO, EIGHT = Quantize(bits=2), Quantize(bits=8)
ROTATED = Tried(bits=2, planned=Rotated)
TRIED: dict[str, Algorithm] = {
    "2 bits, embeddings and vectors in 8": ByKind(embeddings=EIGHT, vectors=EIGHT, matrices=TWO),
    "2 bits, blocks of 32": Quantize(bits=2, block=32),
    "2 bits, rotated": ROTATED,
    "2 bits, matrices rotated, the rest in 8": ByKind(embeddings=EIGHT, vectors=EIGHT, matrices=ROTATED),
    "4 bits, unbiased": Tried(bits=4, rounding="stochastic", planned=Drawn),
    "2 bits, sized by means": Tried(bits=2, planned=Sized, decay=0.99, least=0.01),
    "2 bits, sized by late means": Tried(bits=2, planned=Sized, decay=0.9, least=0.1),
    "4 bits, sized by means": Tried(bits=4, planned=Sized, decay=0.99, least=0.01),
    "2 bits, 4 bits for 112 steps": Tried(bits=2, planned=MoreFirst, first_steps=112),
    "2 bits, 4 bits for 450 steps": Tried(bits=2, planned=MoreFirst, first_steps=450),
    "2 bits, three levels": Tried(bits=2, planned=OfLevels, codebook=THREE_LEVELS),
    "2 bits, levels of a Laplacian": Tried(bits=2, planned=OfLevels, codebook=LAPLACIAN),
    "2 bits, residual × 0.5": Tried(bits=2, error_feedback=True, planned=Decaying, decay=0.5),
    "2 bits, residual × 0.9": Tried(bits=2, error_feedback=True, planned=Decaying, decay=0.9),
    "2 bits, vectors in 8": ByKind(embeddings=TWO, vectors=EIGHT, matrices=TWO),
    "2 bits, embeddings in 8": ByKind(embeddings=EIGHT, vectors=TWO, matrices=TWO),
    "2 bits, matrices in 3": ByKind(embeddings=TWO, vectors=TWO, matrices=Quantize(bits=3)),
    "4 bits, levels of a Gaussian": Tried(bits=4, planned=OfLevels, codebook=GAUSSIAN),
    "4 bits, rotated": Tried(bits=4, planned=Rotated),
}
