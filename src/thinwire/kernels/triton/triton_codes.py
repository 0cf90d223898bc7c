"""Codes by Triton: fp32 on accelerators, nearest and stochastic, a launch for each operation on a bucket.

What there is no kernel for, PyTorch's kernels do.
"""

from __future__ import annotations

import torch

from thinwire.kernels import torch_codes
from thinwire.kernels.base import Averaging, CodeKernels
from thinwire.kernels.torch_codes import levels_of
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.launcher import padded
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded, block_bytes
from thinwire.tensors.rounding import Draws

# Numbers that a program holds. A block longer than that PyTorch's kernels take.
ELEMENTS = 1024

# Products and sums are rounded one by one, as PyTorch rounds them: then the mean is the same to the bit.
OPTIONS = {"enable_fp_fusion": False, "num_warps": 8}


def encoded(flat: torch.Tensor, blocks: Blocks, codebook: Codebook, draws: Draws | None) -> Coded:
    """Take one launch."""
    if blocks.block > ELEMENTS:
        return torch_codes.encoded(flat, blocks, codebook, draws)
    # Addresses are reckoned from the first number on.
    flat, members = flat.contiguous(), blocks.num_members
    # It is not cleared: kernels write zeros to what only fills up the last row, because it is sent.
    coded = _empty(blocks, codebook, members, flat.device)
    launcher.launch(
        "compiled_codes.encode",
        _programs(blocks.share * members, blocks.block),
        [
            flat,
            *_places(blocks, flat.device),
            *_keys(draws),
            levels_of(codebook, torch.float32, flat.device),
            coded.message,
            coded.message.stride(0),
            blocks.share,
            blocks.total,
            blocks.share * members,
        ],
        {**_constants(blocks, codebook), **_statistic(codebook, draws)},
        flat.device,
        reads=[flat],
        writes=[coded.message],
    )
    return coded


def averaged(item: Averaging) -> Coded:
    """Take one launch."""
    received, blocks, own, codebook, draws, lost, _ = item
    if blocks.block > ELEMENTS:
        return torch_codes.averaged(item)
    device, message = received.message.device, received.message
    coded = _empty(blocks, codebook, 1, device)
    launcher.launch(
        "compiled_codes.average",
        _programs(blocks.share, blocks.block),
        [
            message,
            message.stride(0),
            None if blocks.are_whole else blocks.lengths(device)[own],
            *_keys(draws),
            levels_of(codebook, torch.float32, device),
            coded.message,
            lost,
            blocks.share,
            own.stop - own.start,
            blocks.share,
            len(message),
        ],
        {**_constants(blocks, codebook), **_statistic(codebook, draws), "KEEPS": lost is not None},
        device,
        reads=[message],
        writes=[coded.message, *([] if lost is None else [lost])],
    )
    return coded


def decode(coded: Coded, blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
    """Take one launch."""
    if blocks.block > ELEMENTS:
        torch_codes.decode(coded, blocks, codebook, flat)
    else:
        _decode(coded, blocks, codebook, None, flat)


def remainder(flat: torch.Tensor, coded: Coded, blocks: Blocks, codebook: Codebook) -> torch.Tensor:
    """Take one launch."""
    if blocks.block > ELEMENTS:
        return torch_codes.remainder(flat, coded, blocks, codebook)
    # It is not in place: what is left is kept, and the numbers themselves become the mean.
    rest = torch.empty_like(flat)
    _decode(coded, blocks, codebook, flat, rest)
    return rest


CODES = CodeKernels(encoded, averaged, decode, remainder)


def _decode(
    coded: Coded, blocks: Blocks, codebook: Codebook, flat: torch.Tensor | None, out: torch.Tensor
) -> None:
    launcher.launch(
        "compiled_codes.decode",
        _programs(blocks.total, blocks.block),
        [
            coded.message,
            coded.message.stride(0),
            blocks.share,
            *_places(blocks, out.device),
            levels_of(codebook, torch.float32, out.device),
            flat,
            out,
            blocks.total,
        ],
        {**_constants(blocks, codebook), "SUBTRACTS": flat is not None},
        out.device,
        reads=[coded.message, *([] if flat is None else [flat])],
        writes=[out],
    )


def _empty(blocks: Blocks, codebook: Codebook, rows: int, device: torch.device) -> Coded:
    row_bytes = blocks.share * block_bytes(blocks.block, codebook.bits)
    return Coded(torch.empty(rows, row_bytes, dtype=torch.uint8, device=device), blocks.share)


def _keys(draws: Draws | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if draws is None else (draws.keys, draws.first)


def _places(blocks: Blocks, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return where blocks begin, and their lengths; where all are whole, a kernel knows that by itself."""
    return (None, None) if blocks.are_whole else (blocks.firsts(device), blocks.lengths(device))


def _programs(count: int, block: int) -> int:
    return -(-count // (ELEMENTS // padded(block)))


def _constants(blocks: Blocks, codebook: Codebook) -> dict[str, object]:
    width = padded(blocks.block)
    return {
        **{"BLOCK": blocks.block, "PADDED": width, "ROWS": ELEMENTS // width, "WHOLE": blocks.are_whole},
        **{"CUBIC": codebook.cubic, "LEVELS": len(codebook.levels), "BITS": codebook.bits},
        **OPTIONS,
    }


def _statistic(codebook: Codebook, draws: Draws | None) -> dict[str, object]:
    return {"LAST": codebook.levels[-1], "STATISTIC": codebook.statistic, "DRAWN": draws is not None}
