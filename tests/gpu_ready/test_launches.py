"""What steps cost an accelerator may only become less: launches, bytes and host waits of GPT-2 small.

Limits are what was counted when they were written. Lower them when a change lowers the count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

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
from thinwire import AllReduce, Cast, PowerSGD, Quantize, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD, Memory
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.slots import SENT
from thinwire.algorithms.registry import REGISTRY
from thinwire.channel import Machines
from thinwire.fronts.sharded.front import ShardedFront
from thinwire.fronts.sharded.model import Piece
from thinwire.fronts.tensors import StepFront
from thinwire.kernels import dispatch
from thinwire.kernels.dispatch import all_finite
from thinwire.kernels.matrices import MatrixGroup, Rows
from thinwire.kernels.triton import launcher, triton_kernels
from thinwire.localsgd import LocalSGD
from thinwire.localsgd import model as local_sgd_model
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine, Settings, engine_of
from thinwire.sync import settings as settings_room
from thinwire.sync.settings import loss_scale_of
from thinwire.tensors import accelerators
from thinwire.tensors.accelerators import sent_to

NUM_BUCKETS = 16

ONE_LAYER = {name: shape for name, shape in gpt2_small().items() if name.startswith("h.0.")}


@dataclass(frozen=True)
class Limit:
    """The most that a step may cost.

    Attributes:
        launches: Kernels.
        passes: Bytes read and written, over those of the gradients.
        waits: Times that the host waits for the device.
    """

    launches: int
    passes: float
    waits: int = 1

    def check(
        self, found: Counted, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> None:
        gradient_bytes = sum(spec.gradient_bytes for bucket in buckets_of(shapes, dtype) for spec in bucket)
        passes = found.bytes / gradient_bytes
        is_within = found.launches <= self.launches and passes <= self.passes and found.waits <= self.waits
        assert is_within, (found, passes, self)


def step_of(
    algorithm: Algorithm,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    *,
    untold: int = 1,
    in_one_bucket: bool = False,
    machines: Machines | None = None,
    **settings: Any,
) -> Counted:
    """What the second step costs, which has a residual and factors; the third also has Triton's tables."""
    engine = Engine(algorithm, Alike(), settings=Settings(**settings), machines=machines)
    buckets = buckets_of(shapes, dtype)
    if in_one_bucket:
        buckets = [tuple(spec for bucket in buckets for spec in bucket)]

    def step() -> None:
        engine.average(zip(buckets, flats_of(buckets), strict=True), is_agreed=True)

    return counted(step, untold=untold)[0]


GPT2_SMALL = {
    1: Limit(289, 10.1),
    4: Limit(325, 10.3),
    8: Limit(373, 10.5),
    32: Limit(661, 11.8),
}


@pytest.mark.parametrize("matrix_rank", GPT2_SMALL)
def test_gpt2_small_by_matrix_rank(matrix_rank: int) -> None:
    found = step_of(PowerSGD(matrix_rank=matrix_rank), gpt2_small())
    GPT2_SMALL[matrix_rank].check(found, gpt2_small())


GPT2_SMALL_BY_TRITON: dict[str, tuple[Algorithm, torch.dtype, dict[str, Any], Limit]] = {
    "rank 1": (PowerSGD(matrix_rank=1), torch.float32, {}, Limit(39, 7.1)),
    "rank 8": (PowerSGD(matrix_rank=8), torch.float32, {}, Limit(39, 7.2)),
    "rank 32": (PowerSGD(matrix_rank=32), torch.float32, {}, Limit(39, 7.8)),
    # No more than with one, and no wait.
    "no host check": (PowerSGD(matrix_rank=4), torch.float32, {"host_check": False}, Limit(39, 7.1, 0)),
    "16-bit gradients": (PowerSGD(matrix_rank=4), torch.bfloat16, {}, Limit(34, 12.2)),
    "loss scale": (
        PowerSGD(matrix_rank=4),
        torch.float32,
        {"loss_scale": lambda device: torch.empty((), device=device)},
        Limit(40, 7.1),
    ),
}


# Of a process on a machine of two, with half of the work.
ON_MACHINES: dict[str, tuple[Algorithm, Limit]] = {
    "exact": (AllReduce(), Limit(0, 0.0, 0)),
    "bf16": (Cast("bf16"), Limit(26, 1.51, 0)),
    "4 bits": (Quantize(bits=4), Limit(1535, 24.3, 0)),
    "rank 4": (PowerSGD(matrix_rank=4), Limit(267, 10.5)),
}


@pytest.mark.parametrize("name", ON_MACHINES)
def test_gpt2_small_on_machines_of_two_processes(name: str) -> None:
    algorithm, limit = ON_MACHINES[name]
    inside = Alike()
    inside.control_device = torch.device("meta")  # as of NCCL
    found = step_of(algorithm, gpt2_small(), untold=4, machines=Machines(inside, Alike()))
    limit.check(found, gpt2_small())


@pytest.mark.parametrize("name", GPT2_SMALL_BY_TRITON)
def test_gpt2_small_by_triton(name: str) -> None:
    algorithm, dtype, settings, limit = GPT2_SMALL_BY_TRITON[name]
    with by_triton():
        found = step_of(algorithm, gpt2_small(), dtype, untold=2, **settings)
    limit.check(found, gpt2_small(), dtype)


@pytest.mark.parametrize("given", [None, GradScaler("cpu"), lambda: 8.0], ids=["none", "scaler", "function"])
def test_a_loss_scale_leaves_the_launches_of_all_buckets_joined(
    given: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, where tensors have addresses: on "meta" they are all alike."""
    buckets = [(ParameterSpec.of(f"{number}.weight", torch.empty(64, 48)),) for number in range(NUM_BUCKETS)]
    engine = Engine(
        PowerSGD(matrix_rank=4), Alike(), settings=Settings(loss_scale_of(given), host_check=False)
    )
    launched: list[str] = []

    def launch(kernel: str, programs: int, *_: object, **__: object) -> None:
        launched.extend([kernel] * bool(programs))

    monkeypatch.setattr(accelerators, "pays_per_launch", lambda device: True)
    monkeypatch.setattr(launcher, "launch", launch)
    with by_triton():
        for _ in range(3):
            launched.clear()
            engine.average([(specs, torch.randn(64 * 48)) for specs in buckets], is_agreed=True)
    # What comes back is multiplied once in each bucket, as it starts; all else is for all buckets at once.
    assert launched.count("compiled_matrices.products") == NUM_BUCKETS
    assert len(launched) <= NUM_BUCKETS + 11, Counter(launched)
    assert engine.counts().compression_ratio > 5


def scale(device: torch.device) -> torch.Tensor:
    return torch.empty((), device=device)


SETTINGS: dict[str, tuple[Algorithm, torch.dtype, dict[str, Any], Limit]] = {
    "16-bit gradients": (PowerSGD(matrix_rank=4), torch.bfloat16, {}, Limit(314, 45.4)),
    "loss scale": (PowerSGD(matrix_rank=4), torch.float32, {"loss_scale": scale}, Limit(362, 12.3)),
    "no host check": (PowerSGD(matrix_rank=4), torch.float32, {"host_check": False}, Limit(341, 10.3, 0)),
    "alternating": (PowerSGD(matrix_rank=4, alternating=True), torch.float32, {}, Limit(225, 9.2)),
    # Random rows are drawn on the host in every step, and it does not wait for their copies.
    "no host check, 16-bit gradients": (
        PowerSGD(matrix_rank=4),
        torch.bfloat16,
        {"host_check": False},
        Limit(339, 49.6, 0),
    ),
    "no host check, loss scale": (
        PowerSGD(matrix_rank=4),
        torch.float32,
        {"host_check": False, "loss_scale": scale},
        Limit(379, 12.3, 0),
    ),
    # Zeros take the place of factors of the other side.
    "no host check, alternating": (
        PowerSGD(matrix_rank=4, alternating=True),
        torch.float32,
        {"host_check": False},
        Limit(243, 9.3, 0),
    ),
    "no host check, batched": (BatchedPowerSGD(), torch.float32, {"host_check": False}, Limit(396, 12.1, 0)),
    "no warm start": (PowerSGD(matrix_rank=1, warm_start=False), torch.float32, {}, Limit(969, 10.1)),
    "batched": (BatchedPowerSGD(), torch.float32, {}, Limit(373, 11.1)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_gpt2_small_by_setting(name: str) -> None:
    algorithm, dtype, settings, limit = SETTINGS[name]
    found = step_of(algorithm, gpt2_small(), dtype, **settings)
    limit.check(found, gpt2_small(), dtype)


def test_in_one_bucket_to_keep_what_was_takes_five_launches() -> None:
    """And no pass: rows that are not to be kept go nowhere."""
    checked, unchecked = (
        step_of(PowerSGD(matrix_rank=4), gpt2_small(), in_one_bucket=True, host_check=each)
        for each in (True, False)
    )
    Limit(169, 10.2).check(checked, gpt2_small())
    Limit(174, 10.3, 0).check(unchecked, gpt2_small())


# Of one layer, in two buckets. What has no row here is to be counted and given one.
REGISTERED = {
    "AllReduce()": Limit(0, 0.0, 0),
    'Cast("fp16")': Limit(4, 3.1, 0),
    'Cast("bf16")': Limit(4, 3.1, 0),
    "Quantize(bits=8)": Limit(157, 38.7, 0),
    "Quantize(bits=4)": Limit(237, 48.6, 0),
    "Quantize(bits=2)": Limit(261, 55.2, 0),
    'TopK(error_decay=1, merge="members")': Limit(472, 25.8),
    "PowerSGD(matrix_rank=1)": Limit(106, 10.1),
    "PowerSGD(matrix_rank=2)": Limit(118, 10.2),
    "PowerSGD(matrix_rank=4)": Limit(142, 10.3),
    "PowerSGD(matrix_rank=8)": Limit(190, 10.5),
    "PowerSGD(matrix_rank=4, alternating=True)": Limit(80, 9.2),
    "PowerSGD(matrix_rank=2, alternating=True)": Limit(68, 9.1),
    'PowerSGD(matrix_rank=2, wire_dtype="bf16")': Limit(127, 10.2),
    "BatchedPowerSGD(matrix_rank=1)": Limit(117, 11.1),
}


@pytest.mark.parametrize("code", [variant.code for each in REGISTRY for variant in each.variants])
def test_every_algorithm_that_there_is(code: str) -> None:
    (algorithm,) = (
        variant.algorithm for each in REGISTRY for variant in each.variants if variant.code == code
    )
    REGISTERED[code].check(step_of(algorithm, ONE_LAYER), ONE_LAYER)


class Ordered(TorchDispatchMode):
    """Notes operations of which CUDA does not promise the same bits every time, such as sums of floats."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unordered: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[1].removesuffix("_")
        adds_up = name in ("cumsum", "cumprod", "logcumsumexp") and args[0].is_floating_point()
        accumulates = name in ("index_put", "put") and True in (args[3:4], (kwargs or {}).get("accumulate"))
        if adds_up or accumulates or name in UNORDERED:
            self.unordered.append(str(func))
        return func(*args, **(kwargs or {}))


UNORDERED = {"index_add", "scatter_add", "scatter_reduce", "index_reduce", "kthvalue", "histc", "bincount"}


@pytest.mark.parametrize("host_check", [True, False])
@pytest.mark.parametrize("algorithm", [*(v for r in REGISTRY for v in r.variants), TopK()], ids=str)
def test_every_run_has_the_same_bits(algorithm: Any, host_check: bool, monkeypatch: Any) -> None:
    # What one member has sent is added at places that are all different.
    entries = replace(dispatch.TORCH_TABLES.entries, add=lambda *_: None)
    monkeypatch.setattr(dispatch, "TORCH_TABLES", replace(dispatch.TORCH_TABLES, entries=entries))
    engine = Engine(
        getattr(algorithm, "algorithm", algorithm), Alike(), settings=Settings(host_check=host_check)
    )
    buckets = buckets_of(ONE_LAYER)
    with on_meta(), Ordered() as ordered, Counting():
        for _ in range(2):
            engine.average(zip(buckets, flats_of(buckets), strict=True), is_agreed=True)
    assert ordered.unordered == []


# Of one layer in two buckets, by Triton's kernels.
QUANTIZE_BY_TRITON: dict[Algorithm, Limit] = {
    Quantize(bits=8): Limit(7, 3.2, 0),
    Quantize(bits=4): Limit(7, 2.6, 0),
    Quantize(bits=1): Limit(7, 2.2, 0),
    Quantize(bits=4, error_feedback=True): Limit(19, 10.8, 1),
}


@pytest.mark.parametrize("algorithm", QUANTIZE_BY_TRITON, ids=str)
def test_few_bits_by_triton(algorithm: Algorithm) -> None:
    with by_triton():
        found = step_of(algorithm, ONE_LAYER)
    QUANTIZE_BY_TRITON[algorithm].check(found, ONE_LAYER)


# Of one layer. Of what asks the host for an answer the residual is copied, and put back: by a launch each.
UNSEEN: dict[str, tuple[Algorithm, Limit]] = {
    "TopK": (TopK(), Limit(504, 40.3, 0)),
    "Quantize": (Quantize(bits=4, error_feedback=True), Limit(359, 85.9, 0)),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_copied_to_be_put_back(name: str) -> None:
    algorithm, limit = UNSEEN[name]
    found = step_of(algorithm, ONE_LAYER, host_check=False)
    limit.check(found, ONE_LAYER)
    assert found.launches < step_of(algorithm, ONE_LAYER).launches + 15


def test_kernels_that_get_an_address_get_a_whole_tensor() -> None:
    """What has arrived is often a part of each row of a message."""
    read: list[torch.Tensor] = []

    def launched(*_: object, reads: Sequence[torch.Tensor] = (), **__: object) -> None:
        read.extend(reads)

    with by_triton(), patch.object(launcher, "launch", launched):
        all_finite(torch.empty(2, 10, device="meta")[:, :4])
    assert [each.is_contiguous() for each in read] == [True]


def test_a_loss_scale_of_the_users_own_reaches_the_device_without_a_wait() -> None:
    """Where one number is copied, nothing is counted: a wait shows by the way that it goes."""
    scale = loss_scale_of(lambda: 8.0)
    assert scale is not None
    with patch.object(settings_room, "sent_to", wraps=sent_to) as pinned:
        assert scale(torch.device("meta")).is_meta
    assert pinned.call_count == 1


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


def test_what_watch_asks_of_every_bucket() -> None:
    """By one operation each: the norms of all residuals, and of all that was sent."""
    specs = [spec for bucket in buckets_of(gpt2_small()) for spec in bucket]
    plan, memory = PowerSGD(matrix_rank=4).prepare(specs), Memory()
    for spec, route in zip(specs, plan.routes, strict=True):
        if route.is_compressed:
            memory[ERROR][spec.name] = torch.empty(spec.numel, device="meta")
            memory[SENT][spec.name] = torch.empty(4 * spec.shape[1], device="meta")
    found, counting = counted(lambda: plan.diagnose(memory))
    assert found.launches <= 22, counting.launches


def parameters_of(shapes: dict[str, tuple[int, ...]]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes.values()]


def test_the_front_of_tensors() -> None:
    """One bucket. Beside the algorithm's: each gradient is copied to the bucket, and these are joined."""
    parameters = parameters_of(ONE_LAYER)
    front = StepFront(parameters, PowerSGD(matrix_rank=4), transport=Alike())
    gradients = [torch.empty_like(parameter) for parameter in parameters]
    found, _ = counted(lambda: front.average(gradients))
    Limit(165, 15.3).check(found, ONE_LAYER)


def test_the_front_of_local_sgd() -> None:
    """Beside the algorithm's and the optimizer's: the change since the last average, and the way back."""
    model = torch.nn.Module()
    for number, parameter in enumerate(parameters_of(ONE_LAYER)):
        model.register_parameter(str(number), parameter)
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = PowerSGD(matrix_rank=4)
    with (
        on_meta(),
        patch.object(local_sgd_model, "_check_values"),  # which refuses such a model
        Counting(),  # its entry asks tensors for values
        LocalSGD(model, optimizer, every_steps=1, algorithm=algorithm, replicas=Alike()) as local,
    ):
        found, _ = counted(optimizer.step)
        assert engine_of(local.sync).counts().compression_ratio > 5
    Limit(218, 25.3, 3).check(found, ONE_LAYER)


class OnDevice(Alike):
    """A group whose messages for the host lie on the device as well: as of NCCL alone."""

    control_device = torch.device("meta")


@pytest.mark.parametrize("host_check", [True, False])
def test_the_front_of_sharded_models(host_check: bool) -> None:
    """It waits for the means as others do; and for who has a gradient only where it lacks one."""
    parameters = parameters_of(ONE_LAYER)
    pieces = [
        Piece(str(number), parameter, tuple(parameter.shape), None, bucket=0)
        for number, parameter in enumerate(parameters)
    ]
    engine = Engine(
        PowerSGD(matrix_rank=4),
        OnDevice(),
        [piece.spec for piece in pieces],
        Settings(host_check=host_check),
    )
    front = ShardedFront(engine, OnDevice(), Mock(), pieces)
    front._has_order = True  # which is agreed upon in the first step, with waits

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        front.average()

    with on_meta():
        for bucket in front._buckets:
            bucket.lane = engine.open(bucket.specs, torch.device("meta"), is_agreed=True)
    found, _ = counted(step)
    limit = Limit(166, 15.3) if host_check else Limit(175, 15.4, 0)
    limit.check(found, ONE_LAYER)
