"""Averaging in few bits: what travels, what is lost, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from catalog import averaged, random_gradients, spec, true_means
from thinwire import Quantize
from thinwire.kernels import dispatch
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from thinwire.wire import wire_bytes

Layout = Sequence[tuple[ParameterSpec, ...]]

# Of bf16's, in and out: what a step may weigh.
SHARES = {8: 0.52, 6: 0.395, 5: 0.332, 4: 0.27, 3: 0.21, 2: 0.15, 1: 0.08}


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))


@pytest.mark.parametrize("bits", SHARES)
@pytest.mark.parametrize("members", [2, 3, 8, 16])
def test_bytes_on_the_wire_beside_those_of_bf16(bits: int, members: int) -> None:
    """Of a GPT's layer with its vectors, 25 MB of matrices, and a small first bucket."""
    width = 768
    layer = (
        spec("norm", width), spec("up", 4 * width, width), spec("up.bias", 4 * width),
        spec("down", width, 4 * width), spec("down.bias", width),
    )  # fmt: skip
    large = tuple(spec(f"large.{index}", 1024, 1024) for index in range(6))
    small = (spec("head", 256, 1024), spec("head.bias", 256))
    for bucket in (layer, large, small):
        plan = Quantize(bits=bits).prepare(bucket, num_members=members)
        before = wire_bytes("all_reduce", 2 * sum(parameter.numel for parameter in bucket), members)
        message_bytes = sum(route.message_bytes for route in plan.routes)
        # Half of it is handed over to everyone, and a member's share of the other half is gathered.
        exchanged = wire_bytes("all_to_all", message_bytes, members)
        gathered = wire_bytes("all_gather", message_bytes // members, members)
        assert exchanged + gathered <= SHARES[bits] * before


# Squared error of a mean of three members: those of a Gaussian's levels, twice.
ERRORS = {8: 0.012, 6: 0.05, 5: 0.1, 4: 0.16, 3: 0.29, 2: 0.53, 1: 1.0}


@pytest.mark.parametrize("bits", SHARES)
@pytest.mark.parametrize(("members", "most"), [(2, 0.72), (3, 1)])  # two do not round the mean
def test_the_mean_is_near_the_true_one(bits: int, members: int, most: float) -> None:
    layout = [(spec("weight", 64, 64),)]
    simulation = Simulation(Quantize(bits=bits), layout, num_workers=members)
    (mean,) = averaged(simulation, 0)
    (true,) = true_means(random_gradients(layout, num_workers=members, seed=0))
    error = ((mean - true).norm() / true.norm()).item()
    assert ERRORS[bits] / 8 < error < most * ERRORS[bits]
    assert simulation.syncs[0].stats().rounds == members - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_stay_within_the_range_of_16_bits(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max / 2
    gradients = [[torch.full((64,), most, dtype=dtype)] for _ in range(2)]
    gradients[0][0][1] = gradients[1][0][1] = 0
    assert Simulation(Quantize(bits=2), [(spec("weight", 64, dtype=dtype),)], num_workers=2).step(gradients)
    assert gradients[0][0].isfinite().all()
