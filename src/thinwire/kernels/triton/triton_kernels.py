"""Low-rank steps by Triton: gradients in fp32, fp16 and bf16, matrix ranks up to 32, all matrices at once.

In fp32 the first kernel of a step adds the residuals to the gradients in place, as PyTorch's do; to gradients
in 16 bits, which could not hold the sum, every kernel adds them as it reads both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch

from thinwire.kernels import torch_kernels
from thinwire.kernels.base import Tables
from thinwire.kernels.batching import batched, group_indices, split_as
from thinwire.kernels.device_tables import table_of, tiles_of
from thinwire.kernels.matrices import DEPENDENT_BELOW, MatmulBatch, MatrixGroup, Reconstruction, Rows, Write
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.launcher import FUSED, padded
from thinwire.kernels.triton.limits import GRADIENT_TYPES
from thinwire.kernels.triton.triton_codes import CODES
from thinwire.kernels.triton.triton_entries import ENTRIES

LETTERS = {torch.float32: "f", torch.float16: "h", torch.bfloat16: "b"}

# From this many rows of a factor on, products are the tensor cores'.
DOT_ROWS = 16

# Rows of a matrix that one program of a projection adds up: a fixed number, whatever the GPU.
SPLIT_ROWS = 512

# Elements of a program that adds up parts; of one that only looks at each.
SUMS, ELEMENTS = 1024, 4096

# Columns of a factor that one program has, and holds at a time: few, as a division in fp64 is a subroutine on
# sm_80: around it registers that are full would be put aside.
CHUNK, COLUMNS = 512, 128


def _launch(
    kernel: str,
    device: torch.device,
    rows: Sequence[tuple[int, ...]],
    counts: Sequence[int],
    constants: dict[str, object],
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    *beside: torch.Tensor | None,
) -> None:
    """Launch a kernel over a table: of each of its rows, as many programs as are counted."""
    arguments = [table_of(rows, device), tiles_of(counts, device), *beside]
    launcher.launch(kernel, sum(counts), arguments, constants, device, reads=reads, writes=writes)


def products(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Take one launch for each kind of matrices."""
    results, launches = _results_and_launches("products", items, side=0)
    for matrices, factors, outs in launches:
        counts = [-(-row[3] // matrices.tile.rows) for row in matrices.rows]
        constants = {"KEEPS": matrices.is_kept, "STAGES": matrices.tile.stages}
        matrices.launch([factors, outs], outs, counts, constants)
    return results


def projections(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Take one launch for each kind of matrices, and one for all."""
    results, launches = _results_and_launches("projections", items, side=1)
    sums: list[tuple[torch.Tensor, int, torch.Tensor]] = []
    for matrices, factors, outs in launches:
        # Parts and a second launch, and no atomic additions: those come in a different order every time.
        splits = [-(-row[3] // SPLIT_ROWS) for row in matrices.rows]
        sizes = [(count * out.numel(),) for count, out in zip(splits, outs, strict=True)]
        parts = _empty(sizes, torch.float32, outs[0].device)
        across = [-(-row[4] // matrices.tile.columns) for row in matrices.rows]
        counts = [count * tiles for count, tiles in zip(splits, across, strict=True)]
        constants = {"SPLIT": SPLIT_ROWS, "KEEPS": matrices.is_kept, "STAGES": matrices.tile.stages}
        matrices.launch([factors, parts], parts, counts, constants)
        sums += zip(parts, splits, outs, strict=True)
    _launch(
        "compiled_matrices.add_splits",
        results[0].device,
        [(part.data_ptr(), count, out.numel(), out.data_ptr()) for part, count, out in sums],
        [-(-out.numel() // SUMS) for *_, out in sums],
        {"COLUMNS": SUMS, **FUSED},
        [part for part, *_ in sums],
        [out for *_, out in sums],
    )
    return results


Launch: TypeAlias = "tuple[_Matrices, list[torch.Tensor], list[torch.Tensor]]"
"""Gradients and residuals, factors, and results, matrix by matrix."""


def _results_and_launches(
    kernel: str, items: Sequence[MatmulBatch], *, side: int
) -> tuple[list[torch.Tensor], list[Launch]]:
    """Return room for the products with factors, and the reads and writes of each launch."""
    shapes = [(*item.factor.shape[:2], item.group.matrices[0].shape[side]) for item in items]
    # In one piece, in the order in which they are sent: so a message of them is not joined first.
    results = _empty(shapes, torch.float32, items[0].factor.device)
    launches: list[Launch] = []
    for kind in group_indices(items, lambda item: _kind(item.group)):
        some = [items[index] for index in kind]
        groups = [item.group for item in some]
        given = _Matrices(kernel, groups, some[0].loss_scale, is_first=some[0].add_error)
        outs = each_of([results[index] for index in kind])
        launches.append((given, each_of([item.factor for item in some]), outs))
    return results, launches


def reconstruct(items: Sequence[Reconstruction]) -> None:
    """Take one launch for each kind; what a 16-bit gradient can't hold of a mean goes to its residual."""
    for kind in group_indices(items, lambda item: (_kind(item.group, item.errors or ()), len(item.terms))):
        some = [items[index] for index in kind]
        # Errors are mostly written where the group's own are read: a program has read all of its tile before
        # it writes any of it, and no other program has that tile.
        nothing: list[torch.Tensor | None] = [None]
        new = [e for item in some for e in (item.errors or nothing * len(item.group.matrices))]
        groups = [item.group for item in some]
        matrices = _Matrices("reconstruct", groups, some[0].loss_scale, is_first=False, written=new)
        # For each matrix: the left and right factor that was sent, and those of the means. What was sent of
        # the terms before the last one, `subtract_own` has taken.
        pairs = [[item.sent, *item.means] for item in some]
        factors = [
            each_of([of_item[term][side] for of_item in pairs])
            for term in range(len(pairs[0]))
            for side in (0, 1)
        ]
        dtype = groups[0].matrices[0].dtype
        # In fp32 a mean beyond the range is infinite, and its step is not healthy.
        limit = 0.0 if dtype == torch.float32 else torch.finfo(dtype).max
        tile = matrices.tile
        counts = [-(-row[3] // tile.rows) * -(-row[4] // tile.columns) for row in matrices.rows]
        constants = {"TERMS": len(some[0].terms), "LIMIT": limit}
        matrices.launch([new, *factors], new, counts, constants, _flag(some[0].is_healthy))


def write(items: Sequence[Write]) -> list[torch.Tensor]:
    """Write in place, by one launch for each type; what stays is read and written in unhealthy steps only."""

    def launch(some: Sequence[Write]) -> list[torch.Tensor]:
        targets = [item.target for item in some]
        healthy = [item.healthy for item in some if item.healthy is not None]
        # Types are compiled in; all else a launch looks up for each tensor. What stays is put back from its
        # own type.
        dtype, source = kind(some[0])
        if healthy or some[0].is_healthy is not None:
            _launch(
                "compiled_matrices.write",
                targets[0].device,
                [(*map(_address, item[:3]), item.target.numel()) for item in some],
                [-(-target.numel() // ELEMENTS) for target in targets],
                {"G": LETTERS[dtype], "SOURCE": LETTERS[source], "COLUMNS": ELEMENTS, **FUSED},
                healthy,
                [item.target for item in some if item.healthy is not None],
                _flag(some[0].is_healthy),
            )
        return targets

    def kind(item: Write) -> tuple[torch.dtype, torch.dtype]:
        return item.target.dtype, (item.target if item.healthy is None else item.healthy).dtype

    return batched(items, kind, launch)


def orthonormal_rows(items: Sequence[Rows]) -> list[torch.Tensor]:
    """Compute as PyTorch's functions do, in three launches.

    Gram matrices are added up chunk by chunk, in order, so that many programs share a long factor.
    """
    batches, device = [item.rows for item in items], items[0].rows.device
    results = _empty([batch.shape for batch in batches], torch.float32, device)
    rows = padded(max(batch.shape[1] for batch in batches))
    factors, outs = each_of(batches), each_of(results)
    instead = [item.drawn for item in items for _ in item.rows]
    counts = [-(-factor.shape[1] // CHUNK) for factor in factors]
    # Two Gram matrices for each chunk, a transform for each matrix. Freed when this returns: the allocator
    # hands the memory out again on this stream only, behind what reads it here.
    room = _empty([((2 * count + 1) * rows * rows,) for count in counts], torch.float64, device)
    table = [
        (x.data_ptr(), _address(drawn), out.data_ptr(), parts.data_ptr(), x.shape[1], x.shape[0], count)
        for x, drawn, out, parts, count in zip(factors, instead, outs, room, counts, strict=True)
    ]
    # Three launches, since the programs of one can't wait for each other.
    for kernel, writes in (("gram", room), ("gram_again", room), ("orthonormal", outs)):
        _launch(
            f"compiled_bases.{kernel}", device, table, counts, basis_constants(kernel, rows), factors, writes
        )
    return results


OF_FOUR_WARPS = {("gram", 32), ("gram_again", 2), ("gram_again", 16)}


def basis_constants(kernel: str, rows: int) -> dict[str, object]:
    """Return the compile-time arguments of a kernel that makes bases, and options."""
    constants: dict[str, object] = {"R": rows, "COLUMNS": COLUMNS, "CHUNK": CHUNK, **FUSED}
    # With these nothing is put aside on sm_80, sm_90 and sm_100: found by trial, since the compiler decides.
    constants["num_warps"] = 4 if (kernel, rows) in OF_FOUR_WARPS else 8
    return constants if kernel == "gram" else {**constants, "DEPENDENT": DEPENDENT_BELOW}


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Take two launches."""
    counts = [-(-tensor.numel() // ELEMENTS) for tensor in tensors]
    # One byte of each program, and no common one: to write that, they would have to take turns.
    flags = torch.empty(sum(counts), dtype=torch.int8, device=tensors[0].device)
    _launch(
        "compiled_matrices.finite",
        flags.device,
        [(tensor.data_ptr(), tensor.numel()) for tensor in tensors],
        counts,
        {"G": LETTERS[tensors[0].dtype], "COLUMNS": ELEMENTS, **FUSED},
        tensors,
        [flags],
        flags,
    )
    return flags.view(torch.bool).all()


class Tile(NamedTuple):
    """The tile of a program, its warps, and how many tiles of a loop it loads ahead."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3


# For each kernel, by the most rows of a factor: the fastest tile that we tried on an H200, with GPT-2 small
# in fp32 and Llama's layers in bf16, and that spills no registers on sm_80 and sm_90. Larger tiles spill;
# smaller ones load too little at a time.
TILES = {
    "products": {4: Tile(8, 256), 8: Tile(8, 128), 32: Tile(64, 64, stages=1)},
    "projections": {4: Tile(32, 128), 8: Tile(16, 64), 16: Tile(32, 64), 32: Tile(32, 128, stages=1)},
    "reconstruct": {4: Tile(8, 256), 8: Tile(32, 128, warps=8), 32: Tile(32, 64)},
}


def tile_of(kernel: str, factor_rows: int, *, is_aligned: bool, keeps: bool = False) -> Tile:
    """Return the tile of a kernel for factors of `factor_rows` rows."""
    tile = next(tile for most_rows, tile in TILES[kernel].items() if factor_rows <= most_rows)
    # Addresses of single numbers, and of what is written, take registers. Along what is added up, tiles stay
    # the same: a matrix must give the same sums wherever it lies.
    if kernel == "reconstruct" and not is_aligned:
        return tile._replace(rows=tile.rows // 2)
    return tile._replace(columns=tile.columns // 2) if kernel == "projections" and keeps else tile


def _kind(group: MatrixGroup, written: Sequence[torch.Tensor] = ()) -> tuple[torch.dtype, int, bool]:
    """Return the constants compiled in: so a matrix is computed alike whatever else is in its bucket."""
    touched = [*group.matrices, *(error for error in group.errors if error is not None), *written]
    return group.matrices[0].dtype, padded(group.matrix_rank), _are_aligned(touched)


def _are_aligned(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.shape[-1] % 16 == 0 and tensor.data_ptr() % 16 == 0 for tensor in tensors)


class _Matrices:
    """The gradients and residuals of a launch.

    Attributes:
        is_kept: Whether the launch leaves gradient plus residual where the gradient was.
        tile: What a program has at a time.
        rows: What `compiled_matrices._matrix` reads of each matrix.
    """

    def __init__(
        self,
        kernel: str,
        groups: Sequence[MatrixGroup],
        loss_scale: torch.Tensor | None,
        *,
        is_first: bool,
        written: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        matrices = [matrix for group in groups for matrix in group.matrices]
        errors = [error for group in groups for error in group.errors]
        known = [error for error in errors if error is not None]
        is_fp32, reconstructs = matrices[0].dtype == torch.float32, written is not None
        # In fp32 those that come later find the sum.
        adds = is_first or not is_fp32
        self.is_kept = bool(known) and is_first and is_fp32
        self._read = [*matrices, *(known if adds else [])]
        self._written = matrices if self.is_kept or reconstructs else []
        # A kernel gets the address of the scale, so the host need not wait for its value.
        self._scale = None if loss_scale is None else loss_scale.float()
        ranks = [group.matrix_rank for group in groups for _ in group.matrices]
        self.rows = [
            (m.data_ptr(), _address(error if adds else None), _address(self._scale), *m.shape, matrix_rank)
            for m, error, matrix_rank in zip(matrices, errors, ranks, strict=True)
        ]
        factor_rows = padded(ranks[0])
        touched = [*matrices, *known, *(tensor for tensor in written or () if tensor is not None)]
        is_aligned = _are_aligned(touched)
        self.tile = tile_of(kernel, factor_rows, is_aligned=is_aligned, keeps=self.is_kept)
        self._kernel = f"compiled_matrices.{kernel}"
        self._constants: dict[str, object] = {
            "G": LETTERS[matrices[0].dtype],
            "R": factor_rows,
            "ROWS": self.tile.rows,
            "COLUMNS": self.tile.columns,
            # Without this the compiler reads one number at a time: an address from a table may be any.
            "ALIGNED": is_aligned,
            # Three products of TF32 halves come to fp32; AMD's tensor cores have no TF32.
            "DOT": ("ieee" if torch.version.hip else "tf32x3") if factor_rows >= DOT_ROWS else "",
            **FUSED,
            "num_warps": self.tile.warps,
        }

    def launch(
        self,
        beside: Sequence[Sequence[torch.Tensor | None]],
        outs: Sequence[torch.Tensor | None],
        counts: Sequence[int],
        constants: Mapping[str, object],
        *arguments: torch.Tensor | None,
    ) -> None:
        """Launch the kernel: each row of its table ends with the addresses of what is beside the matrix."""
        ends = zip(*(map(_address, column) for column in beside), strict=True)
        reads = [tensor for column in beside if column is not outs for tensor in column if tensor is not None]
        _launch(
            self._kernel,
            self._read[0].device,
            [(*row, *end) for row, end in zip(self.rows, ends, strict=True)],
            counts,
            {**self._constants, **constants},
            [*self._read, *reads],
            [*self._written, *(out for out in outs if out is not None)],
            *arguments,
        )


def _empty(
    shapes: Sequence[torch.Size | tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Allocate tensors one after the other in one memory."""
    # The type is named wherever an address goes to a kernel: the default one is the user's to set.
    return split_as(torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device), shapes)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _flag(is_healthy: torch.Tensor | None) -> torch.Tensor | None:
    return None if is_healthy is None else is_healthy.view(torch.int8)


def each_of(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the matrices of all batches, contiguous ones."""
    # Kernels get addresses, and take what lies there for fp32.
    assert all(batch.dtype is torch.float32 for batch in batches)
    # A copy lives as long as the caller's list: a kernel that was launched has its address alone.
    whole = [batch if not len(batch) or batch[0].is_contiguous() else batch.contiguous() for batch in batches]
    return [matrix for batch in whole for matrix in batch.unbind()]


# PyTorch's products subtract from the gradient in memory between iterations.
LOW_RANK = replace(
    torch_kernels.LOW_RANK,
    gradient_types=GRADIENT_TYPES,
    products=products,
    projections=projections,
    reconstruct=reconstruct,
    write=write,
    orthonormal_rows=orthonormal_rows,
    all_finite=all_finite,
)
TABLES = Tables(LOW_RANK, CODES, ENTRIES)
