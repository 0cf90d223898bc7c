"""Nothing of a step races with another kernel, whatever streams its hooks run on; a planted bug is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from gpu_ready.streams import MAIN, NCCL, Device, SimulatedNCCL, Stream
from thinwire import AllReduce, PowerSGD, Quantize
from thinwire.adapters.ddp import ATTACHED, adapter_of, switched
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


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Let what is run on the CPU run on the streams of a device."""
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(clock, "record_event", lambda device: None)  # what it would time takes no time
    with Device() as device:
        with device.on(NCCL):
            pass
        monkeypatch.setattr(streams, "WITHOUT_STREAMS", ())
        monkeypatch.setattr(streams, "current_stream", device.current_stream)
        monkeypatch.setattr(streams, "new_stream", device.new_stream)
        monkeypatch.setattr(streams, "launching_on", lambda stream: device.on(stream.number))
        yield device


def train(
    algorithm: Algorithm,
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    *,
    forgets: bool = False,
    host_check: bool = True,
) -> Device:
    """Some steps, as DDP would make them: gradients come from the main stream, and it reads the means."""
    with simulated(monkeypatch) as device:
        for stream in (*layout.hooks, layout.finish):
            with device.on(stream):
                pass
        transport = SimulatedNCCL(device, forgets=forgets)
        engine = Engine(algorithm, transport, settings=Settings(host_check=host_check))
        beside = streams.CommStream()  # as adapters have one
        flats = [torch.empty(sum(spec.numel for spec in specs)) for specs in buckets()]
        for _ in range(NUM_STEPS):
            one, gradients = engine.begin(), []
            for specs, flat, stream in zip(buckets(), flats, layout.hooks, strict=True):
                gradients.append(torch.randn(len(flat)))
                ready = device.recorded()
                with device.on(stream):
                    device.wait(ready)
                    flat.copy_(gradients[-1])
                    with beside.wait_for_current(flat.device):
                        one.start(engine.open(specs, flat.device), flat)
            with device.on(layout.finish):
                device.wait(ready)
                with beside.wait_for_current(flat.device):
                    one.finish()
                beside.current_waits()
                done = device.recorded()
            del one
            device.wait(done)  # the future that DDP waits for
            for flat in flats:
                flat.clone()  # by DDP, to the gradients
            for stream in layout.hooks:  # the next backward pass
                with device.on(stream):
                    torch.zeros(1)
    return device


@pytest.mark.parametrize(
    "algorithm",
    [PowerSGD(matrix_rank=2, alternating=True), *(registered.made() for registered in REGISTRY)],
    ids=str,
)
def test_no_algorithm_races(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every bucket comes on a stream of its own: what happens on fewer is in a better order."""
    device = train(algorithm, LAYOUTS["a stream a bucket"], monkeypatch)
    assert (device.races, device.early_frees) == ([], [])


@pytest.mark.parametrize(
    ("layout", "host_check"), [("DDP's own", True), ("Lightning's", True), ("a stream a bucket", False)]
)
def test_no_layout_races(layout: str, host_check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = train(PowerSGD(matrix_rank=2), LAYOUTS[layout], monkeypatch, host_check=host_check)
    assert (device.races, device.early_frees) == ([], [])


def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(AllReduce(), LAYOUTS["DDP's own"], monkeypatch, forgets=True).races


def test_a_planted_early_free_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what orders a step's streams."""
    monkeypatch.setattr(streams.CommStream, "current_waits", lambda self: None)
    device = train(Quantize(bits=4), LAYOUTS["a stream a bucket"], monkeypatch)
    assert device.early_frees or device.races


def train_ddp(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, set[int], int]:
    """Steps of a DDP model by its own hook; return the device, who waited for messages, and the buckets."""
    # Its hooks run on the main stream, as its copies to and from the buckets do.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        layers = [torch.nn.Linear(24, 24) for _ in range(NUM_BUCKETS + 1)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.002)
        with simulated(monkeypatch) as device:
            transport = SimulatedNCCL(device, forgets=False)
            adapter = adapter_of(model, PowerSGD(matrix_rank=2), transport, Settings.of())
            switched(model, lambda: adapter, ATTACHED)
            # In the first one DDP learns the order of its buckets.
            for _ in range(NUM_STEPS + 2):
                model.zero_grad()
                torch.autograd.backward(model(torch.randn(4, 24)).sum())
                for parameter in model.parameters():
                    parameter.detach().sub_(0.1 * torch.randn(()) * parameter.grad)  # type: ignore[operator]
        return device, transport.waiting, len(adapter._buckets._states)
    finally:
        dist.destroy_process_group()


def test_ddps_adapter_holds_up_no_gradient_and_does_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    device, waiting, num_buckets = train_ddp(monkeypatch)
    assert (device.races, device.early_frees) == ([], [])
    assert MAIN not in waiting
    assert num_buckets > NUM_BUCKETS


@pytest.mark.parametrize("missing", ["current_waits", "every wait for a stream"])
def test_a_race_with_ddps_adapter_is_found(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what orders the stream beside the backward pass."""
    if missing == "current_waits":
        monkeypatch.setattr(streams.CommStream, "current_waits", lambda self: None)
    else:
        monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    assert train_ddp(monkeypatch)[0].races
