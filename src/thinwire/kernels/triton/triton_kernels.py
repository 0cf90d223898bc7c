"""Low-rank steps with Triton: gradients in fp32, fp16 and bf16, matrix ranks up to 32, all matrices together.

In fp32 the first kernel of a step adds the residuals to the gradients in place, as PyTorch's kernels do.
16-bit gradients could not hold the sum, so every kernel adds residuals as it reads both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from thinwire.kernels import torch_kernels
from thinwire.kernels.backend import Tables
from thinwire.kernels.matrices import DEPENDENT_BELOW, MatmulBatch, MatrixGroup, Reconstruction, Rows, Write
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.launcher import FUSED, LaunchTable, TableRows, launch_table, padded, workspace
from thinwire.kernels.triton.limits import GRADIENT_TYPES
from thinwire.kernels.triton.triton_codes import CODES
from thinwire.kernels.triton.triton_entries import ENTRIES
from thinwire.tensors.layout import group_indices, split_as

LETTERS = {torch.float32: "f", torch.float16: "h", torch.bfloat16: "b"}

# From this many rows of a factor on, products use tensor cores.
DOT_ROWS = 16

# Rows of a matrix that one program of a projection sums: the same number on every GPU.
SPLIT_ROWS = 512

# Elements per program that sums parts, and per program that only checks or copies elements.
SUMS, ELEMENTS = 1024, 4096

# Columns of a factor that one program has, and holds at a time: few, since an fp64 division is a subroutine
# on sm_80, around which live registers would spill.
CHUNK, COLUMNS = 512, 128


class Tile(NamedTuple):
    """A program's tile, its warps, and how many tiles of a loop it loads ahead."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3


# For each kernel, by the most rows of a factor: the fastest tile of those tried on an H200, with GPT-2 small
# in fp32 and Llama's layers in bf16, that spills no registers on sm_80 and sm_90. Larger tiles spill; smaller
# ones load too little at a time.
TILES = {
    "products": {4: Tile(8, 256), 8: Tile(8, 128), 32: Tile(64, 64, stages=1)},
    "projections": {4: Tile(32, 128), 8: Tile(16, 64), 16: Tile(32, 64), 32: Tile(32, 128, stages=1)},
    "reconstruct": {4: Tile(8, 256), 8: Tile(32, 128, warps=8), 32: Tile(32, 64)},
}


def tile_of(kernel: str, factor_rows: int, *, is_aligned: bool, keeps: bool = False) -> Tile:
    """Return the tile of a kernel for factors of `factor_rows` rows."""
    tile = next(tile for most_rows, tile in TILES[kernel].items() if factor_rows <= most_rows)
    # Addresses of single numbers, and of writes, take registers. Keep the tile's size along summed
    # dimensions: a matrix must give the same sums at any address.
    if kernel == "reconstruct" and not is_aligned:
        return tile._replace(rows=tile.rows // 2)
    return tile._replace(columns=tile.columns // 2) if kernel == "projections" and keeps else tile


# Bound groups: what does not change until a plan makes new groups.

_numbers = count()


class _GroupTable:
    """The addresses and sizes of a group, and the addresses to which `reconstruct` writes residuals."""

    def __init__(self, group: MatrixGroup, written: Sequence[torch.Tensor | None]) -> None:
        matrices, errors = group.matrices, group.errors
        touched = [tensor for tensor in (*matrices, *errors, *written) if tensor is not None]
        is_aligned = all(tensor.shape[-1] % 16 == 0 and tensor.data_ptr() % 16 == 0 for tensor in touched)
        # Identifies the group in keys of tables; unique.
        self.number, self.has_errors = next(_numbers), any(error is not None for error in errors)
        # Compiled in, so that a matrix is computed the same way whatever else is in its bucket.
        self.kind = matrices[0].dtype, padded(group.matrix_rank), is_aligned
        self.addresses = [*zip(map(_address, matrices), map(_address, errors), strict=True)]
        self.written = list(map(_address, written))
        self.sizes = (*matrices[0].shape, group.matrix_rank)


def _table_of(group: MatrixGroup) -> _GroupTable:
    bound: _GroupTable | None = group.bound.get("triton")
    if bound is None:
        bound = group.bound["triton"] = _GroupTable(group, group.errors)
    return bound


def _launch_over(
    kernel: str,
    items: Sequence[MatmulBatch] | Sequence[Reconstruction],
    bound: Sequence[_GroupTable],
    beside: Sequence[Sequence[torch.Tensor]],
    *arguments: torch.Tensor | None,
    is_first: bool = False,
    **constants: object,
) -> None:
    """Launch a kernel over the matrices of some items, all of one kind.

    Each row of its table ends with the addresses of the matrix's parts of the batches `beside`, preceded by
    the residuals that `reconstruct` writes. `is_first`: gradients do not include residuals yet.
    """
    dtype, factor_rows, is_aligned = bound[0].kind
    is_fp32, reconstructs = dtype == torch.float32, kernel == "reconstruct"
    # Whether the launch writes gradient plus residual to the gradient; in fp32 later launches read the sum
    # there.
    keeps = is_first and is_fp32 and any(group.has_errors for group in bound)
    adds = is_first or not is_fp32
    tile = tile_of(kernel, factor_rows, is_aligned=is_aligned, keeps=keeps)
    # A kernel gets the address of the scale, so the host does not wait for its value.
    scale = None if items[0].loss_scale is None else items[0].loss_scale.float()
    key = (
        *(kernel, adds, tile, _address(scale), *(group.number for group in bound)),
        *(batch.data_ptr() for batches in beside for batch in batches),
    )

    def make() -> TableRows:
        heads = [
            (
                matrix,
                error if adds else 0,
                _address(scale),
                *group.sizes,
                *([residual] if reconstructs else []),
            )
            for group in bound
            for (matrix, error), residual in zip(group.addresses, group.written, strict=True)
        ]
        ends = zip(*map(_matrix_addresses, beside), strict=True)
        height = SPLIT_ROWS if kernel == "projections" else tile.rows
        across = [1 if kernel == "products" else -(-head[4] // tile.columns) for head in heads]
        programs = [-(-head[3] // height) * tiles for head, tiles in zip(heads, across, strict=True)]
        return [(*head, *end) for head, end in zip(heads, ends, strict=True)], programs

    compiled_in: dict[str, object] = {
        "G": LETTERS[dtype],
        "R": factor_rows,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        # Without this the compiler reads one number at a time: it knows nothing of addresses from a table.
        "ALIGNED": is_aligned,
        # Three products of TF32 parts give fp32 precision; AMD's tensor cores have no TF32.
        "DOT": ("ieee" if torch.version.hip else "tf32x3") if factor_rows >= DOT_ROWS else "",
        **FUSED,
        "num_warps": tile.warps,
        **({} if reconstructs else {"KEEPS": keeps, "STAGES": tile.stages}),
        **constants,
    }
    table = launch_table(key, make, items[0].group.matrices[0].device)
    _launch(f"compiled_matrices.{kernel}", table, compiled_in, *arguments)


def _launch(
    kernel: str, table: LaunchTable, constants: dict[str, object], *beside: torch.Tensor | None
) -> None:
    """Launch a kernel over a table."""
    launcher.launch(kernel, len(table.tiles), [table.rows, table.tiles, *beside], constants)


# The kernels of `backend.Kernels`.


def products(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Take one launch for each kind of matrices."""
    results = _products_results(items, side=0)
    for some, bound, factors, outs in _by_kind(items, results):
        _launch_over("products", some, bound, [factors, outs], is_first=some[0].add_error)
    return results


def projections(items: Sequence[MatmulBatch]) -> list[torch.Tensor]:
    """Take one launch for each kind of matrices, and one for all."""
    results = _products_results(items, side=1)
    kinds = list(_by_kind(items, results))
    all_outs = [out for *_, outs in kinds for out in outs]
    # Parts and a second launch, not atomic additions, whose order differs every time.
    splits = [-(-batch.shape[2] // SPLIT_ROWS) for _, _, factors, _ in kinds for batch in factors]
    shapes = [(len(out), split, *out.shape[1:]) for split, out in zip(splits, all_outs, strict=True)]
    # One buffer for all launches: the second one reads what all of them have written.
    buffer = workspace("parts", sum(map(math.prod, shapes)), torch.float32, results[0].device)
    all_parts = split_as(buffer, shapes)
    remaining = iter(all_parts)
    for some, bound, factors, outs in kinds:
        beside = [factors, [next(remaining) for _ in outs]]
        _launch_over("projections", some, bound, beside, is_first=some[0].add_error, SPLIT=SPLIT_ROWS)

    def make() -> TableRows:
        splits = [part.shape[1] for part in all_parts for _ in part]
        elements = [out.shape[1] * out.shape[2] for out in all_outs for _ in out]
        columns = _matrix_addresses(all_parts), splits, elements, _matrix_addresses(all_outs)
        return list(zip(*columns, strict=True)), [-(-number // SUMS) for number in elements]

    key = "add_splits", *((tensor.data_ptr(), tensor.shape) for tensor in (*all_parts, *all_outs))
    table = launch_table(key, make, results[0].device)
    _launch("compiled_matrices.add_splits", table, {"COLUMNS": SUMS, **FUSED})
    return results


def _products_results(items: Sequence[MatmulBatch], *, side: int) -> list[torch.Tensor]:
    shapes = [(*item.factor.shape[:2], item.group.matrices[0].shape[side]) for item in items]
    return _results([item.out for item in items], shapes, items[0].factor.device)


def _by_kind(
    items: Sequence[MatmulBatch], results: Sequence[torch.Tensor]
) -> Iterator[tuple[list[MatmulBatch], list[_GroupTable], list[torch.Tensor], list[torch.Tensor]]]:
    """Yield the items of each kind, with their tables, factors and results."""
    bound = [_table_of(item.group) for item in items]
    for indices in group_indices(bound, lambda group: group.kind):
        some = [items[index] for index in indices]
        factors = [_contiguous(item.factor) for item in some]
        yield some, [bound[index] for index in indices], factors, [results[index] for index in indices]


def reconstruct(items: Sequence[Reconstruction]) -> None:
    """Take one launch for each kind; residuals get what 16-bit gradients can't hold of a mean."""
    # Residuals are mostly written in place: a program reads all of its tile before it writes any of it, and
    # no other program has that tile.
    bound = [
        _table_of(item.group)
        if item.errors is item.group.errors
        else _GroupTable(item.group, item.errors or [None] * len(item.group.matrices))
        for item in items
    ]
    for indices in group_indices(range(len(items)), lambda i: (bound[i].kind, len(items[i].terms))):
        some = [items[index] for index in indices]
        dtype, _, _ = bound[indices[0]].kind
        # For each matrix: the left and right factor that was sent, and those of the means. `subtract_own` has
        # already subtracted what terms before the last one have sent.
        pairs = [[item.terms[-1].sent, *(term.mean for term in item.terms)] for item in some]
        factors = [
            [_contiguous(of_item[term][side]) for of_item in pairs]
            for term in range(len(pairs[0]))
            for side in (0, 1)
        ]
        # In fp32 a mean beyond the range is infinite, and its step is not healthy.
        limit = 0.0 if dtype == torch.float32 else torch.finfo(dtype).max
        of_kind, flag = [bound[index] for index in indices], _flag(some[0].is_healthy)
        terms = len(pairs[0]) - 1
        _launch_over("reconstruct", some, of_kind, factors, flag, TERMS=terms, LIMIT=limit)


def write(items: Sequence[Write]) -> None:
    """Write in place, by one launch for each pair of types."""
    for indices in group_indices(items, lambda item: (item.target.dtype, item.healthy.dtype)):
        first, rows = items[indices[0]], list[tuple[int, ...]]()
        for item in (items[index] for index in indices):
            at = item.target.data_ptr()
            rows.append((at, item.healthy.data_ptr(), at if item.stays else 0, item.target.numel()))
        table = launch_table(("write", *rows), partial(_rows_of_elements, rows), first.target.device)
        # Dtypes are compiled in; a launch looks up everything else per tensor.
        letters = {"G": LETTERS[first.target.dtype], "SOURCE": LETTERS[first.healthy.dtype]}
        constants = {**letters, "COLUMNS": ELEMENTS, **FUSED}
        _launch("compiled_matrices.write", table, constants, _flag(first.is_healthy))


def all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Take two launches."""
    rows = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
    table = launch_table(("finite", *rows), partial(_rows_of_elements, rows), tensors[0].device)
    # One byte per program, not a shared one, which programs would have to write in turn.
    flags = torch.empty(len(table.tiles), dtype=torch.int8, device=tensors[0].device)
    constants = {"G": LETTERS[tensors[0].dtype], "COLUMNS": ELEMENTS, **FUSED}
    _launch("compiled_matrices.finite", table, constants, flags)
    return flags.view(torch.bool).all()


def _rows_of_elements(rows: Sequence[tuple[int, ...]]) -> TableRows:
    """Return rows that end with a number of elements, and the number of programs for these."""
    return rows, [-(-row[-1] // ELEMENTS) for row in rows]


def orthonormal_rows(items: Sequence[Rows]) -> list[torch.Tensor]:
    """Compute the same as PyTorch's functions, in three launches.

    Gram matrices are summed chunk by chunk, in order, so that many programs share a long factor.
    """
    factors, device = [_contiguous(item.rows) for item in items], items[0].rows.device
    results = _results([item.out for item in items], [batch.shape for batch in factors], device)
    rows = padded(max(batch.shape[1] for batch in factors))
    chunks = [-(-batch.shape[2] // CHUNK) for batch in factors]
    # Two Gram matrices per chunk, and a transform per matrix.
    sizes = [(len(batch), (2 * many + 1) * rows * rows) for batch, many in zip(factors, chunks, strict=True)]
    grams = split_as(workspace("grams", sum(map(math.prod, sizes)), torch.float64, device), sizes)

    def make() -> TableRows:
        counts = [many for batch, many in zip(factors, chunks, strict=True) for _ in batch]
        lengths, ranks = ([batch.shape[side] for batch in factors for _ in batch] for side in (2, 1))
        drawn = [_address(item.drawn) for item in items for _ in item.rows]
        addresses = _matrix_addresses(factors), drawn, _matrix_addresses(results), _matrix_addresses(grams)
        return list(zip(*addresses, lengths, ranks, counts, strict=True)), counts

    key = (
        *("orthonormal", rows, *(batch.shape for batch in factors)),
        *(batch.data_ptr() for batches in (factors, results, grams) for batch in batches),
        *(_address(item.drawn) for item in items),
    )
    table = launch_table(key, make, device)
    # Three launches, since the programs of one can't wait for each other.
    for kernel in ("gram", "gram_again", "orthonormal"):
        _launch(f"compiled_bases.{kernel}", table, basis_constants(kernel, rows))
    return results


OF_FOUR_WARPS = {("gram", 32), ("gram_again", 2), ("gram_again", 16)}


def basis_constants(kernel: str, rows: int) -> dict[str, object]:
    """Return the compile-time arguments of a kernel that makes bases, and options."""
    constants: dict[str, object] = {"R": rows, "COLUMNS": COLUMNS, "CHUNK": CHUNK, **FUSED}
    # With these no registers spill on sm_80, sm_90 and sm_100: found by trial, since the compiler decides.
    constants["num_warps"] = 4 if (kernel, rows) in OF_FOUR_WARPS else 8
    return constants if kernel == "gram" else {**constants, "DEPENDENT": DEPENDENT_BELOW}


def _results(
    outs: Sequence[torch.Tensor | None], shapes: Sequence[torch.Size | tuple[int, ...]], device: torch.device
) -> list[torch.Tensor]:
    """Return buffers for results: the given ones, or new memory."""
    buffers = [out for out in outs if out is not None]
    if len(buffers) == len(outs):
        return buffers
    # Set the dtype explicitly, since kernels get addresses and users may change torch's default.
    return split_as(torch.empty(sum(map(math.prod, shapes)), dtype=torch.float32, device=device), shapes)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _matrix_addresses(batches: Sequence[torch.Tensor]) -> list[int]:
    """Return the address of each matrix of contiguous batches."""
    return [
        batch.data_ptr() + k * batch.stride(0) * batch.element_size()
        for batch in batches
        for k in range(len(batch))
    ]


def _flag(is_healthy: torch.Tensor | None) -> torch.Tensor | None:
    return None if is_healthy is None else is_healthy.view(torch.int8)


def _contiguous(batch: torch.Tensor) -> torch.Tensor:
    """Return a contiguous batch; a copy lives as long as the caller holds it."""
    # Kernels get addresses, and assume fp32.
    assert batch.dtype is torch.float32
    return batch.contiguous()


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
