"""Low-rank steps by Triton: gradients in fp32, fp16 and bf16, matrix ranks up to 32, all matrices at once.

In fp32 the first kernel of a step adds the residuals to the gradients in place, as PyTorch's do; to gradients
in 16 bits, which could not hold the sum, every kernel adds them as it reads both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from thinwire.kernels.base import Kernels
from thinwire.kernels.matrices import Asked, Factors, MatrixGroup, Reconstruction, Write
from thinwire.kernels.torch_kernels import TorchKernels
from thinwire.kernels.triton import launcher, triton_bases
from thinwire.kernels.triton.launcher import FUSED
from thinwire.kernels.triton.limits import GRADIENT_TYPES
from thinwire.kernels.triton.tables import each_of, padded, table_of, tiles_of

LETTERS = {torch.float32: "f", torch.float16: "h", torch.bfloat16: "b"}

# From so many rows of a factor on, products are the tensor cores'.
DOT_ROWS = 16

# Rows of a matrix that one program of a projection adds up: a fixed number, whatever the GPU.
SPLIT_ROWS = 512

# Of a program that adds up parts; of one that only looks at each.
SUMS, ELEMENTS = 1024, 4096


class TritonKernels(Kernels):
    """A few kernels over tables of addresses; see `Kernels` for what each method does."""

    gradient_types = GRADIENT_TYPES

    def __init__(self) -> None:
        self._others = TorchKernels()

    def products(self, items: Sequence[Asked]) -> list[torch.Tensor]:
        """As `Kernels.products`."""
        groups, first = [item.group for item in items], items[0]
        results = _room(groups, [group.matrices[0].shape[0] for group in groups])
        scale = _scale(first.loss_scale)
        for some in _of_one_type(groups):
            given = _Given([groups[index] for index in some], is_first=first.add_error)
            shape, rows = _Shape(given.groups, keeps=given.is_kept), given.rows(scale)
            factors = each_of([items[index].factor for index in some])
            outs = each_of([results[index] for index in some])
            launcher.launch(
                "compiled_matrices.products",
                sum(counts := [-(-row[3] // shape.rows) for row in rows]),
                [
                    table_of(
                        [
                            (*row, q.data_ptr(), p.data_ptr())
                            for row, q, p in zip(rows, factors, outs, strict=True)
                        ],
                        factors[0].device,
                    ),
                    tiles_of(counts, factors[0].device),
                ],
                {**shape.constants(), "KEEPS": given.is_kept},
                factors[0].device,
                reads=[*given.read, *factors],
                writes=[*given.written, *outs],
            )
        return results

    def projections(self, items: Sequence[Asked]) -> list[torch.Tensor]:
        """As `Kernels.projections`."""
        groups, first = [item.group for item in items], items[0]
        results = _room(groups, [group.matrices[0].shape[1] for group in groups])
        scale = _scale(first.loss_scale)
        for some in _of_one_type(groups):
            given = _Given([groups[index] for index in some], is_first=first.add_error)
            shape, rows = _Shape(given.groups, keeps=given.is_kept), given.rows(scale)
            factors = each_of([items[index].factor for index in some])
            outs = each_of([results[index] for index in some])
            device = factors[0].device
            # Parts and a second launch, and no atomic additions: those come in another order every time.
            splits = [-(-row[3] // SPLIT_ROWS) for row in rows]
            sizes = [count * out.numel() for count, out in zip(splits, outs, strict=True)]
            parts = outs[0].new_empty(sum(sizes)).split_with_sizes(sizes)
            counts = [count * -(-row[4] // shape.columns) for count, row in zip(splits, rows, strict=True)]
            table = [
                (*row, p.data_ptr(), part.data_ptr())
                for row, p, part in zip(rows, factors, parts, strict=True)
            ]
            launcher.launch(
                "compiled_matrices.projections",
                sum(counts),
                [table_of(table, device), tiles_of(counts, device)],
                {**shape.constants(), "SPLIT": SPLIT_ROWS, "KEEPS": given.is_kept},
                device,
                reads=[*given.read, *factors],
                writes=[*given.written, *parts],
            )
            table = [
                (part.data_ptr(), count, out.numel(), out.data_ptr())
                for part, count, out in zip(parts, splits, outs, strict=True)
            ]
            counts = [-(-out.numel() // SUMS) for out in outs]
            launcher.launch(
                "compiled_matrices.add_splits",
                sum(counts),
                [table_of(table, device), tiles_of(counts, device)],
                {"COLUMNS": SUMS, **FUSED},
                device,
                reads=parts,
                writes=outs,
            )
        return results

    def reconstruct(self, items: Sequence[Reconstruction]) -> None:
        """As `Kernels.reconstruct`; what a 16-bit gradient can't hold of a mean goes to its residual."""
        groups, is_healthy = [item.group for item in items], items[0].is_healthy
        scale = _scale(items[0].loss_scale)
        for some in _of_one_type(groups, [len(item.terms) for item in items]):
            given = _Given([groups[index] for index in some], is_first=False)
            found = [items[index].terms for index in some]
            # Errors are mostly written where the group's own are read: a program has read all of its tile
            # before it writes any of it, and no other program has that tile.
            shape, rows = _Shape(given.groups, reconstructs=True), given.rows(scale)
            nothing: list[torch.Tensor | None] = [None]
            new = [
                error
                for index, group in zip(some, given.groups, strict=True)
                for error in (items[index].errors or nothing * len(group.matrices))
            ]
            # Of the terms before it `subtract_own` has taken what was sent.
            last = [each[-1] for each in found]
            # Of each matrix: the left and right factor that was sent, and those of the means.
            factors = [
                each_of([pair[side] for pair in [each.pair(each.own) for each in last]]) for side in (0, 1)
            ]
            for term in range(len(found[0])):
                pairs = [each[term].pair(each[term].mean) for each in found]
                factors += [each_of([pair[side] for pair in pairs]) for side in (0, 1)]
            device = given.groups[0].matrices[0].device
            table = [
                (
                    *row,
                    0 if error is None else error.data_ptr(),
                    *(factor.data_ptr() for factor in of_matrix),
                )
                for row, error, of_matrix in zip(rows, new, zip(*factors, strict=True), strict=True)
            ]
            counts = [-(-row[3] // shape.rows) * -(-row[4] // shape.columns) for row in rows]
            dtype = given.groups[0].matrices[0].dtype
            # In fp32 a mean beyond the range is infinite, and its step is not healthy.
            limit = 0.0 if dtype == torch.float32 else torch.finfo(dtype).max
            launcher.launch(
                "compiled_matrices.reconstruct",
                sum(counts),
                [
                    table_of(table, device),
                    tiles_of(counts, device),
                    None if is_healthy is None else is_healthy.view(torch.int8),
                ],
                {**shape.constants(new), "TERMS": len(found[0]), "LIMIT": limit},
                device,
                reads=[*given.read, *(each for side in factors for each in side)],
                writes=[*_matrices(given.groups), *(error for error in new if error is not None)],
            )

    def subtract_own(self, groups: Sequence[MatrixGroup], factors: Sequence[Factors]) -> None:
        """As `Kernels.subtract_own`, by PyTorch's products: of M it is the gradient that becomes less."""
        self._others.subtract_own(groups, factors)

    def write(self, items: Sequence[Write], is_healthy: torch.Tensor | None) -> list[torch.Tensor]:
        """As `Kernels.write`, in place, by one launch; what stays is read and written in other steps only."""
        # Types are compiled in; all else a launch looks up for each tensor.
        kinds: dict[tuple[torch.dtype, torch.dtype], list[Write]] = {}
        for item in items:
            # What stays is put back from its own type.
            source = item.target if item.healthy is None else item.healthy
            if item.healthy is not None or is_healthy is not None:
                kinds.setdefault((item.target.dtype, source.dtype), []).append(item)
        for (dtype, source_dtype), alike in kinds.items():
            targets, device = [item.target for item in alike], alike[0].target.device
            counts = [-(-target.numel() // ELEMENTS) for target in targets]
            addresses = [
                tuple(0 if tensor is None else tensor.data_ptr() for tensor in item) for item in alike
            ]
            table = [(*row, target.numel()) for row, target in zip(addresses, targets, strict=True)]
            launcher.launch(
                "compiled_matrices.write",
                sum(counts),
                [
                    table_of(table, device),
                    tiles_of(counts, device),
                    None if is_healthy is None else is_healthy.view(torch.int8),
                ],
                {"G": LETTERS[dtype], "SOURCE": LETTERS[source_dtype], "COLUMNS": ELEMENTS, **FUSED},
                device,
                reads=[item.healthy for item in alike if item.healthy is not None],
                writes=[item.target for item in alike if item.healthy is not None],
            )
        return [item.target for item in items]

    def orthonormal_rows(
        self, batches: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """As `Kernels.orthonormal_rows`: by PyTorch's arithmetic, in three launches."""
        return triton_bases.orthonormal_rows(batches, drawn)

    def all_finite(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `Kernels.all_finite`, in two launches."""
        device = tensors[0].device
        counts = [-(-tensor.numel() // ELEMENTS) for tensor in tensors]
        # One byte of each program, and no common one: to write that, they would have to take turns.
        flags = torch.empty(sum(counts), dtype=torch.int8, device=device)
        launcher.launch(
            "compiled_matrices.finite",
            sum(counts),
            [
                table_of([(tensor.data_ptr(), tensor.numel()) for tensor in tensors], device),
                tiles_of(counts, device),
                flags,
            ],
            {"G": LETTERS[tensors[0].dtype], "COLUMNS": ELEMENTS, **FUSED},
            device,
            reads=tensors,
            writes=[flags],
        )
        return flags.view(torch.bool).all()


class _Given:
    """Gradients of one type, and where their residuals are.

    Attributes:
        groups: The gradients, and their residuals.
        is_kept: Whether a kernel leaves the sum of both where the gradients are.
        read: What a kernel reads of them.
        written: What it writes of them, but for what it was asked for.
    """

    def __init__(self, groups: Sequence[MatrixGroup], *, is_first: bool) -> None:
        self.groups = groups
        # In fp32 those that come later find the sum.
        self._adds = is_first or groups[0].matrices[0].dtype != torch.float32
        errors = [error for group in groups for error in group.errors if error is not None]
        self.is_kept = bool(errors) and is_first and groups[0].matrices[0].dtype == torch.float32
        self.read = [*_matrices(groups), *(errors if self._adds else [])]
        self.written = _matrices(groups) if self.is_kept else []

    def rows(self, scale: torch.Tensor | None) -> list[tuple[int, ...]]:
        """Return what `compiled_matrices._matrix` reads of each matrix."""
        return [
            (
                matrix.data_ptr(),
                error.data_ptr() if error is not None and self._adds else 0,
                0 if scale is None else scale.data_ptr(),
                *matrix.shape,
                group.matrix_rank,
            )
            for group in self.groups
            for matrix, error in zip(group.matrices, group.errors, strict=True)
        ]


class _Shape:
    """The tiles of a launch."""

    def __init__(
        self, groups: Sequence[MatrixGroup], *, reconstructs: bool = False, keeps: bool = False
    ) -> None:
        self._groups = groups
        self.factor_rows = padded(max(group.matrix_rank for group in groups))
        self._warps = 4
        if self.factor_rows >= DOT_ROWS:
            self.rows, self.columns = 32, 64
        else:
            # Tensor cores take blocks of at least sixteen rows: below, products are made lane by lane.
            # What a program adds up, factor rows · rows · columns, stays in its registers.
            # A loop over its rows unrolled, a factor of eight would not leave `reconstruct` enough of them.
            # Nor would it, of so many, if it wrote what it has read as well.
            is_tight = self.factor_rows > 4
            few = 8 if is_tight else 16
            self.rows = few if reconstructs or (keeps and is_tight) else max(16, 64 // self.factor_rows)
            self.columns = 128
            self._warps = 8 if is_tight and not (reconstructs or keeps) else 4

    def constants(self, written: Sequence[torch.Tensor | None] = ()) -> dict[str, object]:
        """Return the compile-time arguments, and options."""
        # Three products of TF32 halves come to fp32; AMD's tensor cores have no TF32.
        dot = "ieee" if torch.version.hip else "tf32x3"
        errors = [error for group in self._groups for error in group.errors]
        touched = [each for each in [*_matrices(self._groups), *errors, *written] if each is not None]
        # Given to the compiler, which else reads one number at a time: an address from a table may be any.
        is_aligned = all(each.shape[-1] % 16 == 0 and each.data_ptr() % 16 == 0 for each in touched)
        return {
            "G": LETTERS[self._groups[0].matrices[0].dtype],
            "R": self.factor_rows,
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "ALIGNED": is_aligned,
            "DOT": dot if self.factor_rows >= DOT_ROWS else "",
            **FUSED,
            "num_warps": self._warps,
        }


def _of_one_type(groups: Sequence[MatrixGroup], also: Sequence[int] | None = None) -> Iterator[list[int]]:
    """Yield the groups, by index, that one launch may serve: of one type of gradients."""
    found: dict[object, list[int]] = {}
    for index, group in enumerate(groups):
        key = (group.matrices[0].dtype, also[index] if also else 0)
        found.setdefault(key, []).append(index)
    yield from found.values()


def _scale(loss_scale: torch.Tensor | None) -> torch.Tensor | None:
    # Not read here: a kernel gets its address, and the host need not wait for its value.
    return None if loss_scale is None else loss_scale.float()


def _room(groups: Sequence[MatrixGroup], lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return a factor for each matrix of each group, (matrices, r, length), one behind the other."""
    shapes = [
        (len(group.matrices), group.matrix_rank, length)
        for group, length in zip(groups, lengths, strict=True)
    ]
    sizes = [count * rows * length for count, rows, length in shapes]
    if not sizes:
        return []
    # In one piece, in the order in which they are sent: so a message of them is not joined first. The type is
    # named, here and wherever an address goes to a kernel: the default one is the user's to set.
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=groups[0].matrices[0].device)
    return [part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)]


def _matrices(groups: Sequence[MatrixGroup]) -> list[torch.Tensor]:
    return [matrix for group in groups for matrix in group.matrices]
