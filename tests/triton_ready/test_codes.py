"""Codes by Triton's kernels are those of PyTorch's, to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from catalog import numbers, spec
from thinwire.kernels.base import Averaging
from thinwire.kernels.torch_codes import CODES as PYTORCH
from thinwire.kernels.triton.triton_codes import CODES as TRITON
from thinwire.kernels.triton.triton_codes import ELEMENTS
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS, Coded
from thinwire.tensors.rounding import Draws, draws_for
from triton_ready.interpreting import quiet

pytestmark = quiet

QUICK = {8, 4, 1}
every_bits = pytest.mark.parametrize(
    "bits", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in CODEBOOKS]
)
SHORT = Blocks((300, 3, 0, 128, 1, 65), 64, 2)
WHOLE = Blocks((144, 288), 144, 2)


def are_equal(one: Coded, other: Coded) -> bool:
    return one.share == other.share and torch.equal(one.message, other.message)


def draws_of(blocks: Blocks) -> Draws:
    return draws_for(
        blocks, [spec(str(numel), numel) for numel in blocks.numels], 0, 0, 0, torch.device("cpu")
    )


@every_bits
@pytest.mark.parametrize(
    ("blocks", "drawn"), [(SHORT, False), (WHOLE, True)], ids=["short, nearest", "whole, drawn"]
)
def test_to_the_bit_what_pytorch_gives(bits: int, blocks: Blocks, drawn: bool) -> None:
    codebook, draws, own = CODEBOOKS[bits], draws_of(blocks) if drawn else None, blocks.own(0)
    flat = numbers(blocks)
    coded = TRITON.encoded(flat, blocks, codebook, draws)
    assert are_equal(coded, PYTORCH.encoded(flat, blocks, codebook, draws))
    assert coded.message.nbytes < flat.nbytes / 2.5
    decoded = [torch.empty_like(flat) for _ in range(2)]
    for kernels, each in zip((TRITON, PYTORCH), decoded, strict=True):
        kernels.decode(coded, blocks, codebook, each)
    assert torch.equal(*decoded)
    assert torch.equal(TRITON.remainder(flat, coded, blocks, codebook), flat - decoded[1])

    sent = [PYTORCH.encoded(numbers(blocks, seed), blocks, codebook, None) for seed in range(3)]
    # Between those of other buckets, as several buckets' messages travel.
    rows = torch.stack([each.message[0] for each in sent])
    beside = torch.full((len(sent), 6), 255, dtype=torch.uint8)
    received = Coded.arrived(torch.cat([beside, rows, beside], dim=1)[:, 6:-6], blocks.share)
    lost = [torch.empty(own.stop, blocks.block) for _ in range(2)]
    of_own = None if draws is None else draws.of(own)
    means = [
        kernels.averaged(Averaging(received, blocks, own, codebook, of_own, each, torch.float32))
        for kernels, each in zip((TRITON, PYTORCH), lost, strict=True)
    ]
    assert are_equal(*means)
    assert torch.equal(*lost)


@pytest.mark.parametrize("bits", [8, 4, 1])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e-42])
def test_what_is_not_finite_or_too_small_ends_as_with_pytorch(bits: int, value: float) -> None:
    blocks, codebook = Blocks((128,), 64, 1), CODEBOOKS[bits]
    flat = torch.linspace(-1, 1, 128)
    flat[:64] *= 1e-42 if value == 1e-42 else 1
    flat[5] = value
    found = []
    for kernels in (TRITON, PYTORCH):
        coded = kernels.encoded(flat, blocks, codebook, None)
        found.append(torch.empty_like(flat))
        kernels.decode(coded, blocks, codebook, found[-1])
        assert coded.scales[0].isfinite().tolist() == [math.isfinite(value), True]
    assert found[0][:64].isnan().all() == (not math.isfinite(value))
    assert torch.equal(*[each.nan_to_num(7.0) for each in found])


def test_blocks_longer_than_a_program_are_served_by_pytorch() -> None:
    blocks, codebook = Blocks((2 * ELEMENTS + 1,), 2 * ELEMENTS, 2), CODEBOOKS[4]
    flat = numbers(blocks)
    coded = TRITON.encoded(flat, blocks, codebook, None)
    assert are_equal(coded, PYTORCH.encoded(flat, blocks, codebook, None))
    found = [torch.empty_like(flat) for _ in range(2)]
    TRITON.decode(coded, blocks, codebook, found[0])
    PYTORCH.decode(coded, blocks, codebook, found[1])
    assert torch.equal(*found)
