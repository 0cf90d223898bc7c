"""Factors: the bases that a step starts from, what it leaves for the next one, and how they travel."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from thinwire.algorithms.base import Memory
from thinwire.algorithms.lowrank.slots import BASIS, FACTOR
from thinwire.algorithms.requests import CollectiveRequest, Jointly, Mean, Request
from thinwire.kernels.batching import batched, split_as
from thinwire.kernels.dispatch import orthonormal_bases
from thinwire.kernels.matrices import MatrixGroup, Rows, widened
from thinwire.tensors import accelerators
from thinwire.tensors.layout import stack_view

Answer = TypeVar("Answer")
Round: TypeAlias = Generator[Request | tuple[CollectiveRequest, ...], Any, Answer]
"""A part of an exchange: it yields requests and returns what it has found."""

# Between the seeds of one step and the next: far from any seed a user would choose.
SEED_STRIDE = 1_000_003


class FactorMessages:
    """The messages of a bucket's step: factors in one of them, flat gradients with the first.

    Attributes:
        received: The means of all messages, which must be finite.
        uncompressed: The means of the flat gradients.
    """

    def __init__(self, dtype: torch.dtype, uncompressed: Sequence[torch.Tensor] = ()) -> None:
        self._dtype = dtype
        self._beside = uncompressed
        self.received: list[torch.Tensor] = []
        self.uncompressed: Sequence[torch.Tensor] = ()

    def average(
        self, factors: list[torch.Tensor], *, as_sent: bool
    ) -> Round[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return factors, (matrices, r, elements) each, and their means over the members.

        `as_sent` is for factors that leave the residual: it must lose what travelled, rounded to 16 bits, and
        keep what rounding lost.
        """
        beside = [] if self.received else self._beside
        if beside:
            message = packed(factors, self._dtype, beside)
        else:
            (message,) = yield Jointly(all_packed, [(factors, self._dtype)])
        own = factors
        if as_sent and message.dtype != factors[0].dtype:
            # Read before the message is given away: the mean may come to lie in it.
            own = unpacked(message, like=factors)
        mean = yield Mean(message)
        if beside:
            behind = mean[sum(factor.numel() for factor in factors) :]
            self.uncompressed = behind.split_with_sizes([gradient.numel() for gradient in beside])
        self.received.append(mean)
        return own, unpacked(mean, like=factors)


def all_packed(items: Sequence[tuple[Sequence[torch.Tensor], torch.dtype]]) -> list[torch.Tensor]:
    """Return the messages of factors of all buckets, `packed` as one: sent without a further copy."""

    def together(some: Sequence[tuple[Sequence[torch.Tensor], torch.dtype]]) -> Sequence[torch.Tensor]:
        whole = packed([factor for factors, _ in some for factor in factors], some[0][1])
        return whole.split_with_sizes([sum(factor.numel() for factor in factors) for factors, _ in some])

    return batched(items, lambda item: (item[0][0].device, item[0][0].dtype, item[1]), together)


def packed(
    factors: Sequence[torch.Tensor], dtype: torch.dtype, uncompressed: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Return a new flat tensor with all factors, and flat gradients behind them."""
    if dtype == torch.float16:
        # Clamp to fp16's range, or the step would be skipped; the residual keeps what is cut off. A factor
        # that was infinite before stays infinite, because then the step should be skipped.
        limit = torch.finfo(dtype).max
        factors = [torch.where(factor.isinf(), factor, factor.clamp(-limit, limit)) for factor in factors]
    if factors and accelerators.is_accelerator(factors[0].device):
        uncompressed = widened(uncompressed, factors[0].dtype)  # torch joins unlike types one by one
    return torch.cat([part.reshape(-1) for part in [*factors, *uncompressed]]).to(dtype)


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the head of `flat` as tensors of the shapes and the type of `like`."""
    head = flat[: sum(tensor.numel() for tensor in like)]
    return split_as(head.to(like[0].dtype), [tensor.shape for tensor in like])


class StartingBases:
    """Makes the bases of a bucket."""

    # On accelerators those of all buckets are made at once, at the end of the step before: launches count. On
    # the CPU each bucket's are made when it starts, while messages of those before it are under way.
    def __init__(self, seed: int, *, warm_start: bool) -> None:
        self._seed = seed
        self._warm_start = warm_start
        # With a warm start only dead rows are drawn again: the same ones each time.
        self._first_rows: dict[tuple[tuple[int, int], torch.device], torch.Tensor] = {}

    def of(self, memory: Memory, groups: Sequence[MatrixGroup], *, left: bool) -> list[torch.Tensor]:
        """Return bases, (matrices, r, rows or columns): the last step's mean factors, or random ones.

        Rows that memory lacks, or that died when a gradient had too low a matrix rank, are drawn from a
        standard normal, the same on every process.
        """
        shapes = [(group.matrix_rank, group.matrices[0].shape[0 if left else 1]) for group in groups]
        drawn = self._rows(memory, shapes, groups[0].matrices[0])
        bases = [_made_ahead(memory, group, like) for group, like in zip(groups, drawn, strict=True)]
        missing = [index for index, basis in enumerate(bases) if basis is None]
        factors = memory[FACTOR]
        items = [
            Rows(torch.stack([resized(factors.get(label), drawn[i]) for label in groups[i].labels]), drawn[i])
            for i in missing
        ]
        made = dict(zip(missing, orthonormal_bases(items), strict=True))
        return [made[index] if basis is None else basis for index, basis in enumerate(bases)]

    def ahead(self, memory: Memory, factors: Sequence[torch.Tensor]) -> Round[list[torch.Tensor] | None]:
        """Make what the next step starts from, for all buckets at once; None where that does not pay."""
        if not self._warm_start or not factors or not accelerators.is_accelerator(factors[0].device):
            return None
        drawn = self._rows(memory, [(factor.shape[1], factor.shape[2]) for factor in factors], factors[0])
        # A row that is zero stays zero through every product, and its direction would be lost for good: it
        # died when a gradient had too low a matrix rank, or was never there. So dead rows are replaced.
        items = [Rows(*pair) for pair in zip(factors, drawn, strict=True)]
        made: list[torch.Tensor] = yield Jointly(orthonormal_bases, items)
        return made

    def _rows(
        self, memory: Memory, shapes: Sequence[tuple[int, int]], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return random rows of some shapes, on the device of `like`."""
        # Without a warm start different ones in each step: the same would never see what lies across them.
        seed = self._seed if self._warm_start else self._seed + SEED_STRIDE * memory.step
        known = self._first_rows if self._warm_start else {}
        for shape in shapes:
            if (shape, like.device) not in known:
                known[shape, like.device] = random_rows(seed, shape, like.device)
        dtype = torch.promote_types(like.dtype, torch.float32)  # factors of 16-bit gradients are fp32, too
        return [known[shape, like.device].to(dtype) for shape in shapes]


def _made_ahead(memory: Memory, group: MatrixGroup, like: torch.Tensor) -> torch.Tensor | None:
    """Return the bases of a group that were made ahead, as one batch; None if not all of them were."""
    bases = [memory[BASIS].get(label) for label in group.labels]
    fitting = [basis for basis in bases if basis is not None and basis.shape == like.shape]
    if len(fitting) < len(bases) or any(basis.dtype != like.dtype for basis in fitting):
        return None
    # If they were made as one they mostly still lie so: then there is nothing to copy.
    batch = stack_view(fitting)
    return torch.stack(fitting) if batch is None else batch


def resized(factor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a factor in type and rows of `like`, cut or extended by zeros; zeros if its columns differ."""
    if factor is not None and factor.shape == like.shape:
        return factor.to(like)
    fitting = torch.zeros_like(like)
    if factor is not None and factor.shape[1] == like.shape[1]:
        rows = min(len(factor), len(like))
        fitting[:rows] = factor[:rows]
    return fitting


def random_rows(seed: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return standard normal rows in fp32, the same whatever the device."""
    # Drawn on the CPU: generators of other devices give other numbers, and members may have other devices.
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = torch.randn(shape, generator=generator, dtype=torch.float32)
    return accelerators.to_device_async(device, rows)
