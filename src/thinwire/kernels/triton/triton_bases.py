"""Orthonormal rows of many factors at once, by Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.kernels.matrices import DEPENDENT_BELOW
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.launcher import FUSED
from thinwire.kernels.triton.tables import each_of, padded, table_of, tiles_of

# Columns of a factor that one program has, and holds at a time: few, as a division in fp64 is a subroutine on
# sm_80: around it registers that are full would be put aside.
CHUNK, COLUMNS = 1024, 128


def orthonormal_rows(
    batches: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor] | None
) -> list[torch.Tensor]:
    """As `Kernels.orthonormal_rows`: by PyTorch's arithmetic, in three launches.

    Gram matrices are added up chunk by chunk, in order, so that many programs share a long factor.
    """
    if not batches:
        return []
    device = batches[0].device
    sizes = [each.numel() for each in batches]
    flats = torch.empty(sum(sizes), dtype=torch.float32, device=device).split_with_sizes(sizes)
    results = [flat.view_as(batch) for flat, batch in zip(flats, batches, strict=True)]
    rows = padded(max(batch.shape[1] for batch in batches))
    factors, outs = each_of(batches), each_of(results)
    instead: list[torch.Tensor | None] = [None] * len(factors)
    if drawn is not None:
        instead = [each for batch, each in zip(batches, drawn, strict=True) for _ in batch]
    counts = [-(-factor.shape[1] // CHUNK) for factor in factors]
    # Of each chunk two Gram matrices, and of each matrix a transform. Freed when this returns: the
    # allocator hands the memory out again on this stream only, behind what reads it here.
    sizes = [(2 * count + 1) * rows * rows for count in counts]
    room = torch.empty(sum(sizes), dtype=torch.float64, device=device).split_with_sizes(sizes)
    table = table_of(
        [
            (
                factor.data_ptr(),
                0 if other is None else other.data_ptr(),
                out.data_ptr(),
                parts.data_ptr(),
                factor.shape[1],
                factor.shape[0],
                count,
            )
            for factor, other, out, parts, count in zip(factors, instead, outs, room, counts, strict=True)
        ],
        device,
    )
    tiles = tiles_of(counts, device)
    # Three launches, since the programs of one can't wait for each other.
    for kernel, writes in (("gram", room), ("gram_again", room), ("orthonormal", outs)):
        launcher.launch(
            f"compiled_bases.{kernel}",
            sum(counts),
            [table, tiles],
            basis_constants(kernel, rows),
            device,
            reads=factors,
            writes=writes,
        )
    return results


def basis_constants(kernel: str, rows: int) -> dict[str, object]:
    """Return the compile-time arguments of a kernel that makes bases, and options."""
    constants: dict[str, object] = {"R": rows, "COLUMNS": COLUMNS, "CHUNK": CHUNK, **FUSED}
    # With these nothing is put aside on sm_80, sm_90 and sm_100: by trial, for it is the compiler's to say.
    constants["num_warps"] = 4 if (kernel, rows) == ("gram_again", 16) else 8
    return constants if kernel == "gram" else {**constants, "DEPENDENT": DEPENDENT_BELOW}
