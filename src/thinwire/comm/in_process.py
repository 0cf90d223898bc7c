"""A group whose members live in one process, as threads that take turns: no sockets, no waiting, no races."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from thinwire.comm.transport import Message, Transport, Work
from thinwire.errors import CommunicationError

Result = TypeVar("Result")

LOOK_EVERY_SECONDS = 0.05

_current = threading.local()  # of a member's thread: its turn


def run_members(size: int, body: Callable[[int], Result]) -> list[Result]:
    """Run `body(rank)` for each member of a group in this process, one at a time, in the order of ranks.

    A member runs until it ends or waits for what others have not sent yet. Ctrl-C ends all of them, as it
    would end this thread: by `KeyboardInterrupt`, raised where they run or wait.

    Args:
        size: Members of the group.
        body: What each of them does, with the `InProcessTransport` of its rank.

    Returns:
        What `body` returned, by rank.

    Raises:
        CommunicationError: The members wait for each other forever.
        BaseException: The first that a member has raised, once all have ended. Those that wait for a member
            that has ended raise `CommunicationError`.

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
    # Threads, since the body is any blocking code; but one runs at a time, and always the same one next, so
    # every run is the same run, whatever the machine does.
    turns = [_Turn(rank, body) for rank in range(size)]
    errors: list[BaseException] = []
    running = turns
    try:
        while running:
            ready = [turn for turn in running if turn.is_ready()]
            if not ready:  # those who wait learn why, and end
                for turn in running:
                    turn.is_stuck = True
            for turn in ready or running:
                turn.go_on()
                # The others go on: what waits for this member ends, too, stuck.
                errors += [] if turn.error is None else [turn.error]
            running = [turn for turn in running if not turn.has_ended]
    except BaseException:
        # A signal reaches this thread alone. Members that ran on would meet the end of the interpreter, which
        # aborts where a thread is in torch.
        for turn in turns:
            turn.interrupt()
        raise
    if errors:
        raise errors[0]
    return [turn.result[0] for turn in turns]


class Awaited(Protocol):
    """An event that a member waits for while the others run."""

    @property
    def is_complete(self) -> bool:
        """Whether it can go on."""

    def who_is_missing(self) -> str:
        """Return for whom it waits, for errors."""


def wait_for(awaited: Awaited) -> None:
    """Let the other members run until something has come about."""
    turn: _Turn[object] | None = getattr(_current, "turn", None)
    if turn is not None:
        turn.wait_for(awaited)
    elif not awaited.is_complete:
        raise CommunicationError(f"{awaited.who_is_missing()}, inside run_members(size, body)")


class _Turn(Generic[Result]):
    """A member's thread, which runs only while the others stand still."""

    def __init__(self, rank: int, body: Callable[[int], Result]) -> None:
        self.result: list[Result] = []
        self.error: BaseException | None = None
        self.has_ended = self.is_stuck = self._is_interrupted = False
        self._awaited: Awaited | None = None
        # Handed to and fro: the thread runs between `_go` and `_stopped`, and `run_members` waits meanwhile.
        # Locks, which any thread may release: Python's semaphores take twice as long.
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        # A daemon: if one member hangs for good in its own code, the process can still end.
        self._thread = threading.Thread(target=self._run, args=(rank, body), daemon=True)
        # Each thread has its own grad mode, on by default; the body must run with the caller's.
        self._grad_enabled = torch.is_grad_enabled()

    def _run(self, rank: int, body: Callable[[int], Result]) -> None:
        _current.turn = self
        try:
            with torch.set_grad_enabled(self._grad_enabled):
                self.result.append(body(rank))
        # Whatever it is: a thread that ended without a word would leave `run_members` waiting forever.
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self._stop()

    def is_ready(self) -> bool:
        return self._awaited is None or self._awaited.is_complete

    def go_on(self) -> None:
        """Let it run until it waits or ends."""
        if self._awaited is None:
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()
        if self.has_ended:
            self._thread.join()

    def interrupt(self) -> None:
        """End it by `KeyboardInterrupt`, and return when it has ended."""
        self._is_interrupted = True
        if self._thread.ident is None or not self._thread.is_alive():
            return
        # A running thread gets the exception at its next line; a waiting one checks the flag.
        if self._awaited is None:
            number = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt))
        while self._thread.is_alive():
            # In each look: it may have been on its way to wait.
            if self._awaited is not None and self._go.locked():
                self._go.release()
            self._thread.join(LOOK_EVERY_SECONDS)

    def _stop(self) -> None:
        # No one waits for a member that was interrupted.
        if not self._is_interrupted:
            self._stopped.release()

    def wait_for(self, awaited: Awaited) -> None:
        """Let the others run, on the member's thread, until something has come about."""
        while not awaited.is_complete:
            if self._is_interrupted:
                raise KeyboardInterrupt
            if self.is_stuck:
                # Set by the scheduler when all remaining members wait: nothing can arrive any more. Reset for
                # this wait only: if members come and go, the others continue.
                self.is_stuck = False
                raise CommunicationError(awaited.who_is_missing())
            self._awaited = awaited
            self._stop()
            self._go.acquire()
            self._awaited = None
        self.is_stuck = False


@dataclass
class _Room:
    """The collectives under way in a group, by their place in the order."""

    size: int
    meetings: dict[int, _Meeting] = field(default_factory=dict)
    is_broken: bool = False


@dataclass
class _Meeting:
    """One collective: what each member has brought, until all have come and taken what is theirs."""

    room: _Room
    place: int
    purpose: str
    kind: object  # the same on all members
    brought: dict[int, torch.Tensor] = field(default_factory=dict)
    num_taken: int = 0

    @property
    def is_complete(self) -> bool:
        return self.room.is_broken or len(self.brought) == self.room.size

    def who_is_missing(self) -> str:
        size, there = self.room.size, sorted(self.brought)
        missing = sorted({*range(size)} - self.brought.keys())
        return (
            f"{self.purpose}: members {missing} of {size} have not sent message {self.place}, for which "
            f"members {there} wait. Make the same calls on every member"
        )


class InProcessTransport(Transport):
    """One member's end of a group that lives in this process; see `InProcessTransport.group`.

    A group of one serves a process that has no process group. If there are more, `run_members` runs them.
    """

    def __init__(self, room: _Room, rank: int) -> None:
        self._room = room
        self.size, self.rank = room.size, rank
        self._place = 0  # of the latest message in the order

    @classmethod
    def group(cls, size: int) -> list[InProcessTransport]:
        """Return the ends of a new group, by rank."""
        room = _Room(size)
        return [cls(room, rank) for rank in range(size)]

    def abort(self) -> None:
        """Break off what is under way, for all members: what has not arrived never will."""
        self._room.is_broken = True

    def start(self, message: Message) -> Work:
        tensor = message.tensor
        kind = (message.collective, message.operation, message.source, tensor.shape, tensor.dtype)
        # Matched by order alone, as backends do it; but what differs is refused here; they would hang.
        self._place += 1
        new = _Meeting(self._room, self._place, message.purpose, kind)
        meeting = self._room.meetings.setdefault(self._place, new)
        if meeting.kind != kind:
            raise CommunicationError(
                f"{message.purpose}: message {self._place} differs between members: member {self.rank} sends "
                f"{kind}, members {sorted(meeting.brought)} send {meeting.kind}. Make the same calls on "
                "every member"
            )
        # A copy: it may be overwritten before the last member has come to read it.
        copied = tensor.clone()
        # Before the sum: in half precision the sum can overflow although the mean does not.
        meeting.brought[self.rank] = copied.div_(self.size) if message.operation == "mean" else copied
        return _InProcessWork(meeting, message, self.rank)


@dataclass
class _InProcessWork:
    meeting: _Meeting
    message: Message
    rank: int
    is_taken: bool = False

    def wait(self) -> None:
        # Waiting twice gives the same, as with real backends; the tensor may have changed since.
        if self.is_taken:
            return
        meeting, size = self.meeting, self.meeting.room.size
        wait_for(meeting)
        if len(meeting.brought) < size:
            raise CommunicationError(f"{meeting.purpose}: a different member has broken it off")
        self.is_taken = True
        self._take([meeting.brought[rank] for rank in range(size)])
        meeting.num_taken += 1
        # The last member removes the meeting; until then others still read from it.
        if meeting.num_taken == size:
            del meeting.room.meetings[meeting.place]

    def _take(self, brought: list[torch.Tensor]) -> None:
        output, message = self.message.output, self.message
        if message.collective == "all_gather":
            torch.stack(brought, out=output)
        elif message.collective == "all_to_all":
            torch.stack([rows[self.rank] for rows in brought], out=output)
        elif message.collective == "broadcast":
            output.copy_(brought[message.source])
        else:
            # Each member sums by itself, in the order of ranks: the same bits on all.
            total = brought[0].clone()
            for other in brought[1:]:
                total = torch.maximum(total, other) if message.operation == "max" else total + other
            output.copy_(total)
