"""A group whose members are threads of one process that take turns: no sockets, no waiting, no races."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import torch

from thinwire.comm.transport import CombinedWork, Message, Transport, Work
from thinwire.errors import CommunicationError

Result = TypeVar("Result")

_current = threading.local()  # `member`: whose thread this is


def run_members(size: int, body: Callable[[int], Result]) -> list[Result]:
    """Run `body(rank)` for each member of a group in this process; return the results by rank.

    One member runs at a time, in rank order, until it ends or waits for something that others have not sent
    yet. So runs are deterministic. If members wait for each other forever, or for one that has ended, they
    get a `CommunicationError`; at Ctrl-C all get `KeyboardInterrupt`, at their current or next wait. The
    first error of a member is raised after all have ended. Members run on threads that are used again: what a
    body sets for its thread, such as torch's default device, stays set.

    Examples:
        >>> members = InProcessTransport.group(2)
        >>> def body(rank):
        ...     tensor = torch.tensor([4.0 * rank])
        ...     members[rank].mean(tensor, "an example").wait()
        ...     return tensor.item()
        >>> run_members(2, body)
        [2.0, 2.0]
    """
    if size == 1:
        return [body(0)]
    members = [_Member(partial(body, rank)) for rank in range(size)]
    errors: list[BaseException] = []
    running = members
    try:
        while running:
            ready = [member for member in running if member.awaited is None or member.awaited.is_complete]
            if not ready:  # waiting members raise an error, and end
                for member in running:
                    member.is_stuck = True
            for member in ready or running:
                member.run_until_it_waits()
                # The others continue: those that wait for this member get stuck, and end as well.
                errors += [] if member.error is None else [member.error]
            running = [member for member in running if not member.has_ended]
    except BaseException:
        # A signal reaches only this thread. The interpreter's end aborts if another is still inside torch.
        for member in members:
            member.interrupt()
        raise
    if errors:
        raise errors[0]
    return [member.results[0] for member in members]


class Awaited(Protocol):
    """Something that a member waits for while the others run."""

    @property
    def is_complete(self) -> bool: ...

    def who_is_missing(self) -> str: ...  # for errors


def wait_for(awaited: Awaited) -> None:
    """Let the other members run until `awaited` is complete."""
    member: _Member[object] | None = getattr(_current, "member", None)
    if member is not None:
        member.wait_for(awaited)
    elif not awaited.is_complete:
        raise CommunicationError(f"{awaited.who_is_missing()}, inside run_members(size, body)")


class _Member(Generic[Result]):
    """A thread that runs while `run_members` waits, and waits while others run."""

    def __init__(self, body: Callable[[], Result]) -> None:
        self.results: list[Result] = []
        self.error: BaseException | None = None
        self.awaited: Awaited | None = None
        self.has_ended = self.is_stuck = self._is_interrupted = False
        self._go, self._stopped = SimpleQueue[None](), SimpleQueue[None]()
        self._body = body
        # Each thread has its own: the grad mode, and how many threads work on a matrix product.
        self._grad_enabled, self._num_threads = torch.is_grad_enabled(), torch.get_num_threads()
        self._thread = _idle.pop() if _idle else _Thread()
        self._thread.tasks.put(self._run)

    def _run(self) -> None:
        self._go.get()
        _current.member = self
        torch.set_num_threads(self._num_threads)
        try:
            with torch.set_grad_enabled(self._grad_enabled):
                if not self._is_interrupted:
                    self.results.append(self._body())
        except BaseException as error:  # a thread that ends silently would leave all others waiting
            self.error = error
        del _current.member
        self.has_ended = True
        self._stopped.put(None)

    def run_until_it_waits(self) -> None:
        self._go.put(None)
        self._stopped.get()
        if self.has_ended:
            _idle.append(self._thread)

    def wait_for(self, awaited: Awaited) -> None:
        """Let the others run until `awaited` is complete; called on the member's thread."""
        while self._is_interrupted or not awaited.is_complete:
            if self._is_interrupted:
                raise KeyboardInterrupt
            if self.is_stuck:
                # All wait, so nothing arrives. Only this wait fails: elastic members may go on without one.
                self.is_stuck = False
                raise CommunicationError(awaited.who_is_missing())
            self.awaited = awaited
            self._stopped.put(None)
            self._go.get()
            self.awaited = None
        self.is_stuck = False

    def interrupt(self) -> None:
        """Raise `KeyboardInterrupt` at its current or next wait, and return when it has ended."""
        self._is_interrupted = True
        while not self.has_ended:
            self.run_until_it_waits()


class _Thread:
    """Runs one member after another: to start a thread takes as long as a small step."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # A daemon thread: if a member hangs in its own code, the process can still end.
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.tasks.get()()


_idle: list[_Thread] = []
if hasattr(os, "register_at_fork"):  # POSIX
    os.register_at_fork(after_in_child=_idle.clear)  # a forked process has no threads


@dataclass
class _SharedGroup:
    """A group's collectives in flight, by number, in message order."""

    size: int
    messages: dict[int, _Collective] = field(default_factory=dict)
    is_broken: bool = False  # what has not arrived will not
    is_over: bool = False  # some members have sent more than others: a later run would mix up their messages


@dataclass
class _Collective:
    """A collective with each rank's tensor, until all have arrived and all ranks have their result."""

    shared: _SharedGroup
    number: int
    purpose: str
    kind: object  # the same on all members
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    taken_by: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return self.shared.is_broken or len(self.tensors) == self.shared.size

    def who_is_missing(self) -> str:
        size, there = self.shared.size, sorted(self.tensors)
        missing = sorted({*range(size)} - self.tensors.keys())
        return (
            f"{self.purpose}: members {missing} of {size} have not sent message {self.number}, for which "
            f"members {there} wait. Make the same calls on every member"
        )


class InProcessTransport(Transport):
    """One member's end of a group that lives in this process; see `InProcessTransport.group`.

    A group of one serves a process that has no process group. If there are more, `run_members` runs them.
    """

    def __init__(self, shared: _SharedGroup, rank: int) -> None:
        self._shared = shared
        self.size, self.rank = shared.size, rank
        self._num_sent = 0

    @classmethod
    def group(cls, size: int) -> list[InProcessTransport]:
        """Return the ends of a new group, by rank."""
        shared = _SharedGroup(size)
        return [cls(shared, rank) for rank in range(size)]

    def abort(self) -> None:
        """Abort the collectives in flight for all members: missing tensors will never arrive."""
        self._shared.is_broken = True

    def start(self, message: Message) -> Work:
        if self._shared.is_over:
            left = "an error, or Ctrl-C, has ended this group in the middle of a message; make a new group"
            raise CommunicationError(f"{message.purpose}: {left}")
        tensor = message.tensor
        kind = (message.collective, message.operation, message.source, tensor.shape, tensor.dtype)
        # Match by order alone, as backends do; but raise if collectives differ, where backends would hang.
        self._num_sent += 1
        new = _Collective(self._shared, self._num_sent, message.purpose, kind)
        pending = self._shared.messages.setdefault(self._num_sent, new)
        if pending.kind != kind:
            raise CommunicationError(
                f"{message.purpose}: message {pending.number} differs between members: member {self.rank} "
                f"sends {kind}, members {sorted(pending.tensors)} {pending.kind}. Make the same calls on "
                "every member"
            )
        # A copy: the tensor may be overwritten before the last member reads it.
        copied = tensor.clone()
        # Divide before the sum: in half precision the sum can overflow even if the mean does not.
        pending.tensors[self.rank] = copied.div_(self.size) if message.operation == "mean" else copied
        return CombinedWork(partial(self._wait, pending, message))

    def _wait(self, pending: _Collective, message: Message) -> None:
        # A second wait does nothing, as with real backends: the output may have changed since.
        if self.rank in pending.taken_by:
            return
        try:
            wait_for(pending)
        except (CommunicationError, KeyboardInterrupt):
            self._shared.is_over = True
            raise
        if len(pending.tensors) < self.size:
            ended = "another member aborted this message; make a new group"
            raise CommunicationError(f"{pending.purpose}: {ended}")
        write_result(message, [pending.tensors[rank] for rank in range(self.size)], self.rank)
        pending.taken_by.add(self.rank)
        # The last member removes it; until then, others still read from it.
        if len(pending.taken_by) == self.size:
            del self._shared.messages[pending.number]


def write_result(message: Message, tensors: list[torch.Tensor], rank: int) -> None:
    """Write the result of a message's collective, over all ranks' tensors, to its output."""
    if message.collective == "all_gather":
        torch.stack(tensors, out=message.output)
    elif message.collective == "all_to_all":
        torch.stack([rows[rank] for rows in tensors], out=message.output)
    elif message.collective == "broadcast":
        message.output.copy_(tensors[message.source])
    else:
        # In rank order: the same bits on all.
        total = tensors[0].clone()
        for other in tensors[1:]:
            total = torch.maximum(total, other) if message.operation == "max" else total + other
        message.output.copy_(total)
