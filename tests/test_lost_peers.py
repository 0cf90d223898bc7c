"""A peer that dies, stalls or raises: the others are told where, in time, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import Setting, run_fresh
from thinwire import AllReduce, CommunicationError, GradientSync, PowerSGD, StepError
from thinwire import powersgd as epfl
from thinwire.algorithms import Algorithm
from thinwire.comm import agreement
from thinwire.sync import engine_of
from thinwire.sync.state import digest_of
from thinwire.testing import Fault, InjectedError, fail_at, faults
from training import batch_of, new_model

TIMEOUT_SECONDS = 2.0
BUSY_SECONDS = 20.0  # by which a busy machine may be late; without a timeout it would be for ever
LOST = 1  # the process that is lost
AT = 4  # the step in which it is


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    torch.autograd.backward(model(batch_of(step)).square().mean())


def by_hook(algorithm: Algorithm, trained: int = 0) -> tuple[GradientSync, Callable[[int], None]]:
    """DDP with several buckets, after some steps; a step."""
    model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005)
    sync = thinwire.attach(model, algorithm)
    for step in range(trained):
        backward(model, step)
    return sync, lambda step: backward(model, step)


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


def remembered(sync: GradientSync) -> dict[str, Tensor]:
    """All that is saved of its memory, as copies."""
    return {
        f"{slot.name} {label}": tensor.clone()
        for slot, tensors in engine_of(sync).state.memory.slots.items()
        for label, tensor in tensors.items()
        if slot.is_saved
    }


def are_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def num_threads() -> int:
    """Count threads of this process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def train_until_lost(setting: Setting, algorithm: Algorithm, fault: Fault) -> None:
    setting.join_group()
    sync, step_with = by_hook(algorithm)
    is_struck = setting.process_rank == LOST
    kind = InjectedError if is_struck and fault.kind == "raise" else CommunicationError
    with faults(sync, [fault]):
        for step in range(AT):
            step_with(step)
        before, threads_before, start = remembered(sync), num_threads(), time.monotonic()
        with pytest.raises(kind) as raised:
            step_with(AT)
    with pytest.raises(StepError, match=f"the last backward pass was ended by a {kind.__name__}"):
        step_with(AT)
    waited = fault.seconds if is_struck and fault.seconds else 0.0
    assert time.monotonic() - start < waited + TIMEOUT_SECONDS + BUSY_SECONDS
    if kind is CommunicationError:
        words = str(raised.value)
        assert words.startswith(f"step {AT}, "), words
        assert "round" in words or "used" in words, words
        assert "the average of" in words, words
        assert type(raised.value.__cause__) is RuntimeError
    assert sync.steps == AT
    assert are_same(before, remembered(sync))
    assert (engine_of(sync).state.error_norm() > 0) == isinstance(algorithm, PowerSGD)
    dist.destroy_process_group()
    assert num_threads() <= threads_before
    assert not Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()


POWER = PowerSGD(matrix_rank=2)
CASES: list[tuple[Algorithm, Fault]] = [
    (POWER, fail_at(LOST, AT, "kill", after_messages=2)),
    (AllReduce(), fail_at(LOST, AT, "kill", after_messages=1)),
    (POWER, fail_at(LOST, AT, "raise", after_messages=2)),
    (POWER, fail_at(LOST, AT, "stall", seconds=3 * TIMEOUT_SECONDS)),
]


@pytest.mark.parametrize(
    ("algorithm", "fault"),
    CASES,
    ids=[f"{type(a).__name__}-{f.kind}-after-{f.after_messages}" for a, f in CASES],
)
def test_the_others_are_told_where_and_keep_their_memory(algorithm: Algorithm, fault: Fault) -> None:
    # Who dies is missed at once.
    timeout: dict[str, Any] = {"timeout_seconds": TIMEOUT_SECONDS} if fault.kind == "stall" else {}
    ended = run_fresh(train_until_lost, algorithm, fault, **timeout)
    assert [each.exit_code for each in ended] == [0, -9 if fault.kind == "kill" else 0, 0], ended


def test_on_machines_of_several_processes_all_are_told() -> None:
    """Those too that never send to the one that is lost: neither its machine nor its local rank is theirs."""
    ended = run_fresh(train_on_machines, processes=4)
    assert [each.exit_code for each in ended] == [0, -9, 0, 0], ended


def train_on_machines(setting: Setting) -> None:
    setting.join_group()
    # Each process of a machine has a matrix of each bucket.
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(8)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    sync = thinwire.attach(model, POWER, machines=[[0, 1], [2, 3]])
    for step in range(AT):
        backward(model, step)
    before = remembered(sync)
    if setting.process_rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError, match=f"^step {AT}, "):
        backward(model, AT)
    assert "2 machines of 2 processes" in str(sync)
    assert sync.steps == AT
    assert are_same(before, remembered(sync))
    assert engine_of(sync).state.error_norm() > 0


def test_a_peer_that_is_only_slow_changes_nothing() -> None:
    slow = [fail_at(0, 1, "slow", seconds=0.4), fail_at(2, 2, "stall", after_messages=1, seconds=0.4)]
    disturbed, undisturbed = ([each.told for each in run_fresh(train_slowly, given)] for given in (slow, []))
    assert [struck for struck, _ in disturbed] == [1, 0, 1]
    assert [state for _, state in disturbed] == [state for _, state in undisturbed]


def train_slowly(setting: Setting, schedule: list[Fault]) -> tuple[int, int]:
    setting.join_group()
    sync, step_with = by_hook(POWER)
    with faults(sync, schedule) as struck:
        for step in range(4):
            step_with(step)
    state = sync.state_dict()
    assert any(residual.norm() > 0 for _, residual in state["error"])
    dist.destroy_process_group()
    return len(struck), digest_of(state)


def test_batches_of_different_numbers_are_an_error_that_names_join() -> None:
    ended = run_fresh(train_a_step_longer, timeout_seconds=TIMEOUT_SECONDS)
    assert [each.exit_code for each in ended] == [0] * 3, ended


def train_a_step_longer(setting: Setting) -> None:
    setting.join_group()
    sync, step_with = by_hook(POWER, trained=2)
    if setting.process_rank == 0:
        with pytest.raises(CommunicationError, match=r"^step 2, .*thinwire\.join"):
            step_with(2)
        assert sync.steps == 2


# Saving is collective.


def save_on_one(setting: Setting, meanwhile: str) -> list[str]:
    agreement.PATIENCE_SECONDS = 0.5
    warned: list[str] = []
    agreement.logger.warning = warned.append  # type: ignore[assignment,method-assign]
    setting.join_group()
    sync, step_with = by_hook(POWER, trained=3)
    before, start = remembered(sync), time.monotonic()
    if meanwhile == "it has switched":
        if setting.process_rank == 0:
            sync.use(AllReduce())
        with pytest.raises(CommunicationError, match=r"^step 3.*use, state_dict"):
            step_with(3)
    elif setting.process_rank == 0:
        words = "^state_dict.. after 3 steps: the comparison of what"
        with pytest.raises(CommunicationError, match=words):
            sync.state_dict()
    elif meanwhile == "they train":
        with pytest.raises(CommunicationError):
            step_with(3)
    elif meanwhile == "they wait":
        time.sleep(2 * setting.timeout_seconds)
    assert time.monotonic() - start < TIMEOUT_SECONDS + BUSY_SECONDS
    assert are_same(before, remembered(sync))
    return warned


@pytest.mark.parametrize("meanwhile", ["they train", "they wait", "it has switched"])
def test_saving_or_switching_on_one_process_only_ends_in_words(meanwhile: str) -> None:
    ended = run_fresh(save_on_one, meanwhile, timeout_seconds=TIMEOUT_SECONDS)
    assert [each.exit_code for each in ended] == [0] * 3, ended
    has_waited = any("process 0 has waited 0.5 s for the others" in line for line in ended[0].told)
    assert has_waited or meanwhile == "it has switched"


def test_hooks_without_state_tell_it_too() -> None:
    """DDP waits for their futures, so the error is torch's; the words are ours."""
    ended = run_fresh(stateless_until_killed)
    assert [each.exit_code for each in ended] == [0, -9, 0], ended


def stateless_until_killed(setting: Setting) -> None:
    setting.join_group()
    model = DistributedDataParallel(new_model())
    model.register_comm_hook(None, thinwire.hooks.fp16_compress_hook)
    for step in range(3):
        backward(model, step)
    if setting.process_rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"the average of.*a bucket of|a bucket of.*the average of"):
        backward(model, 3)
