"""Faults on a schedule, and the transport that injects them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch

from thinwire.checks import number, whole_number
from thinwire.comm import InProcessTransport, Message, Transport, Work
from thinwire.comm.metered import Wrapped
from thinwire.errors import ConfigError
from thinwire.sync import Engine, GradientSync, Synced, engine_of

__all__ = ["Fault", "InjectedError", "Kind", "Synced", "fail_at", "faults"]

Kind = Literal["non-finite", "kill", "stall", "raise", "slow"]
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"


class InjectedError(RuntimeError):
    """Raised by a fault of kind "raise", as if by the user's own code; not one of Thinwire's errors."""


@dataclass(frozen=True)
class Fault:
    """A fault of one process in one step.

    Args:
        process: Its rank in the group (for simulated workers, the worker's number).
        step: The `GradientSync`'s step, from 0, counting steps that were not finite or before a resume.
        kind: "non-finite" puts an infinity into the message, as an overflow in the gradients does. "slow"
            waits for `seconds`. "stall" stops the process (SIGSTOP), for `seconds` or forever. "kill" ends
            it immediately (SIGKILL). "raise" raises `InjectedError`.
        after_messages: How many messages the step sends before the fault. 0 is in the backward pass, before
            anything is sent; the number of buckets is between the first round and the second.
        seconds: The duration of "slow" and "stall".
        restart: The restart of a `torchrun` job in which it strikes, None for all: a fault that causes a
            restart should not strike again when the step is repeated.

    Raises:
        ConfigError: A setting is of the wrong type or out of range.
    """

    process: int
    step: int
    kind: Kind
    _: KW_ONLY
    after_messages: int = 0
    seconds: float | None = None
    restart: int | None = 0

    def __post_init__(self) -> None:
        for name in ("process", "step", "after_messages"):
            whole_number(name, getattr(self, name), minimum=0)
        whole_number("restart", self.restart or 0, minimum=0)
        kind, seconds = self.kind, self.seconds
        if kind not in get_args(Kind):
            raise ConfigError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
        if seconds is not None:
            number("seconds", seconds, minimum=0)
        if (kind == "slow" and seconds is None) or (kind not in ("slow", "stall") and seconds is not None):
            raise ConfigError(f"'slow' needs seconds, and 'stall' takes them, got {seconds} for {kind!r}")


fail_at = Fault  # reads better in a schedule


@contextmanager
def faults(target: GradientSync | Synced, schedule: Iterable[Fault]) -> Iterator[list[Fault]]:
    """Inject this process's faults inside the context.

    Args:
        target: A `GradientSync`, or an object that has one (a `PowerSGDState` after its first step, an
            integration's strategy, handler or callback after training began). For `LocalSGD`, a step is an
            averaging with its algorithm; warm-up and subgroup averagings are not reached.
        schedule: The faults of all processes.

    Yields:
        The faults that have struck on this process so far. A test should check that they did.

    Raises:
        ConfigError: `schedule` has something else than faults, or a process outside the group, or a fault
            that would end the process of all simulated workers.
        AttachError: `target` is not attached yet.
    """
    engine = engine_of(target)
    restart = int(os.environ.get(RESTART_COUNT, "0"))
    own, before = [], engine.wire  # may already be faulty, due to an outer context
    for fault in schedule:
        if not isinstance(fault, Fault):
            raise ConfigError(f"expected faults made by fail_at(…), got {fault!r}")
        if fault.process >= before.size:
            raise ConfigError(
                f"process must be below {before.size}, the number of processes, got {fault.process}"
            )
        if isinstance(engine.transport, InProcessTransport) and fault.kind in ("kill", "stall"):
            raise ConfigError(f"simulated workers share one process: {fault.kind!r} would hit all of them")
        if fault.process == before.rank and fault.restart in (None, restart):
            own.append(fault)
    # The wire carries only steps. Agreement and saving use `engine.transport`, without faults: so a schedule
    # counts the same messages with and without a resume.
    faulty = _FaultyTransport(before, engine, own)
    engine.wire = faulty
    try:
        yield faulty.struck
    finally:
        # Also if a fault has raised: later steps are healthy.
        engine.wire = before


class _FaultyTransport(Wrapped):
    """Wraps a transport, with faults before its messages."""

    def __init__(self, transport: Transport, engine: Engine, schedule: Sequence[Fault]) -> None:
        super().__init__(transport)
        self.struck: list[Fault] = []
        self._engine = engine
        self._waiting = list(schedule)
        self._step, self._messages = -1, 0

    def start(self, message: Message) -> Work:
        # The first message of a new step.
        if self._engine.steps != self._step:
            self._step, self._messages = self._engine.steps, 0
        due = [f for f in self._waiting if (f.step, f.after_messages) == (self._step, self._messages)]
        # Before the fault strikes: it may raise or end the process, and the failed step may be repeated.
        self._messages += 1
        for fault in due:
            self._waiting.remove(fault)
            if fault.kind == "non-finite" and not message.tensor.is_floating_point():
                raise ConfigError(
                    f"message {fault.after_messages} of step {fault.step} is of {message.tensor.dtype}, "
                    "which is always finite; schedule the fault after a different number of messages"
                )
            self.struck.append(fault)
            _strike(fault, message.tensor)
        return super().start(message)


def _strike(fault: Fault, message: torch.Tensor) -> None:
    if fault.kind == "non-finite":
        # A slice, not an index: a message may be empty.
        message.view(-1)[:1] = torch.inf
    elif fault.kind == "slow":
        time.sleep(fault.seconds or 0.0)
    elif fault.kind == "stall":
        _stall(fault.seconds)
    elif fault.kind == "kill":
        # Unlike `sys.exit`, this cleans up nothing, as when a machine loses power.
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise InjectedError(f"process {fault.process} raises in step {fault.step}, as scheduled")


def _stall(seconds: float | None) -> None:
    # SIGSTOP stops every thread of this process, so a shell must wake it.
    waker = None
    if seconds is not None:
        # Repeatedly: the first signal could arrive before the stop.
        wake = f"sleep {seconds}; while kill -CONT {os.getpid()}; do sleep 0.1; done"
        waker = subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)
    # Kill the shell: it runs until then, and another process may get this one's id.
    if waker is not None:
        waker.kill()
        waker.wait()
