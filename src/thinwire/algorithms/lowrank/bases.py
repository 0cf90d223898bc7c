"""The bases that a step starts from, and the factors that one step leaves for the next."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from thinwire.algorithms.base import Memory
from thinwire.algorithms.lowrank.slots import BASIS, FACTOR
from thinwire.algorithms.requests import Jointly, Message, Request
from thinwire.kernels.dispatch import orthonormal_rows
from thinwire.kernels.matrices import MatrixGroup
from thinwire.tensors import accelerators
from thinwire.tensors.layout import stacked

# Between the seeds of one step and the next: far from any seed a user would choose.
SEED_STRIDE = 1_000_003


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
        bases = [_kept(memory, group, like) for group, like in zip(groups, drawn, strict=True)]
        missing = [index for index, basis in enumerate(bases) if basis is None]
        factors = memory[FACTOR]
        items = [
            (torch.stack([fitted(factors.get(label), drawn[i]) for label in groups[i].labels]), drawn[i])
            for i in missing
        ]
        made = dict(zip(missing, orthonormal_bases(items), strict=True))
        return [made[index] if basis is None else basis for index, basis in enumerate(bases)]

    def ahead(
        self, memory: Memory, factors: Sequence[torch.Tensor]
    ) -> Generator[Request | tuple[Message, ...], Any, list[torch.Tensor] | None]:
        """Make what the next step starts from, for all buckets at once; None where that does not pay."""
        if not self._warm_start or not factors or not accelerators.pays_per_launch(factors[0].device):
            return None
        drawn = self._rows(memory, [(each.shape[1], each.shape[2]) for each in factors], factors[0])
        made: list[torch.Tensor] = yield Jointly(orthonormal_bases, list(zip(factors, drawn, strict=True)))
        return made

    def _rows(
        self, memory: Memory, shapes: Sequence[tuple[int, int]], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return random rows of some shapes, on the device of `like`."""
        # Without a warm start other ones in each step: the same would never see what lies across them.
        seed = self._seed if self._warm_start else self._seed + SEED_STRIDE * memory.step
        known = self._first_rows if self._warm_start else {}
        for shape in shapes:
            if (shape, like.device) not in known:
                known[shape, like.device] = random_rows(seed, shape, like.device)
        dtype = torch.promote_types(like.dtype, torch.float32)  # of 16-bit gradients too factors are in fp32
        return [known[shape, like.device].to(dtype) for shape in shapes]


def _kept(memory: Memory, group: MatrixGroup, like: torch.Tensor) -> torch.Tensor | None:
    """Return the bases of a group that were made ahead, as one batch; None if not all of them were."""
    bases = [memory[BASIS].get(label) for label in group.labels]
    fitting = [each for each in bases if each is not None and each.shape == like.shape]
    if len(fitting) < len(bases) or any(each.dtype != like.dtype for each in fitting):
        return None
    # Where they were made as one they mostly still lie so: then there is nothing to copy.
    batch = stacked(fitting)
    return torch.stack(fitting) if batch is None else batch


def orthonormal_bases(items: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return bases of the rows of factors, in which dead rows are replaced.

    A module-level function, so that the requests of all buckets (`Jointly`) are served by one call.
    """
    # A row that is zero stays zero through every product, and its direction would be lost for good: it died
    # when a gradient had too low a matrix rank, or was never there.
    return orthonormal_rows([rows for rows, _ in items], [drawn for _, drawn in items])


def fitted(factor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a factor in type and rows of `like`, cut or extended by zeros; zeros if it has other columns."""
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
    return accelerators.sent_to(device, rows)
