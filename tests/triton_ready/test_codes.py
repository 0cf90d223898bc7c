"""Codes by Triton's kernels are those of PyTorch's, to the bit."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from catalog import numbers
from thinwire.algorithms.quantize import MAX_BLOCK
from thinwire.kernels.backend import CodeKernels, MeanArgs, ResidualArgs
from thinwire.kernels.torch_codes import CODES as PYTORCH
from thinwire.kernels.triton.triton_codes import CODES as TRITON
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS, Codebook, Coded
from triton_ready.interpreting import quiet

pytestmark = quiet

QUICK = {8, 5, 4, 1}
every_bits = pytest.mark.parametrize(
    "bits", [bits if bits in QUICK else pytest.param(bits, marks=pytest.mark.long) for bits in CODEBOOKS]
)
SHORT = Blocks((300, 3, 0, 128, 1, 65), 64, 2)
WHOLE = Blocks((144, 288), 144, 2)


def are_equal(one: Coded, other: Coded) -> bool:
    return one.share == other.share and torch.equal(one.message, other.message)


def as_decoded(
    kernels: CodeKernels, coded: Coded, blocks: Blocks, codebook: Codebook, dtype: torch.dtype
) -> torch.Tensor:
    flat = torch.empty(2, sum(blocks.numels), dtype=dtype)
    other = PYTORCH.encoded(numbers(blocks, 1), blocks, codebook)
    kernels.decode([coded], blocks, codebook, flat[0])
    kernels.decode([coded, other], blocks, codebook, flat[1])
    return flat


@every_bits
@pytest.mark.parametrize("blocks", [SHORT, WHOLE], ids=["short", "whole"])
def test_to_the_bit_what_pytorch_gives(bits: int, blocks: Blocks) -> None:
    codebook, own = CODEBOOKS[bits], blocks.shares[1]
    flat = numbers(blocks)
    for dtype in (torch.float16, torch.float32):
        # Some come out beyond fp16's range, and are cut off.
        gradients = flat.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
        coded = TRITON.encoded(gradients, blocks, codebook)
        assert are_equal(coded, PYTORCH.encoded(gradients, blocks, codebook))
        assert torch.equal(
            *[as_decoded(kernels, coded, blocks, codebook, dtype) for kernels in (TRITON, PYTORCH)]
        )
    assert coded.message.nbytes < flat.nbytes / 2.5

    sent = [PYTORCH.encoded(numbers(blocks, seed), blocks, codebook) for seed in range(3)]
    # Between those of other buckets, as several buckets' messages travel.
    rows = torch.stack([coded.message[1] for coded in sent])
    beside = torch.full((len(sent), 6), 255, dtype=torch.uint8)
    received = Coded.arrived(torch.cat([beside, rows, beside], dim=1)[:, 6:-6], blocks.share)
    lost = [torch.empty(own.stop - own.start, blocks.block) for _ in range(2)]
    means = [
        kernels.averaged(MeanArgs(received, blocks, own, codebook, remainder, torch.float32))
        for kernels, remainder in zip((TRITON, PYTORCH), lost, strict=True)
    ]
    assert are_equal(*means)
    assert torch.equal(*lost)
    other = PYTORCH.encoded(numbers(blocks, 1), blocks, codebook)
    types, kinds = ((torch.float32, None), (torch.float16, torch.tensor(3.0))), ([other], [coded, other])
    for (dtype, scale), messages in product(types, kinds):
        kept, remainder = [], lost[0] if len(messages) == 1 else None
        for kernels in (TRITON, PYTORCH):
            values = flat.clone()
            gradients = values.to(dtype)  # in fp32 the same memory
            item = ResidualArgs(messages, blocks, codebook, gradients, values, coded, remainder, own, scale)
            kept.append((kernels.decode_and_keep(item), gradients))
        assert all(map(torch.equal, *kept))


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e-42])
def test_what_is_not_finite_or_too_small_ends_as_with_pytorch(bits: int, value: float) -> None:
    blocks, codebook = Blocks((128,), 64, 1), CODEBOOKS[bits]
    flat = torch.linspace(-1, 1, 128)
    flat[:64] *= 1e-42 if value == 1e-42 else 1
    flat[5] = value
    found = []
    for kernels in (TRITON, PYTORCH):
        coded = kernels.encoded(flat, blocks, codebook)
        found.append(torch.empty_like(flat))
        kernels.decode([coded], blocks, codebook, found[-1])
        assert coded.scales[0].isfinite().tolist() == [math.isfinite(value), True]
    assert found[0][:64].isnan().all() == (not math.isfinite(value))
    assert torch.equal(*[flat.nan_to_num(7.0) for flat in found])


def test_the_longest_blocks() -> None:
    blocks, codebook = Blocks((2 * MAX_BLOCK + 1,), MAX_BLOCK, 2), CODEBOOKS[4]
    flat = numbers(blocks)
    coded = TRITON.encoded(flat, blocks, codebook)
    assert are_equal(coded, PYTORCH.encoded(flat, blocks, codebook))
    found = [as_decoded(kernels, coded, blocks, codebook, torch.float32) for kernels in (TRITON, PYTORCH)]
    assert torch.equal(*found)


def test_every_number_around_a_middle_or_a_level_has_pytorchs_code() -> None:
    """Where codes are found by arithmetic, and not by comparing with all."""
    levels = torch.tensor(CODEBOOKS[4].levels)
    edges = torch.cat([levels, (levels[1:] + levels[:-1]) / 2])
    around = [torch.nextafter(edges, torch.tensor(end)) for end in (-math.inf, math.inf)]
    # In every block the largest level, which makes its scale one.
    rows = torch.cat([edges, *around]).clamp(-1127, 1127).view(-1, 1).expand(-1, 64).clone()
    rows[:, 0] = 1127
    blocks = Blocks((rows.numel(),), 64, 1)
    found = [kernels.encoded(rows.view(-1), blocks, CODEBOOKS[4]) for kernels in (TRITON, PYTORCH)]
    assert are_equal(*found)
    assert (found[0].scales == 1).all()
