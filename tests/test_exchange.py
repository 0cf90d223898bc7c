"""The order, number and bytes of collectives, and all or nothing."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import pytest
import torch

from catalog import ENTRIES, Entry, buckets, random_gradients, spec
from thinwire import AllReduce, BatchedPowerSGD, Cast, PowerSGD
from thinwire.algorithms import Algorithm
from thinwire.channel import Channel, InProcessChannel, Pending, Told, lockstep
from thinwire.engine import Engine
from thinwire.errors import CommunicationError, StepError
from thinwire.simulation import Simulation


class Recording(Channel):
    """Averages among one, and notes what is sent and when it is waited for."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.events: list[str] = []
        self.fail_at = fail_at
        self.sent = 0

    @property
    def size(self) -> int:
        return 1

    @property
    def process_rank(self) -> int:
        return 0

    def agree(self, told: Told, purpose: str) -> None:
        pass

    def _average(self, message: torch.Tensor, purpose: str) -> Pending:
        number, self.sent = self.sent, self.sent + 1
        self.events.append(f"send {number}: {message.numel()}")
        return _Arrived(self, number, message)


class _Arrived:
    def __init__(self, channel: Recording, number: int, message: torch.Tensor) -> None:
        self.channel, self.number, self.message = channel, number, message

    def wait(self) -> torch.Tensor:
        if self.number == self.channel.fail_at:
            raise CommunicationError("the peer has gone")
        self.channel.events.append(f"wait {self.number}")
        return self.message


def step(sync: Engine, seed: int = 0) -> list[torch.Tensor]:
    gradients = random_gradients(buckets(), num_workers=1, seed=seed)[0]
    for specs, flat in zip(buckets(), gradients, strict=True):
        sync.start(specs, flat)
    sync.finish()
    return gradients


WHOLE = [64 * 32 * 2 + 64 + 1, 40 * 54 + 6]
LEFT = [2 * (64 + 64) + 64 + 1, 2 * 40 + 6]
RIGHT = 2 * (32 + 32 + 54)


@pytest.mark.parametrize(
    ("algorithm", "events"),
    [
        (AllReduce(), [f"send 0: {WHOLE[0]}", f"send 1: {WHOLE[1]}", "wait 0", "wait 1"]),
        (Cast("bf16"), [f"send 0: {WHOLE[0]}", f"send 1: {WHOLE[1]}", "wait 0", "wait 1"]),
        (
            PowerSGD(matrix_rank=2),
            [f"send 0: {LEFT[0]}", f"send 1: {LEFT[1]}", "wait 0", "wait 1", f"send 2: {RIGHT}", "wait 2"],
        ),
        (
            PowerSGD(matrix_rank=2, power_iterations=2, min_compression_ratio=1),
            [
                f"send 0: {LEFT[0]}",
                f"send 1: {LEFT[1]}",
                "wait 0",
                "wait 1",
                f"send 2: {RIGHT}",
                "wait 2",
                f"send 3: {2 * (64 + 64 + 40)}",
                "wait 3",
                f"send 4: {RIGHT}",
                "wait 4",
            ],
        ),
        (
            PowerSGD(matrix_rank=2, alternating=True),
            [
                f"send 0: {2 * (32 + 32) + 64 + 1}",
                f"send 1: {2 * 54 + 6}",
                "wait 0",
                "wait 1",
            ],
        ),
        (BatchedPowerSGD(), ["send 0: 65", "send 1: 47", "wait 0", "wait 1", "send 2: 112", "wait 2"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_number_order_and_size_of_messages(algorithm: Algorithm, events: list[str]) -> None:
    """First rounds are sent as buckets come; second rounds of all buckets travel as one."""
    channel = Recording()
    sync = Engine(algorithm, channel, [each for bucket in buckets() for each in bucket])
    step(sync)
    assert channel.events == events
    assert sync.stats().messages == sum("send" in event for event in events)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_failed_collective_leaves_memory_as_it_was(fail_at: int) -> None:
    healthy, failing = (Engine(PowerSGD(matrix_rank=2), Recording()) for _ in range(2))
    for sync in (healthy, failing):
        step(sync)
    channel = failing.channel
    assert isinstance(channel, Recording)
    channel.fail_at = channel.sent + fail_at
    with pytest.raises(CommunicationError, match="the peer has gone"):
        step(failing, seed=1)
    assert failing.stats().steps == 1
    for expected, got in zip(step(healthy, seed=2), step(failing, seed=2), strict=True):
        assert torch.equal(expected, got)


def test_finish_without_start_is_refused_and_counts_nothing() -> None:
    sync = Engine(PowerSGD(matrix_rank=2), Recording())
    with pytest.raises(StepError, match="without start"):
        sync.finish()
    assert sync.stats().steps == 0


def test_an_interrupted_backward_pass_is_told_at_the_next() -> None:
    sync = Engine(PowerSGD(matrix_rank=2), Recording())
    step(sync)
    flat = random_gradients(buckets(), num_workers=1, seed=0)[0][0]
    sync.start(buckets()[0], flat)
    for action in (lambda: sync.use(AllReduce()), sync.state_dict, lambda: sync.load_state_dict({})):
        with pytest.raises(StepError, match="between steps"):
            action()
    with pytest.raises(StepError, match="did not finish"):
        sync.start(buckets()[0], flat)
    step(sync)
    assert sync.stats().steps == 2


def test_memory_does_not_care_how_parameters_are_bucketed() -> None:
    """DDP rebuilds its buckets after the first step."""
    first, second = buckets()
    regrouped = [tuple(reversed(second)), (*first,)]
    simulation = Simulation(PowerSGD(matrix_rank=2), [first, second], num_workers=2)
    moved = Simulation(PowerSGD(matrix_rank=2), [first, second], num_workers=2)
    for seed in range(6):
        gradients = random_gradients([first, second], num_workers=2, seed=seed)
        mirrored = [[_reversed(flats[1]), flats[0].clone()] for flats in gradients]
        if seed == 0:
            mirrored = [[flat.clone() for flat in flats] for flats in gradients]
        else:
            moved.buckets = regrouped
        simulation.step(gradients)
        moved.step(mirrored)
    assert torch.equal(gradients[0][0], mirrored[0][1])
    assert torch.equal(_reversed(gradients[0][1]), mirrored[0][0])
    assert moved.syncs[0].stats().compression_ratio > 5


def _reversed(flat: torch.Tensor) -> torch.Tensor:
    parts = flat.split_with_sizes([each.numel for each in buckets()[1]])
    return torch.cat(list(reversed(parts)))


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_autograd_do_not_reach_the_arithmetic(entry: Entry, autocast_dtype: torch.dtype) -> None:
    plain, under = (Engine(entry.algorithm, Recording()) for _ in range(2))
    for seed in range(5):
        expected = step(plain, seed)
        with torch.autocast("cpu", dtype=autocast_dtype), torch.enable_grad():
            got = step(under, seed)
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b)
            assert not b.requires_grad


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_are_in_full_precision_whatever_the_user_has_set(precision: str) -> None:
    """Lightning advises torch.set_float32_matmul_precision("high"): TF32 on GPUs."""

    class Looking(Recording):
        def _average(self, message: torch.Tensor, purpose: str) -> Pending:
            self.events.append(torch.backends.cuda.matmul.fp32_precision)
            return super()._average(message, purpose)

    channel = Looking()
    torch.set_float32_matmul_precision(precision)
    try:
        outside = torch.backends.cuda.matmul.fp32_precision
        step(Engine(PowerSGD(matrix_rank=2), channel))
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cuda.matmul.fp32_precision == outside == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert channel.events.count("ieee") == 3


LEVELS = [(backend, of) for backend in ("cuda", "mkldnn") for of in ("all", "matmul")]


def _own_settings() -> dict[tuple[str, str], str]:
    """What each level has been set to itself; leaves all of them unset."""
    own = {}
    for level in [("generic", "all"), *LEVELS]:  # the getter tells what is in effect: no wider one is left
        own[level] = torch._C._get_fp32_precision_getter(*level)
        torch._C._set_fp32_precision_setter(*level, "none")
    return own


@pytest.mark.skipif(not hasattr(torch._C, "_set_fp32_precision_setter"), reason="torch has one level only")
@pytest.mark.parametrize(
    "settings",
    [
        {("generic", "all"): "tf32"},
        {("generic", "all"): "tf32", ("cuda", "matmul"): "tf32"},
        {("generic", "all"): "tf32", ("cuda", "all"): "tf32", ("mkldnn", "matmul"): "ieee"},
        {("cuda", "all"): "tf32", ("mkldnn", "all"): "bf16"},
        {("generic", "all"): "ieee", ("mkldnn", "matmul"): "bf16"},
    ],
    ids=str,
)
def test_the_users_precisions_are_left_as_they_were(settings: dict[tuple[str, str], str]) -> None:
    """`torch.backends.fp32_precision = "tf32"` is a wider setting: products follow it, and go on to."""
    inside: list[tuple[str, str]] = []

    class Looking(Recording):
        def _average(self, message: torch.Tensor, purpose: str) -> Pending:
            inside.append(
                (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
            )
            return super()._average(message, purpose)

    _own_settings()
    for level, precision in settings.items():
        torch._C._set_fp32_precision_setter(*level, precision)
    try:
        step(Engine(PowerSGD(matrix_rank=2), Looking()))
    finally:
        left = _own_settings()
    assert left == {level: settings.get(level, "none") for level in left}
    assert len(inside) == 3
    assert {precision for both in inside for precision in both} <= {"ieee", "none"}


def test_a_worker_that_sends_something_else_is_named() -> None:
    channels = InProcessChannel.group(2)
    pending = [
        channel.average(torch.zeros(size), "a test") for channel, size in zip(channels, (3, 4), strict=True)
    ]
    with pytest.raises(CommunicationError, match=r"differs between workers.*\(3,\).*\(4,\)"):
        pending[0].wait()


def test_waiting_before_all_have_sent_is_told_not_hung() -> None:
    first, _ = InProcessChannel.group(2)
    with pytest.raises(CommunicationError, match=r"workers \[1\] have not sent"):
        first.average(torch.zeros(3), "a test").wait()


def test_workers_that_end_early_are_told() -> None:
    with pytest.raises(CommunicationError, match="1 of 2 workers ended"):
        lockstep([iter([None, None]), iter([None])])


def test_error_norm_and_relative_error_agree_with_the_matrix() -> None:
    sync = Engine(PowerSGD(matrix_rank=1), Recording())
    shape = spec("weight", 30, 20)
    matrix = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    for _ in range(40):
        sync._memory.error.clear()
        sync.start((shape,), matrix.reshape(-1).clone())
        sync.finish()
    singular = torch.linalg.svdvals(matrix)
    best = (singular[1:].norm() / singular.norm()).item()
    assert sync.stats().relative_error["weight"] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(
    "algorithm",
    [
        PowerSGD(matrix_rank=2),
        PowerSGD(matrix_rank=2, power_iterations=3, min_compression_ratio=1),
        PowerSGD(matrix_rank=2, power_iterations=2, alternating=True),
        BatchedPowerSGD(),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [None, 1024.0], ids=["unscaled", "scaled"])
def test_the_relative_error_is_what_is_owed_of_what_was_to_send(
    algorithm: Algorithm, scale: float | None
) -> None:
    """Under any scaling and number of iterations; and saving, which averages what is owed, keeps it."""
    channels = InProcessChannel.group(2)
    scaled = None if scale is None else (lambda device: torch.tensor(scale))
    syncs = [Engine(algorithm, channel, loss_scale=scaled) for channel in channels]
    layout = (spec("weight", 49, 25),)  # a square number of elements
    for seed in range(3):
        owed = [sync._memory.error.get("weight", torch.zeros(49 * 25)).clone() for sync in syncs]
        gradients = random_gradients([layout], num_workers=2, seed=seed)
        for sync, (flat,) in zip(syncs, gradients, strict=True):
            sync.start(layout, flat.clone().mul_(scale or 1.0))
        lockstep([_silently(sync.finishing()) for sync in syncs])
    for sync, before, (flat,) in zip(syncs, owed, gradients, strict=True):
        (told,) = sync.stats().relative_error.values()
        still_owed = sync._memory.error["weight"].norm() / (flat + before).norm()
        assert told == pytest.approx(still_owed.item(), rel=1e-4)
    before_saving = [sync.stats().relative_error for sync in syncs]
    lockstep([_silently(sync.saving()) for sync in syncs])
    assert [sync.stats().relative_error for sync in syncs] == before_saving
    for sync, (flat,) in zip(syncs, gradients, strict=True):
        sync.use(AllReduce())
        sync.start(layout, flat)
    lockstep([_silently(sync.finishing()) for sync in syncs])
    assert [sync.stats().relative_error for sync in syncs] == [{}, {}]


def _silently(generator: Generator[None, None, Any]) -> Generator[None, None, None]:
    yield from generator


def test_the_seed_decides_the_first_factors() -> None:
    results = []
    for seed in (0, 0, 1):
        sync = Engine(PowerSGD(matrix_rank=2, seed=seed), Recording())
        results.append(torch.cat(step(sync)))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_waiting_is_timed() -> None:
    class Slow(_Arrived):
        def wait(self) -> torch.Tensor:
            time.sleep(0.02)
            return super().wait()

    class SlowChannel(Recording):
        def _average(self, message: torch.Tensor, purpose: str) -> Pending:
            return Slow(self, 0, message)

    sync = Engine(PowerSGD(matrix_rank=2), SlowChannel())
    step(sync)
    assert 0.06 <= sync.stats().waiting_seconds < 10


def test_factors_of_buckets_that_are_gone_are_forgotten() -> None:
    first, second = buckets()
    sync = Engine(BatchedPowerSGD(), Recording())
    found = []
    for layout in ([first, second], [(*first, *second)], [(*first, *second)]):
        flats = random_gradients(layout, num_workers=1, seed=0)[0]
        for specs, flat in zip(layout, flats, strict=True):
            sync.start(specs, flat)
        assert sync.finish()
        found.append(set(dict(sync.state_dict()["factor"])))
    assert found == [*[{"head.weight … scale", "conv.weight … empty"}] * 2, {"head.weight … empty"}]
    sync.use(PowerSGD(matrix_rank=2))
    assert dict(sync.state_dict()["factor"]) == {}


def test_parameters_that_nobody_used_are_found_right_after_a_resume() -> None:
    """The first bucket owes nothing, so what is owed shows only with the second."""
    layout = [(spec("bias", 30),), (spec("weight", 30, 20), spec("unused", 30, 20))]
    flats = random_gradients(layout, num_workers=1, seed=0)[0]
    saved: dict[str, Any] = {}
    for _ in range(2):
        sync = Engine(PowerSGD(matrix_rank=1), Recording(), may_be_unused=True)
        if saved:
            sync.load_state_dict(saved)
            flats[1][600:] = 0
        for specs, flat in zip(layout, flats, strict=True):
            sync.start(specs, flat)
        assert sync.finish()
        saved, before = sync.state_dict(), saved
    assert (flats[1][600:] == 0).all()
    assert dict(saved["error"])["unused"].norm() > 0
    torch.testing.assert_close(dict(saved["error"])["unused"], dict(before["error"])["unused"])
    assert not torch.equal(dict(saved["error"])["weight"], dict(before["error"])["weight"])


def test_a_handle_and_its_stats_are_printed_in_some_lines_with_the_ratio() -> None:
    simulation = Simulation(PowerSGD(matrix_rank=2), buckets(), num_workers=2)
    sync = simulation.syncs[1]
    first = "PowerSGD(matrix_rank=2) over 2 processes, of which this is 1"
    assert str(sync).startswith(
        f"{first}\nplan: 3 of 7 parameters compressed, 25,308 bytes a step become 2,572: "
    )
    assert str(sync).endswith("\nso far: no step yet")
    for step in range(3):
        gradients = random_gradients(buckets(), num_workers=2, seed=step)
        if step == 1:
            gradients[0][0][0] = torch.nan
        simulation.step(gradients)
    stats = sync.stats()
    lines = str(stats).splitlines()
    assert lines[0] == "3 steps, 1 of them not finite"
    assert lines[1] == (
        f"sent {stats.message_bytes:,} bytes in 9 messages, in place of 75,924 bytes: compression ratio 9.8"
    )
    assert lines[2].startswith("seconds: 0.")
    assert lines[3].startswith("relative error of the last step: 0.")
    assert f"so far: {lines[0]}\n{lines[1]}" in str(sync)
