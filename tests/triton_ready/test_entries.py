"""Few entries by Triton's kernels: messages, means and residuals as by PyTorch's functions, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from catalog import spec
from gpu_ready.counting import by_triton
from thinwire import TopK
from thinwire.algorithms import Bucket, Memory
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.requests import AllGather
from thinwire.algorithms.topk import TopKPlan
from thinwire.kernels import dispatch
from thinwire.kernels.triton.triton_entries import LENGTH
from thinwire.simulation import Simulation
from thinwire.tensors import accelerators
from triton_ready.interpreting import quiet

pytestmark = quiet

HALVES = {torch.float16: 0x3800, torch.bfloat16: 0x3F00}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))


def layout(dtype: torch.dtype, *, odd: bool) -> list[tuple[Any, ...]]:
    shapes = {"weight": (30, 23), "empty": (0,), "bias": (31,), "one": (1,)} if odd else {"weight": (40, 32)}
    return [tuple(spec(name, *shape, dtype=dtype) for name, shape in shapes.items())]


def gradients_of(specs: list[tuple[Any, ...]], seed: int) -> list[list[torch.Tensor]]:
    """Gradients without two of one magnitude, of which any may be sent; but some chunks begin as zeros."""
    draws, dtype = torch.Generator().manual_seed(seed), specs[0][0].dtype
    numel = sum(parameter.numel for parameter in specs[0])
    given = []
    for member in range(3):
        bits, half = (torch.int32, 0x3F000000) if dtype.itemsize == 4 else (torch.int16, HALVES[dtype])
        sizes = (half + torch.randperm(numel, generator=draws)).to(bits).view(dtype)
        signs = torch.randint(0, 2, (numel,), generator=draws) * 2 - 1
        given.append([sizes * signs])
        given[member][0][: 512 if member == 1 and seed == 0 else 0] = 0
    return given


def run(algorithm: TopK, specs: list[tuple[Any, ...]], **settings: Any) -> list[torch.Tensor]:
    """Means and residuals of some steps, of which the third is not finite, and what `stats` tells."""
    simulation = Simulation(algorithm, specs, num_workers=3, **settings)
    found = []
    for step in range(4):
        given = gradients_of(specs, seed=step)
        if step == 2:
            given[1][0][7] = math.nan
        simulation.step(given)
        found += [flat for of_worker in given for flat in of_worker]
        for engine in simulation.engines:
            found += [engine.state.memory[ERROR][parameter.name].clone() for parameter in specs[0]]
    assert found[0].count_nonzero() > 20
    errors = simulation.syncs[0].stats().error_norm
    return [*found, torch.tensor(list(errors.values()))]


@pytest.mark.parametrize(
    ("bits", "dtype", "odd", "merge", "settings"),
    [
        (2, "fp32", True, "senders", {}),
        (2, "bf16", False, "members", {"loss_scale": lambda device: torch.tensor(1024.0)}),
        (4, "fp16", True, "senders", {"loss_scale": lambda device: torch.tensor(1024.0)}),
        (8, "fp32", False, "members", {"host_check": False}),
        (16, "fp32", True, "senders", {"host_check": False}),
        (16, "fp16", False, "members", {}),
    ],
)
def test_steps_are_those_of_pytorch(
    bits: int, dtype: str, odd: bool, merge: Any, settings: dict[str, Any]
) -> None:
    algorithm = TopK(density=1 / 16, bits=bits, chunk=256, error_decay=0.9, merge=merge)
    expected = run(algorithm, layout(DTYPES[dtype], odd=odd), **settings)
    with by_triton():
        found = run(algorithm, layout(DTYPES[dtype], odd=odd), **settings)
    if dtype == "bf16":
        # The interpreter does not round to it as GPUs do.
        torch.testing.assert_close(found[:3], expected[:3], rtol=2**-7, atol=0)
        return
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[-1], expected[-1])


def message(algorithm: TopK, flat: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    specs = (spec("weight", len(flat), dtype=flat.dtype),)
    memory = Memory(slots={ERROR: {"weight": errors.clone()}})
    request = next(algorithm.prepare(specs, num_members=2).run(Bucket(specs, flat.clone()), memory))
    assert isinstance(request, AllGather)
    return request.tensor


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize(("length", "density"), [(4096, 1 / 64), (1000, 1 / 30), (500, 0.25), (37, 1e-6)])
def test_messages_are_those_of_pytorch(bits: int, length: int, density: float) -> None:
    algorithm = TopK(density=density, bits=bits, chunk=length, error_decay=0.5)
    draws = torch.Generator().manual_seed(length)
    flat, errors = (torch.randn(length + length // 2, generator=draws) for _ in range(2))
    expected = message(algorithm, flat, errors)
    with by_triton():
        assert torch.equal(message(algorithm, flat, errors), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [2, 16])
def test_what_is_not_finite_is_sent(bits: int, value: float) -> None:
    flat = torch.linspace(-1, 1, 128)
    flat[40] = value
    algorithm = TopK(density=1 / 64, bits=bits, chunk=64)
    with by_triton():
        packed = message(algorithm, flat, torch.zeros(128))
    plan = algorithm.prepare([spec("weight", len(flat))])
    assert isinstance(plan, TopKPlan)
    layout = plan.layout
    scales = packed[sum(layout.stream_bytes[:2]) :].clone()[: layout.stream_bytes[2]].view(torch.bfloat16)
    assert scales.view(2, -1).isfinite().all(1).tolist() == [False, True]


def test_longer_chunks_are_served_by_pytorch() -> None:
    flat = torch.randn(LENGTH + 1, generator=torch.Generator().manual_seed(0))
    algorithm = TopK(chunk=LENGTH + 1)
    expected = message(algorithm, flat, torch.zeros_like(flat))
    with by_triton(), pytest.warns(UserWarning, match="4,097"):
        assert torch.equal(message(algorithm, flat, torch.zeros_like(flat)), expected)
