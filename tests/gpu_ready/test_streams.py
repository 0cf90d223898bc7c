"""Nothing of a DDP model's step races with the backward pass or the messages; a planted bug is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from gpu_ready.streams import MAIN, NCCL, Device, SimulatedNCCL, Stream
from thinwire import PowerSGD
from thinwire.adapters.ddp import ATTACHED, adapter_of, switched
from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import REGISTRY
from thinwire.kernels import dispatch
from thinwire.sync import Settings, clock, streams
from thinwire.tensors import accelerators

NUM_BUCKETS, NUM_STEPS = 3, 3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Let what is run on the CPU run on the streams of a device."""
    device = Device()
    with device.on(NCCL):
        pass
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    monkeypatch.setattr(clock, "record_event", lambda device: None)  # what it would time takes no time
    monkeypatch.setattr(streams, "WITHOUT_STREAMS", ())
    monkeypatch.setattr(streams, "current_stream", device.current_stream)
    monkeypatch.setattr(streams, "new_stream", device.new_stream)
    monkeypatch.setattr(streams, "launching_on", lambda stream: device.on(stream.number))
    # DDP's hooks run on the main stream, as its copies to and from the buckets do.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def train(
    device: Device, algorithm: Algorithm, *, host_check: bool = True, forgets: bool = False
) -> set[int]:
    """Train a DDP model; return the streams that waited for messages."""
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(NUM_BUCKETS))), bucket_cap_mb=0.002
    )
    transport = SimulatedNCCL(device, forgets=forgets)
    with device:
        adapter = adapter_of(model, algorithm, transport, Settings.of(host_check=host_check))
        switched(model, lambda: adapter, ATTACHED)
        # In the first step DDP learns the order of its buckets.
        for _ in range(NUM_STEPS):
            model.zero_grad()
            torch.autograd.backward(model(torch.randn(4, 24)).sum())
            for parameter in model.parameters():
                parameter.detach().sub_(0.1 * torch.randn(()) * parameter.grad)  # type: ignore[operator]
    assert len(adapter._buckets._states) >= NUM_BUCKETS
    return transport.waiting


@pytest.mark.parametrize(
    ("algorithm", "host_check"),
    [
        *((registered.made(), True) for registered in REGISTRY),
        (PowerSGD(matrix_rank=2, alternating=True), False),
    ],
    ids=str,
)
def test_no_algorithm_races_or_holds_up_a_gradient(
    algorithm: Algorithm, host_check: bool, device: Device
) -> None:
    waiting = train(device, algorithm, host_check=host_check)
    assert (device.races, device.early_frees) == ([], [])
    assert MAIN not in waiting


@pytest.mark.parametrize("missing", ["a wait for a message", "the last wait", "every wait for a stream"])
def test_a_planted_race_is_found(missing: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "the last wait":
        monkeypatch.setattr(streams.CommStream, "current_waits", lambda self: None)
    elif missing == "every wait for a stream":
        monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    train(device, PowerSGD(matrix_rank=2), forgets=missing == "a wait for a message")
    assert device.races
    assert device.early_frees
