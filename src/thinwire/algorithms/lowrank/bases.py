"""The orthonormal bases that a step starts from: the last step's mean factors, or random ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.algorithms.base import Memory, Slot
from thinwire.algorithms.lowrank.matrices import BucketMatrices
from thinwire.algorithms.lowrank.slots import BASIS, FACTOR
from thinwire.algorithms.requests import Round
from thinwire.kernels.matrices import Rows
from thinwire.tensors import accelerators

# Between the seeds of one step and the next: far from any seed a user would choose.
SEED_STRIDE = 1_000_003


def starting_bases(memory: Memory, M: BucketMatrices, side: int) -> list[torch.Tensor]:
    """Return a basis for each group: (matrices, r, rows) for side 0, (matrices, r, columns) for side 1.

    Rows that memory lacks, or that died when a gradient had too low a matrix rank, are drawn from a standard
    normal, the same on every process.
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
) -> Round[list[torch.Tensor] | None]:
    """Make what the next step starts from, on accelerators for all buckets at once: launches count.

    None on the CPU: there each bucket's are made when it starts, while messages of others are under way.
    """
    if not M.workspace.warm_start or not accelerators.is_accelerator(M.device):
        return None
    # A row that is zero stays zero through every product, and its direction would be lost for good: it
    # died when a gradient had too low a matrix rank, or was never there. So dead rows are replaced.
    drawn = [_drawn_rows(memory.step, M, (f.shape[1], f.shape[2]), f) for f in factors]
    return (yield from M.orthonormal(factors, "ahead", drawn))


def _drawn_rows(step: int, M: BucketMatrices, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    seed, drawn = M.workspace.seed, M.workspace.drawn
    dtype = torch.promote_types(like.dtype, torch.float32)  # factors of 16-bit gradients are fp32, too
    if not M.workspace.warm_start:
        # Different ones in each step: the same would never see what lies across them.
        return random_rows(seed + SEED_STRIDE * step, shape, like.device).to(dtype)
    # With a warm start only dead rows are drawn again: the same ones each time.
    key = shape, like.device, dtype
    if key not in drawn:
        drawn[key] = random_rows(seed, shape, like.device).to(dtype)
    return drawn[key]


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
