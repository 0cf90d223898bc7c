"""Factors: the bases that a step starts from, what it leaves for the next one, and how they travel."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from thinwire.algorithms.base import Memory, Slot
from thinwire.algorithms.lowrank.slots import BASIS, FACTOR
from thinwire.algorithms.requests import CollectiveRequest, Jointly, Mean, Request
from thinwire.kernels.base import Kernels
from thinwire.kernels.matrices import MatrixGroup, Rows, widened
from thinwire.tensors import accelerators

Answer = TypeVar("Answer")
Round: TypeAlias = Generator[Request | tuple[CollectiveRequest, ...], Any, Answer]
"""A part of an exchange: it yields requests and returns what it has found."""

# Between the seeds of one step and the next: far from any seed a user would choose.
SEED_STRIDE = 1_000_003


@dataclass(eq=False)
class BucketMatrices:
    """A bucket's gradients as matrices, in groups, and the kernels that serve all of them.

    One backend for a bucket, that of its largest matrix rank: so its requests are a function of that.
    """

    groups: Sequence[MatrixGroup]
    kernels: Kernels
    device: torch.device


class FactorMessages:
    """The messages of a bucket's step: factors in one of them, flat gradients with the first.

    Attributes:
        received: The means of all messages, which must be finite.
        uncompressed: The means of the flat gradients.
    """

    def __init__(self, dtype: torch.dtype, rooms: Rooms, uncompressed: Sequence[torch.Tensor] = ()) -> None:
        self._dtype, self._rooms = dtype, rooms
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
        like, beside = factors[0], [] if self.received else self._beside
        item = MessageParts(factors, beside, self._dtype, self._rooms, len(self.received))
        kind = like.device, like.dtype, self._dtype
        (message,) = yield Jointly(all_packed, [item], kind)
        own = factors
        if as_sent and message.dtype != like.dtype:
            # Read before the message is given away: the mean may come to lie in it.
            own = unpacked(message, factors)
        mean = yield Mean(message)
        if beside:
            sizes = list(map(torch.numel, beside))
            self.uncompressed = mean[len(mean) - sum(sizes) :].split_with_sizes(sizes)
        self.received.append(mean)
        return own, unpacked(mean, factors)


class MessageParts(NamedTuple):
    """Factors that are to travel as one message, with flat gradients behind them."""

    factors: Sequence[torch.Tensor]
    uncompressed: Sequence[torch.Tensor]
    dtype: torch.dtype  # in which they travel
    rooms: Rooms
    number: int  # of the message in its step


def all_packed(items: Sequence[MessageParts]) -> Sequence[torch.Tensor]:
    """Return the messages of all buckets, views of one tensor: so they are sent without a further copy."""
    first = items[0]
    like, dtype = first.factors[0], first.dtype
    parts, sizes = list[torch.Tensor](), list[int]()
    for item in items:
        factors, uncompressed = item.factors, item.uncompressed
        if dtype == torch.float16:
            factors = [clamped(factor) for factor in factors]
        if uncompressed and accelerators.is_accelerator(like.device):
            uncompressed = widened(uncompressed, like.dtype)  # torch joins unlike types one by one
        of_item = list(map(torch.flatten, (*factors, *uncompressed)))
        sizes.append(sum(map(torch.numel, of_item)))
        parts += of_item
    room = first.rooms.room(("message", first.number, like.shape), (sum(sizes),), like)
    return torch.cat(parts, out=room).to(dtype).split_with_sizes(sizes)


def clamped(factor: torch.Tensor) -> torch.Tensor:
    """Return a factor within fp16's range: the residual keeps what is cut off.

    One that was infinite before stays infinite, because then the step should be skipped.
    """
    limit = torch.finfo(torch.float16).max
    return torch.where(factor.isinf(), factor, factor.clamp(-limit, limit))


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the head of `flat` as tensors of the shapes and the type of `like`."""
    sizes = list(map(torch.numel, like))
    head = flat[: sum(sizes)].to(like[0].dtype)
    return list(map(torch.Tensor.view_as, head.split_with_sizes(sizes), like))


class Rooms:
    """Memory for what the steps of a bucket compute, by role.

    On accelerators it stays from step to step, and with it the tables of addresses that kernels look up; on
    the CPU there is none.
    """

    def __init__(self) -> None:
        self._rooms: dict[Hashable, torch.Tensor] = {}

    def room(self, role: Hashable, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor | None:
        """Return room of a shape, in the wide type and on the device of `like`."""
        if not accelerators.is_accelerator(like.device):
            return None
        room = self._rooms.get(role)
        if room is None or room.shape != shape:
            dtype = torch.promote_types(like.dtype, torch.float32)
            room = self._rooms[role] = torch.empty(shape, dtype=dtype, device=like.device)
        return room


class SlotBatches:
    """The tensors that memory has for groups of matrices: one batch for each group and slot.

    Steps write them in place. So addresses stay, and a step need not stack what lies together.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[str, str, torch.Size], tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}

    def find(
        self, memory: Memory, slot: Slot, labels: Sequence[str], shape: torch.Size
    ) -> torch.Tensor | None:
        """Return the batch of a shape whose parts memory has under some labels; None if it has others."""
        batch, parts = self._batches.get((slot.name, labels[0], shape), (None, ()))
        tensors = memory.slots.get(slot, {})
        return batch if all(map(is_, map(tensors.get, labels), parts)) else None

    def place(
        self,
        memory: Memory,
        slot: Slot,
        labels: Sequence[str],
        new: torch.Tensor,
        before: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the batch like `new` whose parts memory has under some labels from now on, to be written.

        Args:
            memory: That of all buckets.
            slot: What the batch is of.
            labels: Of its parts.
            new: Of its shape and type.
            before: Contents of the parts, if they may stay; zeros where that is unlike them.
        """
        key = slot.name, labels[0], new.shape
        if key not in self._batches:
            batch = torch.empty_like(new, memory_format=torch.contiguous_format)
            self._batches[key] = batch, batch.unbind()
        batch, parts = self._batches[key]
        for part, was in zip(parts, before, strict=False):
            if was is not None and was.shape == part.shape:
                part.copy_(was)
            else:
                part.zero_()
        memory[slot].update(zip(labels, parts, strict=True))
        return batch


class StartingBases:
    """Makes the bases that the steps of a bucket start from."""

    # On accelerators those of all buckets are made at once, at the end of the step before: launches count. On
    # the CPU each bucket's are made when it starts, while messages of those before it are under way.
    def __init__(self, seed: int, batches: SlotBatches, rooms: Rooms, *, warm_start: bool) -> None:
        self._seed, self._batches, self._rooms = seed, batches, rooms
        self._warm_start = warm_start
        # With a warm start only dead rows are drawn again: the same ones each time.
        self._first_rows: dict[tuple[tuple[int, int], torch.device, torch.dtype], torch.Tensor] = {}

    def of(self, memory: Memory, M: BucketMatrices, *, left: bool) -> list[torch.Tensor]:
        """Return bases, (matrices, r, rows or columns): the last step's mean factors, or random ones.

        Rows that memory lacks, or that died when a gradient had too low a matrix rank, are drawn from a
        standard normal, the same on every process.
        """
        side = 0 if left else 1
        if memory[BASIS]:
            bases = [self._found(memory, BASIS, group, side) for group in M.groups]
            made_ahead = [basis for basis in bases if basis is not None]
            if len(made_ahead) == len(bases):
                return made_ahead
        items = []
        for group in M.groups:
            drawn = self._rows(memory, (group.matrix_rank, group.matrices[0].shape[side]), group.matrices[0])
            rows = self._found(memory, FACTOR, group, side)
            if rows is not None and rows.dtype == drawn.dtype:
                rows = rows.clone()
            else:
                factors = memory[FACTOR]
                rows = torch.stack([resized(factors.get(label), drawn) for label in group.labels])
            items.append(Rows(rows, drawn))
        return M.kernels.orthonormal_rows(items)

    def _found(self, memory: Memory, slot: Slot, group: MatrixGroup, side: int) -> torch.Tensor | None:
        """Return the batch that memory has for a group, if it is one of this side."""
        shape = len(group.labels), group.matrix_rank, group.matrices[0].shape[side]
        return self._batches.find(memory, slot, group.labels, torch.Size(shape))

    def ahead(
        self, memory: Memory, M: BucketMatrices, factors: Sequence[torch.Tensor]
    ) -> Round[list[torch.Tensor] | None]:
        """Make what the next step starts from, for all buckets at once; None where that does not pay."""
        if not self._warm_start or not accelerators.is_accelerator(M.device):
            return None
        # A row that is zero stays zero through every product, and its direction would be lost for good: it
        # died when a gradient had too low a matrix rank, or was never there. So dead rows are replaced.
        items = []
        for factor, group in zip(factors, M.groups, strict=True):
            drawn = self._rows(memory, (factor.shape[1], factor.shape[2]), factor)
            room = self._rooms.room(("ahead", group.labels[0], factor.shape), factor.shape, factor)
            items.append(Rows(factor, drawn, room))
        made: list[torch.Tensor] = yield Jointly(M.kernels.orthonormal_rows, items, M.device)
        return made

    def _rows(self, memory: Memory, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """Return random rows of a shape, on the device of `like`."""
        dtype = torch.promote_types(like.dtype, torch.float32)  # factors of 16-bit gradients are fp32, too
        if not self._warm_start:
            # Different ones in each step: the same would never see what lies across them.
            return random_rows(self._seed + SEED_STRIDE * memory.step, shape, like.device).to(dtype)
        key = shape, like.device, dtype
        if key not in self._first_rows:
            self._first_rows[key] = random_rows(self._seed, shape, like.device).to(dtype)
        return self._first_rows[key]


def resized(factor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a factor in type and rows of `like`, cut or extended by zeros; zeros if its columns differ."""
    if factor is not None and factor.shape == like.shape:
        return factor.to(like)
    whole = torch.zeros_like(like)
    if factor is not None and factor.shape[1] == like.shape[1]:
        rows = min(len(factor), len(like))
        whole[:rows] = factor[:rows]
    return whole


def random_rows(seed: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return standard normal rows in fp32, the same whatever the device."""
    # Drawn on the CPU: generators of other devices give other numbers, and members may have other devices.
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = torch.randn(shape, generator=generator, dtype=torch.float32)
    return accelerators.to_device_async(device, rows)
