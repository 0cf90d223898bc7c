"""Codes and scales against NumPy, one number after the other, and the compiled passes against PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog import numbers, spec
from thinwire.kernels import dispatch
from thinwire.kernels.backend import CodeKernels, MeanArgs, ResidualArgs
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS, Coded
from thinwire.tensors.rounding import CounterRNG

every_bits = pytest.mark.parametrize("bits", CODEBOOKS)
BLOCKS = Blocks((300, 3, 0, 128, 1, 65), 64, 2)


@pytest.fixture(params=["torch", "numba"])
def kernels(request: pytest.FixtureRequest) -> CodeKernels:
    if request.param == "torch":
        return dispatch.TORCH_TABLES.codes
    return numba_kernels()


def numba_kernels() -> CodeKernels:
    pytest.importorskip("numba", reason="NO NUMBA HERE: nothing compiled was tested")
    return (dispatch.NUMBA.load() or pytest.fail("Numba is there but can't be used")).codes


def lloyd(count: int) -> np.ndarray:
    """The levels with the least mean squared error on a Gaussian, by Lloyd's iteration."""
    levels = np.linspace(-2, 2, count)
    for _ in range(300):
        edges = np.array([-np.inf, *(levels[1:] + levels[:-1]) / 2, np.inf])
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([(1 + math.erf(edge / math.sqrt(2))) / 2 for edge in edges])
        levels = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return levels


def reference_levels(bits: int) -> np.ndarray:
    """In units of the scale."""
    if bits > 4:
        last = 2 ** (bits - 1) - 1
        return np.arange(-last, last + 1, dtype=np.float64)
    if bits == 4:
        return np.array([k * (112 + k * k) for k in range(-7, 8)], np.float64)
    return lloyd(2**bits) if bits > 1 else np.array([-1.0, 1.0])


def reference_blocks(blocks: Blocks, flat: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers of each block."""
    at = 0
    for numel in blocks.numels:
        for start in range(0, numel, blocks.block):
            yield flat[at + start : at + min(start + blocks.block, numel)]
        at += numel


def reference(bits: int, block: np.ndarray) -> tuple[float, np.ndarray]:
    """Scale, and what the numbers become, in float64 but for the scale's last bits."""
    levels, largest = reference_levels(bits), np.abs(block).max()
    if bits >= 4:
        scale = largest / levels[-1]
    elif bits > 1:
        least, most = CODEBOOKS[bits].reach
        scale = np.clip(math.sqrt(np.square(block).mean()), largest / most, largest / least)
    else:
        scale = np.abs(block).mean()
    nearest = levels[np.abs(block[:, None] - scale * levels).argmin(1)]
    if 1 < bits < 4:
        scale = block @ nearest / (nearest @ nearest)
    return scale, scale * nearest


def assert_coded(bits: int, block: np.ndarray, result: np.ndarray, scale: float) -> None:
    """Every number has become the nearest level, or the block as near as with the scale by least squares."""
    levels = scale * np.array(CODEBOOKS[bits].levels)
    tolerance = 1e-5 * levels[-1]
    if bits in (2, 3):
        assert (np.abs(result[:, None] - levels).min(1) <= tolerance).all()
        _, expected = reference(bits, block)
        # Codes were found by a root mean square in bf16.
        distance = np.linalg.norm(block - expected)
        assert np.linalg.norm(block - result) <= 1.005 * distance + 2**-8 * np.linalg.norm(block)
    else:
        distances = np.abs(block[:, None] - levels).min(1)
        assert (np.abs(block - result) <= distances + tolerance).all() or scale == 0


@every_bits
def test_each_number_becomes_the_nearest_level_or_each_block_what_is_near_it(
    bits: int, kernels: CodeKernels
) -> None:
    flat, codebook = numbers(BLOCKS), CODEBOOKS[bits]
    coded = kernels.encoded(flat, BLOCKS, codebook, None)
    assert coded.codes.shape == (BLOCKS.num_members, BLOCKS.share, 64 * bits // 8)
    found = torch.empty_like(flat)
    kernels.decode([coded], BLOCKS, codebook, found)
    blocks = reference_blocks(BLOCKS, flat.double().numpy())
    results = reference_blocks(BLOCKS, found.double().numpy())
    scales = coded.scales.flatten()[: BLOCKS.total].double().tolist()
    for scale, block, result in zip(scales, blocks, results, strict=True):
        wanted, _ = reference(bits, block)
        # Rounded to bf16; upwards, where the largest number must not be cut off.
        assert scale == pytest.approx(wanted, rel=2**-7)
        assert bits < 4 or scale >= wanted * (1 - 1e-6)
        assert_coded(bits, block, result, scale)
        assert (result[block == 0] == 0).all() or bits < 4


@every_bits
def test_the_mean_is_that_of_numpy(bits: int, kernels: CodeKernels) -> None:
    codebook, own = CODEBOOKS[bits], BLOCKS.shares[0]
    sent = [kernels.encoded(numbers(BLOCKS, seed), BLOCKS, codebook, None) for seed in range(3)]
    values = [torch.empty(sum(BLOCKS.numels)) for _ in sent]
    for coded, flat in zip(sent, values, strict=True):
        kernels.decode([coded], BLOCKS, codebook, flat)
    # Between those of other buckets, as several buckets' messages travel.
    rows = torch.stack([coded.message[0] for coded in sent])
    beside = torch.full((len(sent), 6), 255, dtype=torch.uint8)
    received = Coded.arrived(torch.cat([beside, rows, beside], dim=1)[:, 6:-6], BLOCKS.share)
    lost = torch.empty(own.stop - own.start, 64)
    mean = kernels.averaged(MeanArgs(received, BLOCKS, own, codebook, None, lost, torch.float32))
    true = np.mean([flat.double().numpy() for flat in values], axis=0)
    blocks = list(reference_blocks(BLOCKS, true))[own]
    decoded = torch.empty(sum(BLOCKS.numels))
    whole = kernels.encoded(decoded.zero_(), BLOCKS, codebook, None)
    whole.message[0] = mean.message[0]
    kernels.decode([whole], BLOCKS, codebook, decoded)
    results = list(reference_blocks(BLOCKS, decoded.double().numpy()))[own]
    scales = mean.scales[0, : own.stop].double().tolist()
    for block, result, left, scale in zip(blocks, results, lost, scales, strict=True):
        assert_coded(bits, block, result, scale)
        size = scale * codebook.levels[-1]
        np.testing.assert_allclose(left[: len(block)].double(), block - result, atol=1e-5 * size)


@every_bits
@pytest.mark.parametrize("block", [16, 144])
def test_compiled_passes_give_what_pytorch_gives(bits: int, block: int) -> None:
    """Decoded to the bit: members of one group may have other kernels."""
    compiled, plain = numba_kernels(), dispatch.TORCH_TABLES.codes
    blocks, codebook = Blocks((2500, 3, 0, 2 * block, 1, 65), block, 2), CODEBOOKS[bits]
    flat = numbers(blocks)
    mine, theirs = (kernels.encoded(flat, blocks, codebook, None) for kernels in (compiled, plain))
    torch.testing.assert_close(mine.scales.float(), theirs.scales.float(), rtol=2**-7, atol=0)
    assert (mine.codes != theirs.codes).float().mean() < 0.1
    theirs, other = mine, plain.encoded(flat.roll(1), blocks, codebook, None)
    decoded = [flat.new_empty(2, len(flat)) for _ in range(2)]
    for kernels, (target, mean) in zip((compiled, plain), decoded, strict=True):
        kernels.decode([theirs], blocks, codebook, target)
        kernels.decode([theirs, other], blocks, codebook, mean)
    assert torch.equal(*decoded)
    own = blocks.shares[1]
    lost = torch.zeros(own.stop - own.start, block)
    lost[0] = 1
    # Two members: of what one alone keeps, the mean has half.
    item = ResidualArgs([mine], blocks, codebook, flat.half(), flat, mine, lost, own, torch.tensor(4.0))
    kept = [kernels.decode_and_keep(item._replace(values=flat.clone())) for kernels in (compiled, plain)]
    torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-5)
    expected = flat - item.flat.double()
    expected[own.start * block : (own.start + 1) * block] += 2
    torch.testing.assert_close(4 * kept[0].double(), expected, rtol=1e-5, atol=1e-5)


@every_bits
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_such_a_scale_and_comes_out_as_nan(
    bits: int, value: float, kernels: CodeKernels
) -> None:
    flat, codebook = numbers(BLOCKS), CODEBOOKS[bits]
    flat[5] = value
    coded = kernels.encoded(flat, BLOCKS, codebook, None)
    assert coded.scales.flatten()[: BLOCKS.total].isfinite().tolist() == [False] + [True] * (BLOCKS.total - 1)
    found = torch.empty_like(flat)
    kernels.decode([coded], BLOCKS, codebook, found)
    assert found[:64].isnan().all()
    assert found[64:].isfinite().all()


def coded_twice(
    kernels: CodeKernels, flat: torch.Tensor, block: int, bits: int, members: int
) -> torch.Tensor:
    """What becomes of numbers that all members have: each one's codes, and those of their mean."""
    blocks, codebook, found = Blocks((len(flat),), block, 1), CODEBOOKS[bits], torch.empty_like(flat)
    message = kernels.encoded(flat, blocks, codebook, None).message.repeat(members, 1)
    received = Coded.arrived(message, blocks.share)
    item = MeanArgs(received, blocks, blocks.shares[0], codebook, None, None, torch.float32)
    kernels.decode([kernels.averaged(item)], blocks, codebook, found)
    return found


@st.composite
def hard_numbers(draw: st.DrawFn) -> torch.Tensor:
    """Numbers of one size, with one that is larger than all others, of few sizes, or subnormal."""
    length = draw(st.one_of(st.integers(1, 3), st.integers(1, 200)))

    def repeated(elements: st.SearchStrategy[float]) -> torch.Tensor:
        some = torch.tensor(draw(st.lists(elements, min_size=1, max_size=9)))
        return some.repeat(-(-length // len(some)))[:length]

    kind = draw(st.sampled_from(["equal", "outlier", "few", "subnormal"]))
    size = 2.0**-120 if kind == "subnormal" else draw(st.floats(2.0**-120, 2.0**120, width=32))
    flat = size * repeated(st.just(1.0) if kind == "equal" else st.floats(0, 1, width=32))
    if kind == "outlier":
        flat *= draw(st.sampled_from([0.0, 1e-3, 0.1, 0.3, 0.5]))
        flat[draw(st.integers(0, length - 1))] = size
    return flat * repeated(st.sampled_from([-1.0, 1.0]))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flat=hard_numbers(),
    block=st.sampled_from([16, 64, 128, 4096]),
    bits=st.sampled_from([*CODEBOOKS]),
    members=st.sampled_from([1, 2, 3]),
)
def test_both_roundings_bring_every_block_nearer_than_nothing_does(
    kernels: CodeKernels, flat: torch.Tensor, block: int, bits: int, members: int
) -> None:
    """Or else a residual would grow from step to step."""
    found = coded_twice(kernels, flat, block, bits, members)
    for start in range(0, len(flat), block):
        part, result = (values[start : start + block].double() for values in (flat, found))
        left, whole = (part - result).norm(), part.norm()
        # Below 1.2e-38 there are no scales, of which the largest may be the last level's multiple.
        is_tiny = part.abs().mean() < 2e-36 or part.abs().max() < 1.2e-38 * CODEBOOKS[bits].levels[-1]
        assert left < whole or (left == whole and is_tiny)


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
def test_stochastic_rounding_is_right_on_average(bits: int, kernels: CodeKernels) -> None:
    blocks, codebook = Blocks((64,) * 400, 64, 1), CODEBOOKS[bits]
    one = torch.linspace(-1, 1, 64) ** 3
    names = [f"layer {index}" for index in range(400)]
    draws = CounterRNG(blocks, [spec(name, 64) for name in names], 0).draws(0, [0], one.device)[0]
    coded = kernels.encoded(one.repeat(400), blocks, codebook, draws)
    found = torch.empty(64 * 400)
    kernels.decode([coded], blocks, codebook, found)
    step = (torch.tensor(codebook.levels).diff().max() * coded.scales[0, 0]).item()
    assert (found.view(400, 64) - one).abs().max() <= 1.01 * step
    assert found.view(400, 64).std(0).max() > 0.2 * step / 8
    assert (found.view(400, 64).mean(0) - one).abs().max() < 4 * step / 2 / math.sqrt(400)


def test_draws_depend_on_name_step_seed_and_who_but_not_on_neighbours() -> None:
    alone, among = Blocks((100,), 16, 2), Blocks((30, 100), 16, 2)
    device = torch.device("cpu")

    def drawn(blocks: Blocks, names: list[str], seed: int = 0, step: int = 0, who: int = 0) -> torch.Tensor:
        specs = [spec(name, numel) for name, numel in zip(names, blocks.numels, strict=True)]
        return CounterRNG(blocks, specs, seed).draws(step, [who], device)[0].uniform(16, torch.float32)[-7:]

    first = drawn(alone, ["weight"])
    assert torch.equal(first, drawn(among, ["bias", "weight"]))
    assert 0 <= first.min() < first.max() < 1
    others = [
        drawn(alone, ["bias"]),
        drawn(alone, ["weight"], seed=1),
        drawn(alone, ["weight"], step=1),
        drawn(alone, ["weight"], who=1),
    ]
    for other in others:
        assert (other != first).float().mean() > 0.9
