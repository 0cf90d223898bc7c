"""A peer that dies, stalls or raises: the others are told where, in time, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import crash
import thinwire
from thinwire import AllReduce, CommunicationError, GradientSync, PowerSGD, Quantize
from thinwire import powersgd as epfl
from thinwire.algorithms import Algorithm
from thinwire.channel import agreement
from thinwire.sync import engine_of
from thinwire.testing import Fault, InjectedError, fail_at, faults

TIMEOUT_SECONDS = 2.0
BUSY_SECONDS = 20.0  # by which a busy machine may be late; without a timeout it would be for ever
LOST = 1  # the process that is lost
AT = 4  # the step in which it is


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(1000 * step + dist.get_rank())
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()


def train(step_with: Callable[[int], None], steps: int) -> None:
    for step in range(steps):
        step_with(step)


def by_hook(algorithm: Algorithm) -> tuple[GradientSync, Callable[[int], None]]:
    """DDP with two buckets; a step."""
    model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005)
    return thinwire.attach(model, algorithm), lambda step: backward(model, step)


def by_optimizer_step(algorithm: Algorithm) -> tuple[GradientSync, Callable[[int], None]]:
    """The reference's loop; a step."""
    model = new_model()
    aggregator = epfl.PowerSGD(model.parameters(), epfl.Config(rank=2, start_compressing_after_num_steps=0))
    aggregator.sync.use(algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step_with(step: int) -> None:
        backward(model, step)
        epfl.optimizer_step(optimizer, aggregator)

    return aggregator.sync, step_with


FRONTS = {"hook": by_hook, "optimizer_step": by_optimizer_step}


def remembered(sync: GradientSync) -> dict[str, Tensor]:
    """All that is saved of its memory, as copies."""
    return {
        f"{slot.name} {label}": tensor.clone()
        for slot, tensors in engine_of(sync).memory.slots.items()
        for label, tensor in tensors.items()
        if slot.is_saved
    }


def are_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def train_until_lost(
    setting: crash.Setting, front: str, algorithm: Algorithm, fault: Fault
) -> SimpleNamespace:
    setting.join_group()
    sync, step_with = FRONTS[front](algorithm)
    error: BaseException | None = None
    with faults(sync, [fault]):
        for step in range(AT + 2):
            before, threads_before, start = remembered(sync), crash.threads(), time.monotonic()
            try:
                step_with(step)
            except (CommunicationError, InjectedError) as raised:
                error = raised
                break
    seconds, after = time.monotonic() - start, remembered(sync)
    error_norm = engine_of(sync).error_norm()
    dist.destroy_process_group()
    return SimpleNamespace(
        error=type(error).__name__,
        words=str(error),
        cause=type(error.__cause__).__name__ if error is not None else "",
        seconds=seconds,
        steps=sync.steps,
        memory_is_as_before=are_same(before, after),
        error_norm=error_norm,
        threads_left=crash.threads() - threads_before,
        children_left=len(crash.children()),
    )


POWER = PowerSGD(matrix_rank=2)
CASES: list[tuple[str, Algorithm, Fault]] = [
    ("hook", POWER, fail_at(LOST, AT, "kill")),
    ("hook", POWER, fail_at(LOST, AT, "kill", after_messages=1)),
    ("hook", POWER, fail_at(LOST, AT, "kill", after_messages=2)),
    ("hook", AllReduce(), fail_at(LOST, AT, "kill", after_messages=1)),
    ("hook", PowerSGD(matrix_rank=2, alternating=True), fail_at(LOST, AT, "kill")),
    ("hook", POWER, fail_at(LOST, AT, "raise", after_messages=2)),
    ("hook", POWER, fail_at(LOST, AT, "stall", seconds=3 * TIMEOUT_SECONDS)),
    ("optimizer_step", POWER, fail_at(LOST, AT, "kill")),
    ("optimizer_step", POWER, fail_at(LOST, AT, "stall", after_messages=1, seconds=3 * TIMEOUT_SECONDS)),
]


@pytest.mark.parametrize(
    ("front", "algorithm", "fault"),
    CASES,
    ids=[f"{front}-{type(a).__name__}-{f.kind}-after-{f.after_messages}" for front, a, f in CASES],
)
def test_the_others_are_told_where_and_keep_their_memory(
    front: str, algorithm: Algorithm, fault: Fault
) -> None:
    # Who dies is missed at once.
    timeout: dict[str, Any] = {"timeout_seconds": TIMEOUT_SECONDS} if fault.kind == "stall" else {}
    ended = crash.run(train_until_lost, front, algorithm, fault, **timeout)
    assert len(ended) == 3
    for process, each in enumerate(ended):
        if process == LOST and fault.kind == "kill":
            assert each == crash.Ended(None, -9)
            continue
        told = each.told
        assert each.exit_code == 0, told
        if process == LOST and fault.kind == "raise":
            assert told.error == "InjectedError"
        else:
            assert told.error == "CommunicationError"
            assert told.words.startswith(f"step {AT}, ")
            assert "round" in told.words or "used" in told.words
            assert "the average of" in told.words
            assert told.cause == "RuntimeError"
            waited = fault.seconds if process == LOST and fault.seconds else 0.0
            assert told.seconds < waited + TIMEOUT_SECONDS + BUSY_SECONDS
        assert told.steps == AT
        assert told.memory_is_as_before
        assert (told.error_norm > 0) == isinstance(algorithm, PowerSGD)
        assert told.threads_left <= 0
        assert told.children_left == 0


@pytest.mark.parametrize("algorithm", [POWER, Quantize(bits=4, error_feedback=True), AllReduce()], ids=str)
def test_on_machines_of_several_processes_all_are_told(algorithm: Algorithm) -> None:
    """Those too that never send to the one that is lost: neither its machine nor its place is theirs."""
    ended = crash.run(train_on_machines, algorithm, processes=4)
    assert [each.exit_code for each in ended] == [0, -9, 0, 0]
    for told in (each.told for each in ended if each.exit_code == 0):
        where, words, steps, memory_is_as_before, error_norm = told
        assert words.startswith(f"step {AT}, ")
        assert (where, steps, memory_is_as_before) == ("2 machines of 2 processes", AT, True)
        assert (error_norm > 0) == algorithm.remembers


def train_on_machines(setting: crash.Setting, algorithm: Algorithm) -> tuple[str, str, int, bool, float]:
    setting.join_group()
    # Four layers, so that each process of a machine has a matrix of each bucket.
    model = DistributedDataParallel(nn.Sequential(new_model(), new_model()), bucket_cap_mb=0.03)
    sync = thinwire.attach(model, algorithm, machines=[[0, 1], [2, 3]])
    train(lambda step: backward(model, step), AT)
    before = remembered(sync)
    if setting.process_rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError) as raised:
        backward(model, AT)
    same = are_same(before, remembered(sync))
    where = "2 machines of 2 processes" if "2 machines of 2 processes" in str(sync) else str(sync)
    return where, str(raised.value), sync.steps, same, engine_of(sync).error_norm()


def test_a_peer_that_is_only_slow_changes_nothing() -> None:
    slow = [fail_at(0, 1, "slow", seconds=0.4), fail_at(2, 2, "stall", after_messages=1, seconds=0.4)]
    disturbed = crash.run(train_slowly, slow)
    undisturbed = crash.run(train_slowly, [])
    for (struck, memory, checksum), (_, other, other_checksum) in zip(
        (each.told for each in disturbed), (each.told for each in undisturbed), strict=True
    ):
        assert memory > 0
        assert (memory, checksum) == (other, other_checksum)
        assert struck <= 1
    assert [each.told[0] for each in disturbed] == [1, 0, 1]


def train_slowly(setting: crash.Setting, schedule: list[Fault]) -> tuple[int, float, str]:
    setting.join_group()
    sync, step_with = by_hook(POWER)
    with faults(sync, schedule) as struck:
        train(step_with, 4)
    state = sync.state_dict()
    dist.destroy_process_group()
    return len(struck), sum(float(residual.norm()) for _, residual in state["error"]), state["checksum"]


# Saving is collective.


def save_on_one(setting: crash.Setting, meanwhile: str) -> tuple[str, str, float, list[str], bool]:
    agreement.PATIENCE_SECONDS = 0.5
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    setting.join_group()
    sync, step_with = by_hook(POWER)
    train(step_with, 3)
    before = remembered(sync)
    start, error = time.monotonic(), None
    try:
        if setting.process_rank == 0:
            sync.state_dict()
        elif meanwhile == "they train":
            step_with(3)
        elif meanwhile == "they wait":
            time.sleep(2 * setting.timeout_seconds)
    except CommunicationError as raised:
        error = raised
    seconds = time.monotonic() - start
    return type(error).__name__, str(error), seconds, warned, are_same(before, remembered(sync))


@pytest.mark.parametrize("meanwhile", ["they train", "they wait", "they end"])
def test_saving_on_one_process_only_ends_in_words(meanwhile: str) -> None:
    ended = crash.run(save_on_one, meanwhile, timeout_seconds=TIMEOUT_SECONDS)
    for process, each in enumerate(ended):
        kind, words, seconds, warned, same = each.told
        assert same
        assert seconds < TIMEOUT_SECONDS + BUSY_SECONDS
        if process == 0:
            assert kind == "CommunicationError"
            assert words.startswith("state_dict() after 3 steps: the comparison of what")
            assert "must be made on every process" in words
            if meanwhile != "they end":
                assert any("process 0 has waited 0.5 s for the others" in line for line in warned)
        else:
            assert kind == ("CommunicationError" if meanwhile == "they train" else "NoneType")


def use_on_one(setting: crash.Setting) -> str:
    setting.join_group()
    sync, step_with = by_hook(POWER)
    train(step_with, 3)
    if setting.process_rank == 0:
        sync.use(AllReduce())
    with pytest.raises(CommunicationError) as raised:
        step_with(3)
    return str(raised.value)


def test_switching_on_one_process_only_ends_in_words() -> None:
    for each in crash.run(use_on_one, timeout_seconds=TIMEOUT_SECONDS):
        assert each.told.startswith("step 3")
        assert "use, state_dict, load_state_dict" in each.told


def test_hooks_without_state_tell_it_too() -> None:
    """DDP waits for their futures, so the error is torch's; the words are ours."""
    ended: list[Any] = crash.run(stateless_until_killed)
    assert ended[LOST].exit_code == -9
    for each in (ended[0], ended[2]):
        assert "a bucket of" in each.told
        assert "the average of" in each.told


def stateless_until_killed(setting: crash.Setting) -> str:
    setting.join_group()
    model = DistributedDataParallel(new_model())
    model.register_comm_hook(None, thinwire.hooks.fp16_compress_hook)
    train(lambda step: backward(model, step), 3)
    if setting.process_rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        backward(model, 3)
    return str(raised.value)
