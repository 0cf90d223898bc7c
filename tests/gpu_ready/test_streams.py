"""Nothing of a step races with another kernel, whatever streams its hooks run on; a planted bug is found."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gpu_ready.streams import MAIN, NCCL, Device, SimulatedNCCL
from thinwire import AllReduce, PowerSGD
from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import REGISTRY
from thinwire.kernels import dispatch
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, Settings, clock, streams
from thinwire.tensors import accelerators

NUM_BUCKETS, NUM_STEPS = 3, 2
SHAPES = {"first": (24, 16), "second": (24, 16), "bias": (24,)}


@dataclass(frozen=True)
class Layout:
    """The streams that the hooks of three buckets run on, and the end of the step."""

    hooks: tuple[int, int, int]
    finish: int


LAYOUTS = {
    "DDP's own": Layout((MAIN, MAIN, MAIN), MAIN),
    "Lightning's": Layout((7, 7, 7), 7),  # DDP was built on a side stream
    "a stream a bucket": Layout((5, 6, 7), 8),
}


def buckets() -> list[tuple[ParameterSpec, ...]]:
    return [
        tuple(
            ParameterSpec.of(f"{number}.{name}", torch.empty(shape, device="meta"))
            for name, shape in SHAPES.items()
        )
        for number in range(NUM_BUCKETS)
    ]


def train(
    algorithm: Algorithm,
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    *,
    forgets: bool = False,
    host_check: bool = True,
) -> Device:
    """Some steps, as DDP would make them: gradients come from the main stream, and it reads the means."""
    monkeypatch.setattr(accelerators, "pays_per_launch", lambda device: True)
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    device = Device()
    with device:
        for stream in (*layout.hooks, layout.finish, NCCL):
            with device.on(stream):
                pass
        monkeypatch.setattr(streams, "current_stream", device.current_stream)
        monkeypatch.setattr(clock, "marked", lambda device: None)  # what it would time takes no time
        transport = SimulatedNCCL(device, forgets=forgets)
        engine = Engine(algorithm, transport, settings=Settings(host_check=host_check))
        flats = [torch.empty(sum(spec.numel for spec in specs)) for specs in buckets()]
        for _ in range(NUM_STEPS):
            one, gradients = engine.begin(), []
            for specs, flat, stream in zip(buckets(), flats, layout.hooks, strict=True):
                gradients.append(torch.randn(len(flat)))
                ready = device.recorded()
                with device.on(stream):
                    device.wait(ready)
                    flat.copy_(gradients[-1])
                    one.start(engine.open(specs, flat.device, is_agreed=True), flat)
            with device.on(layout.finish):
                device.wait(ready)
                one.finish()
                done = device.recorded()
            del one
            device.wait(done)  # the future that DDP waits for
            for flat in flats:
                flat.clone()  # by DDP, to the gradients
            for stream in layout.hooks:  # the next backward pass
                with device.on(stream):
                    torch.zeros(1)
    return device


REGISTERED = {variant.code: variant.algorithm for each in REGISTRY for variant in each.variants}


@pytest.mark.parametrize("code", [code for code in REGISTERED if "rank=1)" not in code and "8" not in code])
def test_no_algorithm_races(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every bucket comes on a stream of its own: what happens on fewer is in a better order."""
    device = train(REGISTERED[code], LAYOUTS["a stream a bucket"], monkeypatch)
    assert (device.races, device.early_frees) == ([], [])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("host_check", [True, False])
def test_no_layout_races(layout: str, host_check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = train(PowerSGD(matrix_rank=2), LAYOUTS[layout], monkeypatch, host_check=host_check)
    assert (device.races, device.early_frees) == ([], [])


@pytest.mark.parametrize("algorithm", [AllReduce(), PowerSGD(matrix_rank=2)], ids=str)
def test_a_planted_race_is_found(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(algorithm, LAYOUTS["DDP's own"], monkeypatch, forgets=True).races


def test_a_planted_early_free_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what orders a step's streams."""
    for name in ("gather", "release"):
        monkeypatch.setattr(streams.Streams, name, lambda self: None)
    assert train(PowerSGD(matrix_rank=2), LAYOUTS["a stream a bucket"], monkeypatch).early_frees
