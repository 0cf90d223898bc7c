"""M, the gradients of a bucket as matrices, and the tensors that its steps share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import is_

import torch

from thinwire.algorithms.base import Memory, Slot
from thinwire.algorithms.requests import Jointly, Round
from thinwire.kernels.base import Kernels
from thinwire.kernels.matrices import MatmulBatch, MatrixGroup, Rows
from thinwire.tensors import accelerators


class Workspace:
    """Tensors that stay from step to step, and with them the tables of addresses that kernels look up.

    Attributes:
        seed: Of random rows, with which bases begin.
        warm_start: Whether only the first step takes such.
        M: The matrices of the last step, if those of the next may lie where they lay.
        drawn: Random rows by shape, device and type.
    """

    def __init__(self, seed: int, *, warm_start: bool = True) -> None:
        self.seed, self.warm_start = seed, warm_start
        self.M: BucketMatrices | None = None
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._batches: dict[tuple[str, str, torch.Size], tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self.drawn: dict[Hashable, torch.Tensor] = {}

    def buffer(self, role: Hashable, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor | None:
        """Return a buffer for a result, in the wide type and on the device of `like`; None on the CPU."""
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
        """Return the batch of a shape whose parts memory has under some labels; None if it has others."""
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
        """Return a batch like `new`, to be written, whose parts memory has under some labels from now on.

        Until then they are as `before`, and zeros where that is unlike them.
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

    They serve all steps in which gradients and residuals lie where they lay. One backend serves the bucket,
    that of its largest matrix rank: so its requests are a function of that.

    Attributes:
        groups: Gradients and residuals; the gradients only during a step.
        kernels: The backend's.
        device: Where all lies.
        workspace: For results.
        key: Where the bucket lies, and what chooses the kernels.
        errors: The residuals, flat.
        written: Of each group, the residuals if all can be written where they lie.
        wide: The type to which gradients are copied, if the kernels don't take theirs.
    """

    groups: Sequence[MatrixGroup]
    kernels: Kernels
    device: torch.device
    workspace: Workspace
    key: Hashable = None
    errors: Sequence[torch.Tensor | None] = ()
    written: Sequence[Sequence[torch.Tensor] | None] = ()
    wide: torch.dtype | None = None

    def products(
        self, Q: Sequence[torch.Tensor], scale: torch.Tensor | None, role: str, *, add_error: bool
    ) -> Round[list[torch.Tensor]]:
        """Multiply: M Q. All factors are held row by row, so this is (M Q)ᵀ, (matrices, r, rows)."""
        return self._multiply(self.kernels.products, 0, Q, scale, role, add_error)

    def projections(
        self, P: Sequence[torch.Tensor], scale: torch.Tensor | None, role: str, *, add_error: bool = False
    ) -> Round[list[torch.Tensor]]:
        """Multiply: Mᵀ P. Row by row: (matrices, r, columns)."""
        return self._multiply(self.kernels.projections, 1, P, scale, role, add_error)

    def _multiply(
        self,
        kernel: Callable[[list[MatmulBatch]], list[torch.Tensor]],
        side: int,
        factors: Sequence[torch.Tensor],
        scale: torch.Tensor | None,
        role: str,
        add_error: bool,
    ) -> Round[list[torch.Tensor]]:
        items = []
        for group, factor in zip(self.groups, factors, strict=True):
            shape = *factor.shape[:2], group.matrices[0].shape[side]
            out = self.workspace.buffer((role, group.labels[0]), shape, factor)
            items.append(MatmulBatch(group, factor, scale, add_error, out))
        results: list[torch.Tensor] = yield Jointly(kernel, items, self.device)
        return results

    def orthonormal(
        self, factors: Sequence[torch.Tensor], role: str, drawn: Sequence[torch.Tensor | None] | None = None
    ) -> Round[list[torch.Tensor]]:
        """Make an orthonormal basis of each factor, with drawn rows in place of zeros."""
        items = []
        for group, factor, instead in zip(self.groups, factors, drawn or [None] * len(factors), strict=True):
            out = self.workspace.buffer((role, group.labels[0], factor.shape), factor.shape, factor)
            items.append(Rows(factor, instead, out))
        bases: list[torch.Tensor] = yield Jointly(self.kernels.orthonormal_rows, items, self.device)
        return bases
