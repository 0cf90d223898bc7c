"""Codes with Triton: gradients of all dtypes on accelerators, one launch per operation on a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.kernels.backend import CodeKernels, MeanArgs, ResidualArgs
from thinwire.kernels.torch_codes import levels_of
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton.launcher import padded
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import Codebook, Coded, block_bytes

# How many numbers a program holds; a longer block has a program for itself.
ELEMENTS = 2048

# How many numbers of a block adjacent threads have, for up to 4 bits and for more. With fewer, one thread has
# more of a block, and computes its scale once for all; but longer codes are then written in too short pieces.
# Found by trial on an H200, for 4 and 8 bits.
BESIDE, BESIDE_OF_LONG = 16, 32

# Products and sums are rounded separately, as in PyTorch, so that the mean is the same to the bit.
OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}

COLUMN = 4  # codes of a column, as `compiled_codes` says


def encoded(flat: torch.Tensor, blocks: Blocks, codebook: Codebook) -> Coded:
    """Take one launch."""
    # Kernels compute addresses from the first number.
    flat, members = flat.contiguous(), blocks.num_members
    # Not cleared: kernels write zeros to the padding of the last row, which is sent.
    coded = _empty(blocks, codebook, members, flat.device)
    tiles = _tiles(blocks)
    launcher.launch(
        "compiled_codes.encode",
        tiles * members,
        [
            flat,
            *_places(blocks, flat.device),
            _levels(codebook, flat.device),
            *_rows(coded),
            blocks.share,
            tiles,
            blocks.total,
        ],
        constants(codebook, blocks, **statistic(codebook)),
    )
    return coded


def averaged(item: MeanArgs) -> Coded:
    """Take one launch."""
    received, blocks, own, codebook, lost, _ = item
    device, message = received.message.device, received.message
    coded = _empty(blocks, codebook, 1, device)
    launcher.launch(
        "compiled_codes.average",
        _tiles(blocks),
        [
            *_rows(received),
            _places(blocks, device)[1],
            _levels(codebook, device),
            coded.message,
            lost,
            blocks.share,
            own.stop - own.start,
            own.start,
            len(message),
        ],
        constants(codebook, blocks, **statistic(codebook)),
    )
    return coded


def decode(messages: Sequence[Coded], blocks: Blocks, codebook: Codebook, flat: torch.Tensor) -> None:
    """Take one launch."""
    coded, other = messages[0], messages[1] if len(messages) == 2 else None
    launcher.launch(
        "compiled_codes.decode",
        _tiles(blocks) * len(coded.message),
        [
            *_rows(coded),
            *((None, 0) if other is None else _rows(other)),
            *_places(blocks, flat.device),
            _levels(codebook, flat.device),
            flat,
            blocks.share,
            _tiles(blocks),
            blocks.total,
        ],
        constants(codebook, blocks, LIMIT=_limit(flat)),
    )


def decode_and_keep(item: ResidualArgs) -> torch.Tensor:
    """Take one launch."""
    messages, blocks, codebook, flat, values, sent, lost, own, loss_scale = item
    coded = messages[-1]  # of two, the first is `sent`
    rest = torch.empty_like(values)
    launcher.launch(
        "compiled_codes.decode_and_keep",
        _tiles(blocks) * len(coded.message),
        [
            *_rows(coded),
            *_rows(sent),
            *_places(blocks, flat.device),
            _levels(codebook, flat.device),
            values,
            lost,
            None if loss_scale is None else loss_scale.float(),
            flat,
            rest,
            blocks.share,
            _tiles(blocks),
            blocks.total,
            own.start,
            own.stop,
            blocks.num_members,
        ],
        constants(codebook, blocks, LIMIT=_limit(flat)),
    )
    return rest


CODES = CodeKernels(encoded, averaged, decode, decode_and_keep)


def _empty(blocks: Blocks, codebook: Codebook, rows: int, device: torch.device) -> Coded:
    row_bytes = blocks.share * block_bytes(blocks.block, codebook.bits)
    return Coded(torch.empty(rows, row_bytes, dtype=torch.uint8, device=device), blocks.share)


def _rows(coded: Coded) -> tuple[torch.Tensor, int]:
    return coded.message, coded.message.stride(0)


def _places(blocks: Blocks, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the starts and lengths of blocks; None if all are whole, since kernels compute them then."""
    return (None, None) if blocks.are_whole else (blocks.offsets[device], blocks.lengths[device])


def _tiles(blocks: Blocks) -> int:
    """Return the number of programs for the blocks of one member."""
    return -(-blocks.share // max(1, ELEMENTS // padded(blocks.block)))


def _limit(flat: torch.Tensor) -> float:
    return 0.0 if flat.dtype == torch.float32 else torch.finfo(flat.dtype).max


def _levels(codebook: Codebook, device: torch.device) -> torch.Tensor | None:
    """Return the levels, unless kernels compute them."""
    is_reckoned = codebook.is_linear or codebook.cubic
    return None if is_reckoned else levels_of(codebook, torch.float32, device)


def constants(codebook: Codebook, blocks: Blocks, **more: object) -> dict[str, object]:
    """Return the compile-time arguments of a kernel, and options."""
    width = padded(blocks.block)
    beside = min(BESIDE if codebook.bits <= 4 else BESIDE_OF_LONG, width)
    return {
        **{"CUBIC": codebook.cubic, "LEVELS": len(codebook.levels), "BITS": codebook.bits},
        **{"OUTER": width // beside, "ROWS": max(1, ELEMENTS // width), "INNER": beside // COLUMN},
        **{"BLOCK": blocks.block, "ALIGNED": blocks.divisor % COLUMN == 0},
        **OPTIONS,
        **more,
    }


def statistic(codebook: Codebook) -> dict[str, object]:
    """Return the compile-time arguments of kernels that encode."""
    least, most = codebook.reach
    return {"LAST": codebook.levels[-1], "STATISTIC": codebook.statistic, "LEAST": least, "MOST": most}
