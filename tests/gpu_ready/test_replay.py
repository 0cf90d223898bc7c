"""Replays of recorded steps give what the steps would give, wherever gradients and memory lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from gpu_ready.recorded import RecordedGraph
from thinwire import AllReduce, PowerSGD, Quantize
from thinwire.algorithms import Algorithm, Bucket, BucketPlan, Memory, Requests
from thinwire.algorithms.exact import UncompressedPlan
from thinwire.comm import InProcessTransport, run_members
from thinwire.errors import StepError
from thinwire.kernels import dispatch
from thinwire.plan import ParameterSpec, Route
from thinwire.sync import Engine, Settings, replay
from thinwire.tensors import accelerators

MEMBERS, STEPS = 2, 12
SHAPES: list[dict[str, tuple[int, ...]]] = [
    {"first": (24, 16), "second": (24, 16), "bias": (24,)},
    {"third": (40, 12), "fourth": (12, 30)},
    {"fifth": (30,)},  # nothing of this bucket is compressed
]


@pytest.fixture(autouse=True)
def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    monkeypatch.setattr(dispatch, "backends", (replace(dispatch.TORCH, is_recordable=True),))
    monkeypatch.setattr(RecordedGraph, "num_replays", 0)


def buckets() -> list[tuple[ParameterSpec, ...]]:
    return [
        tuple(ParameterSpec.of(name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
        for shapes in SHAPES
    ]


Between = Callable[[Engine, int], None]


def trained(
    algorithm: Algorithm, settings: dict[str, Any], between: Between, *, moves: bool = False
) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
    """Return the means of all steps of each member, and its state."""
    groups = InProcessTransport.group(MEMBERS)

    def member(rank: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
        given = {name: each() if isinstance(each, type) else each for name, each in settings.items()}
        engine = Engine(algorithm, groups[rank], settings=Settings(gradients_stay=True, **given))
        draw, means = torch.Generator().manual_seed(rank), []
        kept = [torch.empty(sum(spec.numel for spec in specs)) for specs in buckets()]
        for step in range(STEPS):
            flats = [each.clone() for each in kept] if moves else kept
            for flat in flats:
                flat.copy_(torch.randn(len(flat), generator=draw))
                if step == 9 and rank == 1 and "on_nonfinite" in settings:
                    flat[3] = torch.inf
            engine.average(list(zip(buckets(), flats, strict=True)))
            means.append(torch.cat(flats))
            between(engine, step)
        stats = engine.stats()
        counts = {"nonfinite": stats.nonfinite_steps, "ratio": stats.compression_ratio}
        return means, copy.deepcopy(engine.state_dict()) | counts

    return run_members(MEMBERS, member)


class ScaleThatGrows:
    """As a `GradScaler` does: a new tensor in each step."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self, device: torch.device) -> torch.Tensor:
        self.num_asked += 1
        return torch.tensor(2.0 ** (self.num_asked % 5))


ALGORITHMS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "rank 2": (PowerSGD(matrix_rank=2), {}),
    "no host check": (PowerSGD(matrix_rank=2), {"host_check": False, "on_nonfinite": "nan"}),
    "zeros": (PowerSGD(matrix_rank=2), {"host_check": False, "on_nonfinite": "zero"}),
    "host check": (PowerSGD(matrix_rank=2), {"on_nonfinite": "nan"}),
    "loss scale": (PowerSGD(matrix_rank=2), {"loss_scale": ScaleThatGrows, "host_check": False}),
    "alternating": (PowerSGD(matrix_rank=2, alternating=True), {"host_check": False}),
    "iterations": (PowerSGD(matrix_rank=2, power_iterations=2), {}),
    "16 bits on the wire": (PowerSGD(matrix_rank=2, wire_dtype="bf16"), {"host_check": False}),
    "no feedback": (PowerSGD(matrix_rank=2, error_feedback=False), {}),
    "4 bits": (Quantize(bits=4), {}),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def compare(name: str, between: Between, monkeypatch: pytest.MonkeyPatch, *, moves: bool = False) -> int:
    """Train with and without recording; return how many graphs were replayed."""
    algorithm, settings = ALGORITHMS[name]
    plain = trained(algorithm, settings, between, moves=moves)
    assert RecordedGraph.num_replays == 0
    monkeypatch.setattr(replay, "can_record", lambda device: True)
    monkeypatch.setattr(replay, "cuda_graphs", lambda device: RecordedGraph)
    recorded = trained(algorithm, settings, between, moves=moves)
    assert len(plain) == len(recorded) == MEMBERS
    assert all(state["ratio"] > 1.5 for _, state in recorded)
    assert equal(plain, recorded)
    return RecordedGraph.num_replays


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_recorded_steps_give_what_steps_give(name: str, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    num_replays = compare(name, lambda engine, step: None, monkeypatch, moves=moves)
    assert num_replays >= MEMBERS * 4 * 4


def test_what_a_checkpoint_does_to_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_and_load(engine: Engine, step: int) -> None:
        if step == 6:
            engine.load_state_dict(copy.deepcopy(engine.state_dict()))

    assert compare("no host check", save_and_load, monkeypatch) >= MEMBERS * 2 * 4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_that_are_taken_back_are_replayed_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def dry_step(engine: Engine, step: int) -> None:
        draw = torch.Generator().manual_seed(1_000 * step + engine.transport.rank)
        with engine.dry():
            flats = [torch.randn(sum(spec.numel for spec in specs), generator=draw) for specs in buckets()]
            engine.average(list(zip(buckets(), flats, strict=True)))

    # Half of all steps are dry, and none of them makes the recordings useless.
    assert compare(name, dry_step, monkeypatch) >= 2 * MEMBERS * 4 * 4


class Waiting(UncompressedPlan):
    """Says that it can be recorded, and waits for the device."""

    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        assert float(bucket.flat.abs().max()) >= 0
        yield from super().run(bucket, memory)

    def variant(self, memory: Memory, device: torch.device) -> int:
        return 0


@dataclass(frozen=True)
class Impatient(AllReduce):
    def prepare(self, specs: Sequence[ParameterSpec], *, num_members: int = 1) -> BucketPlan:
        routes = [Route((spec.name,), spec.gradient_bytes, 1, is_compressed=True) for spec in specs]
        return Waiting(tuple(specs), tuple(routes), None)


def test_what_can_not_be_recorded_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "can_record", lambda device: True)
    monkeypatch.setattr(replay, "cuda_graphs", lambda device: RecordedGraph)
    with pytest.raises(StepError, match=r"CUDA graph .*replay\.enabled = False before"):
        trained(Impatient(), {}, lambda engine, step: None)
    monkeypatch.setattr(replay, "enabled", False)
    assert len(trained(Impatient(), {}, lambda engine, step: None)) == MEMBERS


def test_a_different_algorithm_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def switch(engine: Engine, step: int) -> None:
        if step == 6:
            engine.use(PowerSGD(matrix_rank=3))

    assert compare("rank 2", switch, monkeypatch) >= MEMBERS * 2 * 4
