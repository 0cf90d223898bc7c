"""Few entries with Triton: gradients in fp32, fp16 and bf16, four launches and a fill of zeros per bucket."""

from __future__ import annotations

import torch

from thinwire.kernels.backend import EntryKernels, TopKQuery
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.launcher import padded
from thinwire.kernels.triton.limits import warn_fallback
from thinwire.tensors.entries import EntryLayout

# The most elements, and entries, of a chunk that a program can hold.
LENGTH, KEPT = 4096, 1024

# How many entries, and marks, a program holds, of several chunks.
ENTRIES_HELD, MARKS_HELD = 256, 1024

# Products and sums are rounded separately, as in PyTorch.
OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
# It mostly waits for memory: with fewer registers per thread, more threads run.
MERGING_WARPS = 8


def serves(layout: EntryLayout) -> bool:
    """Return whether chunks are short enough; warn if not."""
    length, kept, _ = layout.most
    if length > LENGTH or kept > KEPT:
        return warn_fallback(
            f"Triton's kernels take up to {KEPT:,} entries of chunks up to {LENGTH:,}, "
            f"and these are {kept:,} of {length:,}"
        )
    return True


def encode(query: TopKQuery) -> torch.Tensor:
    """Take two launches and a fill of zeros."""
    layout, flat, device = query.layout, query.flat, query.flat.device
    positions, values = _empty((layout.num_entries,), device)
    table = layout.table[device]
    launcher.launch(
        "compiled_entries.select",
        layout.num_chunks,
        [flat, query.error, query.loss_scale, table, positions, values, layout.num_chunks],
        _of_chunks(query),
    )
    # Whole words, in which each chunk sets its own bits.
    message = torch.zeros(-(-layout.num_bytes // 4) * 4, dtype=torch.uint8, device=device)
    width = padded(layout.most[1])
    rows = max(1, ENTRIES_HELD // width)
    launcher.launch(
        "compiled_entries.pack",
        -(-layout.num_chunks // rows),
        [positions, values, table, message, layout.num_chunks, *_streams(layout)],
        {**_of_words(layout), "KEPT": width, "ROWS": rows},
    )
    return message[: layout.num_bytes]


def decode(query: TopKQuery, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take one launch; positions are relative to chunks."""
    layout, members, device = query.layout, len(gathered), gathered.device
    positions, values = _empty((members, layout.num_entries), device)
    width = padded(layout.most[2])
    rows = max(1, MARKS_HELD // width)
    sizes = [layout.num_chunks, *_streams(layout), members, layout.num_entries]
    launcher.launch(
        "compiled_entries.unpack",
        -(-layout.num_chunks // rows),
        [gathered, gathered.stride(0), layout.table[device], positions, values, *sizes],
        {**_of_words(layout), "MARKS": width, "ROWS": rows},
    )
    return positions, values


def merge(
    query: TopKQuery,
    sent: tuple[torch.Tensor, torch.Tensor],
    less: torch.Tensor,
    is_healthy: torch.Tensor | None,
) -> None:
    """Take one launch."""
    layout, flat, error, is_wide = query.layout, query.flat, query.error, query.flat.dtype == torch.float32
    counts = torch.empty_like(error) if query.by_senders else None
    launcher.launch(
        "compiled_entries.merge",
        layout.num_chunks,
        [
            *(flat, error, query.loss_scale),
            None if is_healthy is None else is_healthy.view(torch.int8),
            *(layout.table[flat.device], *sent, less),
            flat if is_wide else torch.empty_like(error),  # a buffer for the sums, few of which are used
            *(counts, layout.num_chunks, query.rank, len(sent[0]), layout.num_entries),
        ],
        {
            **_of_chunks(query),
            "KEPT": padded(layout.most[1]),
            "BY_SENDERS": query.by_senders,
            "LIMIT": 0.0 if is_wide else torch.finfo(flat.dtype).max,
            "num_warps": MERGING_WARPS,
        },
    )


def _empty(shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return buffers for positions and values."""
    return (
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def _streams(layout: EntryLayout) -> tuple[int, int]:
    """Return the bit at which words start in a message, and the byte at which scales do."""
    marks, words, _ = layout.stream_bytes
    return 8 * marks, marks + words


def _of_chunks(query: TopKQuery) -> dict[str, object]:
    is_aligned = query.layout.is_aligned and (query.flat.data_ptr() | query.error.data_ptr()) % 16 == 0
    return {"DECAY": query.decay, "LENGTH": padded(query.layout.most[0]), "ALIGNED": is_aligned, **OPTIONS}


def _of_words(layout: EntryLayout) -> dict[str, object]:
    return {"LOW": layout.low_bits, "CODE": layout.code_bits, **OPTIONS}


ENTRIES = EntryKernels(serves, encode, decode, merge, commits_on_device=True)
