"""Factors of M, a bucket's gradients as matrices: starting bases, products, and messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import is_

import torch

from thinwire.algorithms.base import Memory, Slot
from thinwire.algorithms.lowrank.slots import BASIS, FACTOR
from thinwire.algorithms.requests import Jointly, Mean, RunPart
from thinwire.kernels.backend import Kernels
from thinwire.kernels.matrices import MatmulBatch, MatrixGroup, Rows
from thinwire.tensors import accelerators

# Added to the seed in each step: larger than the difference of any seeds a user would choose.
SEED_STRIDE = 1_000_003


class Workspace:
    """Tensors that are reused in every step, so that kernels' tables of their addresses stay valid."""

    def __init__(self, seed: int, *, warm_start: bool = True) -> None:
        self.seed, self.warm_start = seed, warm_start
        self.M: BucketMatrices | None = None  # the last step's, if the next one may have the same addresses
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._batches: dict[tuple[str, str, torch.Size], tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self.drawn: dict[Hashable, torch.Tensor] = {}  # random rows by shape, device and type

    def buffer(self, role: Hashable, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor | None:
        """Return a buffer for a result, in the wide dtype and on the device of `like`; None on the CPU."""
        if not accelerators.is_accelerator(like.device):
            return None
        buffer = self._buffers.get(role)
        if buffer is None or buffer.shape != shape:
            dtype = torch.promote_types(like.dtype, torch.float32)
            buffer = self._buffers[role] = torch.empty(shape, dtype=dtype, device=like.device)
        return buffer

    def find_batch(
        self, memory: Memory, slot: Slot, labels: Sequence[str], shape: torch.Size
    ) -> torch.Tensor | None:
        """Return the batch whose parts memory holds under some labels; None if memory holds other tensors."""
        batch, parts = self._batches.get((slot.name, labels[0], shape), (None, ()))
        tensors = memory.slots.get(slot, {})
        return batch if all(map(is_, map(tensors.get, labels), parts)) else None

    def place_batch(
        self,
        memory: Memory,
        slot: Slot,
        labels: Sequence[str],
        new: torch.Tensor,
        before: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return a batch like `new`, to be written, and store its parts in memory under some labels.

        It holds the values of `before`, and zeros where `before` has another shape.
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


@dataclass(eq=False)
class BucketMatrices:
    """The matrices M of a bucket, in groups of one shape and matrix rank.

    They are reused while gradients and residuals keep their addresses. One backend serves the whole bucket,
    that of its largest matrix rank: so its requests depend only on that rank.
    """

    groups: Sequence[MatrixGroup]  # they hold the gradients only during a step
    kernels: Kernels
    device: torch.device
    workspace: Workspace
    key: Hashable  # the bucket's address, and what chooses the kernels
    errors: Sequence[torch.Tensor | None]  # the residuals, flat
    written: Sequence[Sequence[torch.Tensor] | None]  # residuals by group, if all can be written in place
    wide: torch.dtype | None  # gradients are copied to it if the kernels don't take their dtype
    loss_scale: torch.Tensor | None = None  # this step's

    def products(
        self, Q: Sequence[torch.Tensor], role: str, *, add_error: bool
    ) -> RunPart[list[torch.Tensor]]:
        """Multiply: M Q. All factors are stored transposed, so this is (M Q)ᵀ, (matrices, r, rows)."""
        return self._multiply(self.kernels.products, 0, Q, role, add_error)

    def projections(
        self, P: Sequence[torch.Tensor], role: str, *, add_error: bool = False
    ) -> RunPart[list[torch.Tensor]]:
        """Multiply: Mᵀ P. Stored transposed: (matrices, r, columns)."""
        return self._multiply(self.kernels.projections, 1, P, role, add_error)

    def _multiply(
        self,
        kernel: Callable[[list[MatmulBatch]], list[torch.Tensor]],
        side: int,
        factors: Sequence[torch.Tensor],
        role: str,
        add_error: bool,
    ) -> RunPart[list[torch.Tensor]]:
        items = []
        for group, factor in zip(self.groups, factors, strict=True):
            shape = *factor.shape[:2], group.matrices[0].shape[side]
            out = self.workspace.buffer((role, group.labels[0]), shape, factor)
            items.append(MatmulBatch(group, factor, self.loss_scale, add_error, out))
        results: list[torch.Tensor] = yield Jointly(kernel, items, self.device)
        return results

    def orthonormal(
        self, factors: Sequence[torch.Tensor], role: str, drawn: Sequence[torch.Tensor | None] | None = None
    ) -> RunPart[list[torch.Tensor]]:
        """Orthonormalise each factor, after replacing zero rows with `drawn` rows."""
        items = []
        for group, factor, instead in zip(self.groups, factors, drawn or [None] * len(factors), strict=True):
            out = self.workspace.buffer((role, group.labels[0], factor.shape), factor.shape, factor)
            items.append(Rows(factor, instead, out))
        bases: list[torch.Tensor] = yield Jointly(self.kernels.orthonormal_rows, items, self.device)
        return bases


def starting_bases(memory: Memory, M: BucketMatrices, side: int) -> list[torch.Tensor]:
    """Return a basis for each group: (matrices, r, rows) for side 0, (matrices, r, columns) for side 1.

    Rows that memory lacks, or that became zero because a gradient's matrix rank was too low, are drawn from a
    standard normal distribution, the same on every process.
    """
    shapes = [(group.matrix_rank, group.matrices[0].shape[side]) for group in M.groups]

    def in_memory(slot: Slot) -> list[torch.Tensor | None]:
        return [
            M.workspace.find_batch(memory, slot, group.labels, torch.Size((len(group.labels), *shape)))
            for group, shape in zip(M.groups, shapes, strict=True)
        ]

    if memory[BASIS]:
        made_ahead = [basis for basis in in_memory(BASIS) if basis is not None]
        if len(made_ahead) == len(M.groups):
            return made_ahead
    items = []
    for group, shape, factor in zip(M.groups, shapes, in_memory(FACTOR), strict=True):
        drawn = _drawn_rows(memory.step, M, shape, group.matrices[0])
        if factor is not None and factor.dtype == drawn.dtype:
            rows = factor.clone()
        else:
            rows = torch.stack([resized(memory[FACTOR].get(label), drawn) for label in group.labels])
        items.append(Rows(rows, drawn))
    return M.kernels.orthonormal_rows(items)


def bases_ahead(
    memory: Memory, M: BucketMatrices, factors: Sequence[torch.Tensor]
) -> RunPart[list[torch.Tensor]]:
    """Make the next step's starting bases, for all buckets together, to save launches."""
    # A zero row stays zero in every product, and its direction would be lost for good. It became zero when a
    # gradient's matrix rank was too low, or never had values. So zero rows are replaced.
    drawn = [_drawn_rows(memory.step, M, (f.shape[1], f.shape[2]), f) for f in factors]
    return (yield from M.orthonormal(factors, "ahead", drawn))


def _drawn_rows(step: int, M: BucketMatrices, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    seed, drawn = M.workspace.seed, M.workspace.drawn
    dtype = torch.promote_types(like.dtype, torch.float32)  # factors of 16-bit gradients are fp32, too
    if not M.workspace.warm_start:
        # Different rows in each step: the same ones would never capture what is orthogonal to them.
        return random_rows(seed + SEED_STRIDE * step, shape, like.device).to(dtype)
    # With a warm start only zero rows are replaced, by the same draws each time.
    key = shape, like.device, dtype
    if key not in drawn:
        drawn[key] = random_rows(seed, shape, like.device).to(dtype)
    return drawn[key]


def resized(factor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a factor with dtype and rows of `like`, cut or padded with zeros; zeros if columns differ."""
    if factor is not None and factor.shape == like.shape:
        return factor.to(like)
    whole = torch.zeros_like(like)
    if factor is not None and factor.shape[1] == like.shape[1]:
        rows = min(len(factor), len(like))
        whole[:rows] = factor[:rows]
    return whole


def random_rows(seed: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return standard normal rows in fp32, the same on every device."""
    # Drawn on the CPU: generators of other devices give other numbers, and members' devices may differ.
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return accelerators.to_device_async(device, rows)


class FactorMessages:
    """The messages of a bucket's step: each holds factors, the first one flat gradients as well."""

    def __init__(self, dtype: torch.dtype, workspace: Workspace, whole: Sequence[torch.Tensor]) -> None:
        self.dtype, self.workspace, self._whole = dtype, workspace, whole
        self.received: list[torch.Tensor] = []  # the means of all messages, which must be finite
        self.whole_means: Sequence[torch.Tensor] = ()  # of the flat gradients

    def average(
        self, factors: list[torch.Tensor], *, as_sent: bool
    ) -> RunPart[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return factors, (matrices, r, elements) each, and their means over the members.

        `as_sent` is for factors that are subtracted from the residual: it returns them rounded to 16 bits, as
        they were sent, so that the residual keeps the rounding error.
        """
        like, whole = factors[0], [] if self.received else self._whole
        sent = factors if self.dtype != torch.float16 else list(map(clamped, factors))
        sizes = list(map(torch.numel, whole))
        if whole and whole[0].dtype != like.dtype:
            wide = like.new_empty(sum(sizes)).split_with_sizes(sizes)
            torch._foreach_copy_(list(wide), list(whole))  # torch concatenates mixed dtypes one by one
            whole = wide
        kind = like.device, like.dtype, self.dtype
        (message,) = yield Jointly(all_packed, [(self, [*sent, *whole])], kind)
        own = factors
        if as_sent and message.dtype != like.dtype:
            # Read before the message is sent: the mean may overwrite it.
            own = unpacked(message, factors)
        mean = yield Mean(message)
        if whole:
            self.whole_means = mean[len(mean) - sum(sizes) :].split_with_sizes(sizes)
        self.received.append(mean)
        return own, unpacked(mean, factors)


def all_packed(items: Sequence[tuple[FactorMessages, Sequence[torch.Tensor]]]) -> Sequence[torch.Tensor]:
    """Return the messages of all buckets as views of one tensor, which is sent without another copy."""
    messages, (like, *_) = items[0]
    parts = [tensor.flatten() for _, tensors in items for tensor in tensors]
    sizes = [sum(map(torch.numel, tensors)) for _, tensors in items]
    role = "message", len(messages.received), like.shape
    out = messages.workspace.buffer(role, (sum(sizes),), like)
    return torch.cat(parts, out=out).to(messages.dtype).split_with_sizes(sizes)


def clamped(factor: torch.Tensor) -> torch.Tensor:
    """Return a factor clamped to fp16's range: the residual keeps the excess.

    Infinite values stay infinite, because the step should then be skipped.
    """
    limit = torch.finfo(torch.float16).max
    return torch.where(factor.isinf(), factor, factor.clamp(-limit, limit))


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the start of `flat` as tensors with the shapes and dtype of `like`."""
    sizes = list(map(torch.numel, like))
    head = flat[: sum(sizes)].to(like[0].dtype)
    return list(map(torch.Tensor.view_as, head.split_with_sizes(sizes), like))
