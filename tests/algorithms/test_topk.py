"""Top-k with error feedback: against NumPy, what it keeps, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from catalog import random_gradients, spec
from reference_topk import Reference
from thinwire import TopK
from thinwire.algorithms.error_feedback import ERROR
from thinwire.kernels.torch_entries import end_levels
from thinwire.simulation import Simulation
from thinwire.tensors import accelerators

pytestmark = pytest.mark.usefixtures("one_for_all")

LAYOUT = [(spec("weight", 30, 50, dtype=torch.float64), spec("bias", 30, dtype=torch.float64))]


@pytest.mark.parametrize("merge", ["members", "senders"])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_against_numpy(bits: int, merge: Any) -> None:
    algorithm = TopK(density=1 / 16, bits=bits, chunk=400, error_decay=0.9, merge=merge)
    simulation = Simulation(algorithm, LAYOUT, num_workers=3)
    reference = Reference([1500, 30], 3, 1 / 16, bits, 400, 0.9, merge)
    for step in range(3):
        gradients = random_gradients(LAYOUT, num_workers=3, seed=step)
        expected = reference.average(np.stack([flat.numpy() for (flat,) in gradients]))
        assert simulation.step(gradients)
        np.testing.assert_allclose(gradients[0][0].numpy(), expected, rtol=1e-12, atol=1e-12)
    for engine, residual in zip(simulation.engines, reference.residuals, strict=True):
        kept = torch.cat([engine.state.memory[ERROR][parameter.name] for parameter in LAYOUT[0]])
        np.testing.assert_allclose(kept.numpy(), residual, rtol=1e-12, atol=1e-12)


def test_what_fp16_can_not_hold_stays_in_the_residual() -> None:
    layout = [(spec("weight", 8, dtype=torch.float16),)]
    simulation = Simulation(TopK(density=1 / 8, error_decay=1, bits=16), layout, num_workers=2)
    for engine in simulation.engines:
        engine.state.put_error("weight", torch.tensor([1e5, 0, 0, 0, 0, 0, 0, 0]))
    for expected, remaining in ((65_504, 1e5 - 65_504), (1e5 - 65_504, 0)):
        gradients = [[torch.zeros(8, dtype=torch.float16)] for _ in range(2)]
        assert simulation.step(gradients)
        assert gradients[0][0][0].item() == pytest.approx(expected, rel=1e-2)
        assert simulation.engines[0].state.memory[ERROR]["weight"][0].item() == pytest.approx(
            remaining, abs=300
        )


def test_an_entry_that_is_zero_was_not_sent() -> None:
    """A member whose chunk is all zeros must send some of them: they do not halve what the other has sent."""
    layout = [(spec("weight", 64),)]
    simulation = Simulation(TopK(density=1, merge="senders", bits=16), layout, num_workers=2)
    gradients = [[torch.zeros(64)], [torch.full((64,), 3.0)]]
    assert simulation.step(gradients)
    assert torch.equal(gradients[0][0], torch.full((64,), 3.0))


@pytest.fixture(params=[False, True], ids=["on the CPU", "as on an accelerator"])
def on_each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("bits", "value"), [(2, torch.nan), (4, torch.inf), (8, -torch.inf), (16, torch.nan)]
)
def test_one_number_that_is_not_finite_skips_the_step_on_all(bits: int, value: float) -> None:
    simulation = Simulation(TopK(bits=bits), LAYOUT, num_workers=2)
    assert simulation.step(random_gradients(LAYOUT, num_workers=2, seed=0))
    before = [copy.deepcopy(engine.state.memory[ERROR]) for engine in simulation.engines]
    gradients = random_gradients(LAYOUT, num_workers=2, seed=1)
    gradients[1][0][700] = value
    assert not simulation.step(gradients)
    for engine, errors in zip(simulation.engines, before, strict=True):
        assert all(torch.equal(engine.state.memory[ERROR][name], errors[name]) for name in errors)


def test_numbers_at_the_end_of_the_range_are_sent() -> None:
    """bf16 would round the largest fp32 to infinity, and each later step would be skipped."""
    largest_number = torch.finfo(torch.float32).max
    simulation = Simulation(TopK(bits=16, error_decay=1), [(spec("weight", 4),)], num_workers=2)
    gradients = [[torch.tensor([0.0, -largest_number, 0.0, 0.0])] for _ in range(2)]
    assert simulation.step(gradients)
    assert gradients[0][0][1].item() == pytest.approx(-largest_number, rel=1e-2)


def test_bytes_grow_with_the_members_and_the_plan_says_so() -> None:
    specs = [spec("weight", 1024, 1024, dtype=torch.bfloat16)]
    plans = {members: TopK().prepare(specs, num_members=members).routes[0] for members in (2, 8)}
    assert plans[2].gradient_bytes / plans[2].message_bytes > 95
    assert plans[8].message_bytes == 4 * plans[2].message_bytes
    assert plans[8].detail == "16,384 of 1,048,576 entries, 2 bits, from each of 8 members"
    least = TopK(density=5e-324).prepare(specs)  # of which one over it is infinite
    assert least.routes[0].detail.startswith("256 of 1,048,576 entries")


@pytest.mark.usefixtures("on_each_device")
def test_stats_tell_how_much_was_not_sent() -> None:
    """Of a parameter of which one chunk is shorter, and of one that is no longer than that."""
    layout = [(spec("weight", 80, 2), spec("bias", 32))]
    simulation = Simulation(TopK(density=1 / 64, bits=16, chunk=64), layout, num_workers=2)
    gradient = torch.ones(192)
    gradient[[0, 64, 128, 160]] = 8.0  # of 127 + 64 in each chunk, squared; of 95 in each shorter one
    assert simulation.step([[gradient.clone()] for _ in range(2)])
    stats = simulation.syncs[0].stats()
    assert stats.relative_error["weight"] == pytest.approx((157 / 349) ** 0.5)
    assert stats.error_norm["weight"] == pytest.approx(157**0.5)
    assert stats.relative_error["bias"] == pytest.approx((31 / 95) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kept", [2, 3, 64, 4096])
def test_levels_by_whole_numbers_are_those_by_floats(
    monkeypatch: pytest.MonkeyPatch, kept: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(kept)
    rows = torch.randn(40, kept, generator=generator, dtype=dtype)
    rows *= torch.logspace(-38, 36, 40, dtype=dtype).view(40, 1)
    rows[3], rows[4], rows[5] = 0, 1, -7e-44
    by_floats = end_levels(rows, bits=2)
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    by_whole_numbers = end_levels(rows, bits=2)
    torch.testing.assert_close(by_whole_numbers, by_floats, rtol=1e-5, atol=1e-44)
