"""Properties over shapes, types, scales and bucket layouts that nobody thought of."""

from __future__ import annotations

from typing import Any, Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog import flat_error, random_gradients, true_means
from thinwire import AllReduce, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation
from thinwire.tensors.coded import CODEBOOKS

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
ROUNDINGS: list[Literal["nearest", "stochastic"]] = ["nearest", "stochastic"]
SHAPES = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[ParameterSpec, ...]]:
    """Buckets of parameters; one type a bucket, as DDP has it."""
    layout = []
    for bucket in range(draw(st.integers(1, 3))):
        dtype, shapes = draw(DTYPES), draw(st.lists(SHAPES, min_size=1, max_size=4))
        tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
        if draw(st.booleans()):
            tensors = [tensor.permute(tuple(reversed(range(tensor.dim())))) for tensor in tensors]
        layout.append(tuple(ParameterSpec.of(f"{bucket}.{i}", t) for i, t in enumerate(tensors)))
    return layout


@st.composite
def algorithms(draw: st.DrawFn) -> Algorithm:
    settings: dict[str, Any] = {
        "matrix_rank": draw(st.integers(1, 5)),
        "min_compression_ratio": draw(st.sampled_from([0.1, 1, 2])),
        "warm_start": draw(st.booleans()),
        "warmup_steps": draw(st.integers(0, 2)),
        "power_iterations": draw(st.integers(1, 2)),
    }
    bits, density = draw(st.sampled_from([*CODEBOOKS])), draw(st.floats(1e-3, 1))
    entries: dict[str, Any] = {"bits": draw(st.sampled_from([2, 4, 8])), "chunk": draw(st.integers(1, 100))}
    block, rounding = 16 * draw(st.integers(1, 4)), draw(st.sampled_from(ROUNDINGS))
    kinds = [
        AllReduce(),
        PowerSGD(**settings, alternating=draw(st.booleans())),
        BatchedPowerSGD(**settings),
        Quantize(bits=bits, block=block, rounding=rounding, error_feedback=True),
        TopK(density=density, **entries, error_decay=1, merge="members"),
    ]
    return draw(st.sampled_from(kinds))


@given(layouts(), algorithms(), st.integers(1, 4), st.integers(-20, 20))
@settings(max_examples=25, deadline=None)
def test_the_telescoping_identity(
    layout: list[tuple[ParameterSpec, ...]], algorithm: Algorithm, num_workers: int, exponent: int
) -> None:
    """Sum of results + final mean error = sum of true means; all agree to the bit, and send as planned."""
    simulation = Simulation(algorithm, layout, num_workers=num_workers)
    true = [
        torch.zeros(sum(parameter.numel for parameter in bucket), dtype=torch.float64) for bucket in layout
    ]
    sent = [torch.zeros_like(total) for total in true]
    magnitude = [torch.zeros((), dtype=torch.float64) for _ in layout]
    for seed in range(4):
        gradients = random_gradients(layout, num_workers=num_workers, seed=seed)
        for flat in (flat for of_worker in gradients for flat in of_worker):
            flat.mul_(2.0 ** (exponent if flat.element_size() > 2 else exponent / 4))
        if seed == 2:
            before = simulation.syncs[0].stats().message_bytes
        means = true_means(gradients)
        true = [total + mean for total, mean in zip(true, means, strict=True)]
        magnitude = [total + mean.norm() for total, mean in zip(magnitude, means, strict=True)]
        assert simulation.step(gradients)
        sent = [total + flat.double() for total, flat in zip(sent, gradients[0], strict=True)]
        for of_worker in gradients[1:]:
            assert all(torch.equal(a, b) for a, b in zip(gradients[0], of_worker, strict=True))
    sent_bytes = simulation.syncs[0].stats().message_bytes - before
    assert sent_bytes == 2 * simulation.syncs[0].plan.message_bytes
    state = simulation.state_dicts()[0]
    for bucket, all_true, all_sent, total in zip(layout, true, sent, magnitude, strict=True):
        gap = (all_true - all_sent - flat_error(state, bucket)).norm()
        assert gap <= (1e-5 if bucket[0].dtype.itemsize > 2 else 1e-2) * total
