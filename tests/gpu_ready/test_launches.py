"""What steps cost an accelerator and its host: bounds on launches, waits and calls."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from gpu_ready.counting import (
    Alike,
    Counted,
    Counting,
    buckets_of,
    by_triton,
    counted,
    flats_of,
    gpt2_small,
    on_meta,
)
from kernel_calls import asked
from thinwire import AllReduce, PowerSGD, Quantize, TopK
from thinwire.adapters.sharded.fsdp import FSDPAdapter
from thinwire.adapters.sharded.model import Piece
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.algorithms.registry import REGISTRY
from thinwire.comm import Machines
from thinwire.kernels import torch_entries
from thinwire.kernels.dispatch import all_finite
from thinwire.kernels.matrices import MatrixGroup, Rows
from thinwire.kernels.triton import launcher, triton_kernels
from thinwire.sync import Engine, Settings
from thinwire.sync.settings import loss_scale_of

ONE_LAYER, THREE_LAYERS = (
    {name: shape for name, shape in gpt2_small().items() if name.startswith(layers)}
    for layers in (("h.0.",), ("h.0.", "h.1.", "h.2."))
)


@dataclass(frozen=True)
class Step:
    """A step and the most that it may cost.

    Attributes:
        algorithm: What averages.
        launches: Operations and Triton's kernels.
        waits: Times that the host waits for the device.
        settings: Of `Settings`.
        by_triton: Whether Triton's kernels serve.
        machines: Whether a machine has two processes, of which this one does half of the work.
        calls: Of Thinwire's functions.
    """

    algorithm: Algorithm
    launches: int
    waits: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shapes: dict[str, tuple[int, ...]] = field(default_factory=gpt2_small)
    by_triton: bool = False
    machines: bool = False
    calls: int = sys.maxsize

    def counted(self) -> Counted:
        """What a later step costs, which has a residual and factors, and where nothing has moved."""
        inside = OnDevice()
        machines = Machines(inside, Alike()) if self.machines else None
        engine = Engine(self.algorithm, Alike(), settings=Settings(**self.settings), machines=machines)
        buckets = buckets_of(self.shapes, self.dtype)
        flats = flats_of(buckets)

        def step() -> None:
            engine.average(zip(buckets, flats, strict=True))

        with by_triton() if self.by_triton else nullcontext():
            found = counted(step)
        is_exact = isinstance(self.algorithm, AllReduce)
        assert is_exact or self.machines or engine.reporter.counts().compression_ratio > 1.5
        if not self.machines:  # the others of a machine are not there
            assert engine.reporter.counts().message_bytes == 3 * engine.plan.message_bytes
        return found

    def check(self, found: Counted | None = None) -> None:
        found = found or self.counted()
        most = Counted(self.launches, self.waits, self.calls)
        assert all(map(operator.le, astuple(found), astuple(most))), (found, most)


class OnDevice(Alike):
    """A group whose messages for the host lie on the device as well: as of NCCL alone."""

    control_device = torch.device("meta")


class OfTwoBackends(Alike):
    """A group whose messages for the host lie on the CPU: of Gloo beside NCCL, which is torch's default."""

    data_device = torch.device("meta")


RANK_4, BF16 = PowerSGD(matrix_rank=4), torch.bfloat16
FEEDBACK = Quantize(bits=4, error_feedback=True)
UNCHECKED: dict[str, Any] = {"host_check": False}
BY_SCALER: dict[str, Any] = {"loss_scale": loss_scale_of(GradScaler("cpu"))}

STEPS = {
    "rank 4": Step(RANK_4, 210, shapes=THREE_LAYERS),
    "rank 4, no host check": Step(RANK_4, 240, 0, UNCHECKED, shapes=THREE_LAYERS),
    "batched, no host check": Step(BatchedPowerSGD(), 155, 0, UNCHECKED, shapes=THREE_LAYERS),
    "machines, exact": Step(AllReduce(), 0, 0, shapes=THREE_LAYERS, machines=True),
    "machines, rank 4": Step(RANK_4, 180, shapes=THREE_LAYERS, machines=True),
    # No more than with a host check, and no wait.
    "Triton, rank 4": Step(RANK_4, 46, 0, UNCHECKED, by_triton=True, calls=6200),
    "Triton, rank 4, 16 bits, GradScaler": Step(RANK_4, 46, 1, BY_SCALER, BF16, by_triton=True, calls=3500),
    "Triton, 4 bits": Step(Quantize(bits=4), 46, 0, by_triton=True, calls=1350),
    "Triton, 4 bits, error feedback": Step(FEEDBACK, 80, by_triton=True, calls=2500),
    "Triton, TopK, GradScaler": Step(TopK(), 80, settings=BY_SCALER, by_triton=True),
    "Triton, TopK, no host check": Step(TopK(), 80, 0, UNCHECKED, by_triton=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_later_step(name: str) -> None:
    STEPS[name].check()


def waits_of(engine: Engine) -> int:
    """How often the host waits in a later step of one layer."""
    buckets = buckets_of(ONE_LAYER)

    def step() -> None:
        engine.average(zip(buckets, flats_of(buckets), strict=True))

    return counted(step).waits


@pytest.mark.parametrize(("of_a_machine", "host_check"), [(True, True), (True, False), (False, False)])
def test_that_others_must_be_healthy_too_makes_the_host_wait_no_more(
    of_a_machine: bool, host_check: bool
) -> None:
    """Of the processes of a machine, and of the shards of a replica."""
    others = OfTwoBackends()
    settings = Settings(host_check=host_check, health_group=None if of_a_machine else others)
    machines = Machines(others, Alike()) if of_a_machine else None
    engine = Engine(PowerSGD(matrix_rank=4), Alike(), settings=settings, machines=machines)
    assert waits_of(engine) == int(host_check)


def test_a_weight_makes_the_host_wait_no_more() -> None:
    settings = Settings(host_check=False, weight=lambda: 3.0)
    assert waits_of(Engine(AllReduce(), OnDevice(), settings=settings)) == 0


class Ordered(Counting):  # type: ignore[no-untyped-call]
    """Notes operations of which CUDA does not promise the same bits every time, such as sums of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.unordered: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[1].removesuffix("_")
        adds_up = name in ("cumsum", "cumprod", "logcumsumexp") and args[0].is_floating_point()
        accumulates = name in ("index_put", "put") and True in (args[3:4], (kwargs or {}).get("accumulate"))
        if adds_up or accumulates or name in UNORDERED:
            self.unordered.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


UNORDERED = {"index_add", "scatter_add", "scatter_reduce", "index_reduce", "kthvalue", "histc", "bincount"}


@pytest.mark.parametrize(
    "algorithm",
    [
        *(registered.made() for registered in REGISTRY),
        PowerSGD(matrix_rank=2, alternating=True),
        FEEDBACK,
        TopK(error_decay=1, merge="members"),
    ],
    ids=str,
)
def test_every_algorithm_takes_few_launches_and_has_the_same_bits_in_every_run(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What one member has sent is added at places that are all different.
    monkeypatch.setattr(torch_entries, "_add", lambda *_: None)
    engine = Engine(algorithm, Alike(), settings=Settings(host_check=False))
    buckets = buckets_of(ONE_LAYER)
    with on_meta():
        for _ in range(3):
            with Ordered() as counting:
                engine.average(zip(buckets, flats_of(buckets), strict=True))
            assert counting.unordered == []
    assert sum(counting.launches.values()) <= 500, counting.launches


def test_kernels_that_get_an_address_get_a_whole_tensor() -> None:
    """What has arrived is often a part of each row of a message."""
    with by_triton(), patch.object(launcher, "launch") as launched:
        all_finite(torch.empty(2, 10, device="meta")[:, :4])
    read, _ = launched.call_args.args[-1]
    assert read.is_contiguous()


def test_what_kernels_write_to_by_address_is_fp32_whatever_the_default_type() -> None:
    group = MatrixGroup(["a"], [torch.empty(64, 48, device="meta")], [None], 4)
    factor = torch.empty(1, 4, 48, device="meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with on_meta():
            (left,) = triton_kernels.products(asked([group], [factor], None, add_error=False))
            (basis,) = triton_kernels.orthonormal_rows([Rows(left)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert left.dtype == basis.dtype == torch.float32


def parameters_of(shapes: dict[str, tuple[int, ...]]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes.values()]


@pytest.mark.parametrize("host_check", [True, False])
def test_the_adapter_of_sharded_models(host_check: bool) -> None:
    """It waits for the means as others do; and for who has a gradient only where it lacks one."""
    parameters = parameters_of(ONE_LAYER)
    pieces = [
        Piece(str(number), parameter, tuple(parameter.shape), None, bucket=0)
        for number, parameter in enumerate(parameters)
    ]
    engine = Engine(
        PowerSGD(matrix_rank=4), OnDevice(), [piece.spec for piece in pieces], Settings(host_check=host_check)
    )
    adapter = FSDPAdapter(engine, OnDevice(), Mock(), pieces)
    adapter._has_order = engine.buckets.has_agreed = True  # agreed upon in the first step

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
            adapter._changed.add(id(parameter))
        adapter.average()

    with on_meta():
        for bucket in adapter._buckets:
            bucket.opened = engine.open(bucket.specs, torch.device("meta"))
    launches, waits = (200, 1) if host_check else (215, 0)
    Step(RANK_4, launches, waits, shapes=ONE_LAYER).check(counted(step))
