"""One step's exchange: carries the requests of its buckets, in rounds, up to the commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from thinwire.algorithms import (
    AllFinite,
    AllGather,
    AllToAll,
    Choices,
    Commit,
    Jointly,
    Mean,
    Message,
    Replanning,
    Request,
    Requests,
    ShardGather,
    ShardSum,
    all_finite,
)
from thinwire.algorithms.joining import as_one
from thinwire.channel import Transport, Work
from thinwire.errors import CommunicationError, ConfigError

__all__ = ["Exchange", "Task", "answered", "shown"]


class Task:
    """A generator of requests, standing at one.

    Args:
        requests: The generator; it is run to its first request.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.request: Request | tuple[Message, ...] | None = None
        self._is_committed = False
        self.answer(None)  # a generator that has not begun takes nothing else

    def answer(self, answer: Any) -> None:
        """Hand over the answer to its request; the next one follows.

        Raises:
            ConfigError: It has ended without a commit, or asks for a message behind it.
        """
        try:
            self.request = self._requests.send(answer)
        except StopIteration:
            self.request = None
            if self._is_committed:
                return
            # Without one it would have written its memory whether or not the step was healthy.
            raise ConfigError(
                "an exchange has ended without Commit, expected it as the last request; yield "
                "Commit(lambda: all_finite(…)) before memory is written"
            ) from None
        # A message behind the commit could fail where other buckets have written their memory already.
        if self._is_committed and not isinstance(self.request, Jointly):
            raise ConfigError(
                f"an exchange has asked for {self.request!r} behind its Commit, expected its end"
            )

    def commit(self, is_healthy: torch.Tensor | None = None) -> None:
        """Let it pass its commit; going on to its end is what writes memory.

        Args:
            is_healthy: One bool, if it is to see to itself that memory is written only where that is true.

        Raises:
            ConfigError: It asks for a message.
        """
        self._is_committed = True
        self.answer(is_healthy)

    def close(self) -> None:
        """Forget it; it writes nothing."""
        self._requests.close()


class _Ways(NamedTuple):
    """What carries messages: over the group, and between the shards of a replica."""

    group: Transport
    shards: Transport | None

    def of(self, kind: type) -> Transport:
        if kind not in (ShardSum, ShardGather):
            return self.group
        if self.shards is None:
            raise ConfigError(
                f"an exchange has asked for {kind.__name__} where no parameter is cut into shards; ask for "
                "it only of a bucket whose parameters have a cut"
            )
        return self.shards


@dataclass
class _Sent:
    """A message of one or several requests, under way."""

    work: Work
    message: torch.Tensor  # kept until it has come back: a backend may read it meanwhile
    parts: Callable[[], Sequence[torch.Tensor]]  # the answers, once it has come back


@dataclass
class _Round:
    """What some tasks have asked for together: their requests in the order of `tasks`, and the messages."""

    tasks: Sequence[Task]
    sent: Sequence[tuple[Sequence[tuple[int, int]], _Sent]]  # of each message: (task, place in its request)


class Exchange:
    """Drives the buckets of one step through their rounds.

    Every collective is issued by the thread that calls `start` and `advance`, in the order of buckets
    and then of rounds, which is the same on every member.

    Args:
        transport: Carries the messages.
        name: Of the step, for errors.
        shards: Joins the shards of a replica, None where each member has all parameters.
    """

    def __init__(self, transport: Transport, name: str, shards: Transport | None = None) -> None:
        self.tasks: list[Task] = []
        self._closing: list[Task] = []
        self._ways = _Ways(transport, shards)
        self._name = name
        self._rounds: list[_Round] = []
        self._previous: _Round | None = None
        self._joining: list[Task] = []
        self._number = 1

    # Backends match collectives by nothing but their order: members that disagree in it wait for ever, or
    # take one message for another. So one thread sends all, where the caller's code stands, which is the same
    # on every member; never when something has happened to arrive, which is not.

    def start(self, requests: Requests, name: str) -> None:
        """Run a bucket to its first message and send it, while the backward pass goes on.

        Args:
            requests: Of the bucket.
            name: Of the bucket, for errors.

        Raises:
            CommunicationError: The message could not be sent.
            ConfigError: The algorithm asks for something that there is not.
        """
        with shown("thinwire: round 1"):
            task = Task(requests)
            # Of this bucket alone: to wait for the others' would take the first message out of the backward
            # pass.
            _compute_jointly([task])
            self._rounds.append(_send([task], self._ways, f"{self._name}, round 1 of the bucket of {name}"))
        # Not before it is sent: of a bucket that was not, nothing is in flight.
        self.tasks.append(task)

    def advance_earlier(self) -> None:
        """Wait for what was sent up to the first message of the last bucket but one; send what comes next.

        To be called after each `start`, at the same buckets on all members. What was sent since then keeps
        the link busy meanwhile, and for longer than members are apart.

        Raises:
            CommunicationError: A collective failed.
            ConfigError: The algorithm asks for something that there is not.
        """
        # By what was started, and not by what has arrived: so all members send the same at the same buckets.
        previous, self._previous = self._previous, self._rounds[-1]
        if previous is None:
            return
        end = next(place for place, sent in enumerate(self._rounds, start=1) if sent is previous)
        earlier = self._rounds[:end]
        with shown("thinwire: wait for earlier buckets"):
            for each in earlier:
                for _, sent in each.sent:
                    sent.work.wait()
        with shown("thinwire: earlier buckets"):
            tasks = [task for each in earlier for task in each.tasks]
            for each in earlier:
                _answer(each)
            del self._rounds[:end]
            _compute_jointly(tasks)
            # Whose exchange has come to its commit stands there until all have.
            waiting = [task for task in tasks if not isinstance(task.request, Commit)]
            if waiting:
                purpose = f"{self._name}, a later round of the buckets before number {len(self.tasks)}"
                self._rounds.append(_send(waiting, self._ways, purpose))

    def close_with(self, requests: Requests) -> None:
        """Add requests that are no bucket's: the first travels with the buckets' second; they commit last."""
        task = Task(requests)
        self._joining.append(task)
        self._closing.append(task)

    def advance(self) -> bool:
        """Wait for the round under way and send the next one, of all buckets together; do not wait for that.

        To be called when all buckets have been started, at the same points on all members: what is sent in
        between by others must be in the same order everywhere.

        Returns:
            Whether there is a round under way. If not, all buckets stand at their commit.

        Raises:
            CommunicationError: A collective failed.
            ConfigError: The algorithm asks for something that there is not.
        """
        with shown(f"thinwire: wait for round {self._number}"):
            for each in self._rounds:
                for _, sent in each.sent:
                    sent.work.wait()
        self._number += 1
        with shown(f"thinwire: round {self._number}"):
            # All before anything is sent: so the next messages of all buckets travel as one.
            for each in self._rounds:
                _answer(each)
            self._rounds = []
            _compute_jointly(self.tasks)
            waiting = [task for task in self.tasks if not isinstance(task.request, Commit)]
            types = [task.request.tensor for task in waiting if isinstance(task.request, Mean)]
            for task in self._joining:
                # In the type of what is sent anyway: a message of its own would cost a latency more.
                if types and isinstance(task.request, Mean):
                    task.request = Mean(task.request.tensor.to(types[0]))
            waiting += self._joining
            self.tasks += self._joining
            self._joining = []
            if waiting:
                purpose = f"{self._name}, round {self._number} of all buckets"
                self._rounds.append(_send(waiting, self._ways, purpose))
        return bool(waiting)

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would not block."""
        return all(sent.work.is_completed() for each in self._rounds for _, sent in each.sent)

    @property
    def commits(self) -> Sequence[Commit]:
        """What the tasks stand at, once `advance` has returned False."""
        return [task.request for task in self.tasks if isinstance(task.request, Commit)]

    def is_healthy(self) -> torch.Tensor:
        """Return whether all that was received may be used, as a tensor of one bool; not read back."""
        asked = [commit.is_healthy for commit in self.commits]
        # Of all buckets at once: on an accelerator what counts is how many launches it takes.
        received = [tensor for ask in asked if isinstance(ask, AllFinite) for tensor in ask.tensors]
        answers = [ask() for ask in asked if not isinstance(ask, AllFinite)]
        if received:
            answers.insert(0, all_finite(*received))
        if not answers:
            return torch.tensor(True)
        if len(answers) == 1:
            return answers[0]
        # One question for all buckets: each of its own would make the host wait for the device.
        return torch.stack([each.to(answers[0].device, non_blocking=True) for each in answers]).all()

    def commit(self, tasks: Sequence[Task], is_healthy: torch.Tensor | None = None) -> None:
        """Let some tasks pass their commits and write memory.

        Args:
            tasks: Which.
            is_healthy: As of `Task.commit`.

        Raises:
            ConfigError: One asks for a message.
        """
        # What closes the step reads the buckets' means, and those are there when all is computed together.
        closing = [task for task in tasks if task in self._closing]
        for some in ([task for task in tasks if task not in closing], closing):
            for task in some:
                task.commit(is_healthy)
            _compute_jointly(some)

    def close(self) -> None:
        """Forget all buckets; they write nothing any more."""
        for task in [*self.tasks, *self._joining]:
            task.close()
        self.tasks, self._joining, self._closing = [], [], []  # with what they have received
        # The rounds stay: what was sent can't be called back, and `drain` must know of it.

    def drain(self) -> None:
        """Wait for what was under way when it was closed; whether that has failed no longer matters.

        Until then the backend may write to the messages, which may lie in the gradients themselves.
        """
        for each in self._rounds:
            for _, sent in each.sent:
                with suppress(CommunicationError):
                    sent.work.wait()
        self._rounds = []


def answered(requests: Replanning, transport: Transport, purpose: str) -> Choices:
    """Run requests that are no bucket's to their end.

    Args:
        requests: The generator.
        transport: Carries its messages.
        purpose: What for and in which step, for errors.

    Raises:
        CommunicationError: A collective failed.
        ConfigError: They ask for something that can't be sent.
    """
    answer = None
    while True:
        try:
            request = requests.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        messages = request if isinstance(request, tuple) else (request,)
        answers: list[torch.Tensor] = []
        # One after the other: nothing else travels at this time, and it is seldom asked.
        for message in messages:
            _check_message(message)
            sent = _MESSAGES[type(message)]([message], transport, purpose)
            sent.work.wait()
            answers += sent.parts()
        answer = tuple(answers) if isinstance(request, tuple) else answers[0]


def shown(name: str) -> AbstractContextManager[object]:
    """Return a context that is a range in `torch.profiler`'s picture; nothing while that is off."""
    is_on: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if is_on else nullcontext()


def _compute_jointly(tasks: Sequence[Task]) -> None:
    """Serve what tasks want computed, those that name one function together, until none wants anything."""
    # Again and again: with its answer a task may want the next thing computed.
    while True:
        wanting = [task for task in tasks if isinstance(task.request, Jointly)]
        if not wanting:
            return
        function = wanting[0].request.function  # type: ignore[union-attr]
        served = [task for task in wanting if task.request.function is function]  # type: ignore[union-attr]
        of_each = [task.request.items for task in served]  # type: ignore[union-attr]
        results = list(function([item for items in of_each for item in items]))
        for task, items in zip(served, of_each, strict=True):
            task.answer(results[: len(items)])
            del results[: len(items)]


def _send(tasks: Sequence[Task], ways: _Ways, purpose: str) -> _Round:
    """Send what tasks ask for; messages of one operation, type and device as one."""
    kinds: dict[tuple[str, str, type], list[tuple[int, int, Any]]] = {}
    for number, task in enumerate(tasks):
        messages: Sequence[Any] = task.request if isinstance(task.request, tuple) else (task.request,)
        for place, message in enumerate(messages):
            if isinstance(message, Commit) and not isinstance(task.request, tuple):
                continue
            _check_message(message)
            key = (str(message.tensor.device), str(message.tensor.dtype), type(message))
            kinds.setdefault(key, []).append((number, place, message))
    # Backends match collectives by their order alone, and wait for ever where it differs. Sorted, it follows
    # from what is asked for: not from which bucket asked first, nor from what a dictionary makes of that.
    sent = []
    for key in sorted(kinds, key=lambda key: (key[0], key[1], key[2].__name__)):
        together = kinds[key]
        under_way = _MESSAGES[key[2]]([each for _, _, each in together], ways.of(key[2]), purpose)
        sent.append(([(number, place) for number, place, _ in together], under_way))
    return _Round(tasks, sent)


def _answer(finished: _Round) -> None:
    """Hand every task its answers."""
    answers: list[dict[int, torch.Tensor]] = [{} for _ in finished.tasks]
    for owners, sent in finished.sent:
        for (number, place), part in zip(owners, sent.parts(), strict=True):
            answers[number][place] = part
    for task, of_task in zip(finished.tasks, answers, strict=True):
        if isinstance(task.request, tuple):
            task.answer(tuple(of_task[place] for place in range(len(of_task))))
        elif of_task:
            task.answer(of_task[0])


def _sent_means(messages: Sequence[Mean], transport: Transport, purpose: str) -> _Sent:
    tensors = [message.tensor for message in messages]
    for tensor in tensors:
        _check_flat("Mean", tensor)
        if not tensor.is_floating_point():
            raise ConfigError(
                f"an exchange has asked for the mean of {tensor.dtype}, expected a floating type; "
                "AllGather and AllToAll carry every type"
            )
    # One alone is not copied, so its mean comes to lie where the request was.
    flat = tensors[0] if len(tensors) == 1 else as_one(tensors)
    work = transport.mean(flat, purpose)
    sizes = [tensor.numel() for tensor in tensors]
    return _Sent(work, flat, lambda: [flat] if len(sizes) == 1 else flat.split_with_sizes(sizes))


def _sent_gathers(messages: Sequence[AllGather | ShardGather], transport: Transport, purpose: str) -> _Sent:
    tensors = [message.tensor for message in messages]
    for tensor in tensors:
        _check_flat(type(messages[0]).__name__, tensor)
    flat = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
    rows = flat.new_empty(transport.size, flat.numel())
    work = transport.all_gather(rows, flat, purpose)
    sizes = [tensor.numel() for tensor in tensors]
    return _Sent(work, flat, lambda: rows.split_with_sizes(sizes, dim=1))


def _sent_shard_sums(messages: Sequence[ShardSum], transport: Transport, purpose: str) -> _Sent:
    tensors = [message.tensor for message in messages]
    for tensor in tensors:
        _check_flat("ShardSum", tensor)
    flat = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    work = transport.all_reduce(flat, f"{purpose}, between shards")
    sizes = [tensor.numel() for tensor in tensors]
    return _Sent(work, flat, lambda: flat.split_with_sizes(sizes))


def _sent_exchanges(messages: Sequence[AllToAll], transport: Transport, purpose: str) -> _Sent:
    tensors = [message.tensor for message in messages]
    for tensor in tensors:
        if tensor.dim() != 2 or len(tensor) != transport.size:
            raise ConfigError(
                f"an exchange has asked for AllToAll of shape {tuple(tensor.shape)}, expected a row for each "
                f"of the {transport.size} members"
            )
    rows = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors, dim=1)
    received = torch.empty_like(rows)
    work = transport.all_to_all(received, rows, purpose)
    sizes = [tensor.shape[1] for tensor in tensors]
    return _Sent(work, rows, lambda: received.split_with_sizes(sizes, dim=1))


def _check_message(message: object) -> None:
    if type(message) not in _MESSAGES:
        raise ConfigError(
            f"an algorithm has asked for {message!r}, expected Mean, AllGather or AllToAll, of which several "
            "may stand in a tuple; or, of an exchange and alone, Jointly or Commit"
        )


def _check_flat(operation: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 1:
        raise ConfigError(
            f"an exchange has asked for {operation} of shape {tuple(tensor.shape)}, expected a flat tensor; "
            "send tensor.view(-1)"
        )


_MESSAGES: dict[type, Callable[[Any, Transport, str], _Sent]] = {
    Mean: _sent_means,
    AllGather: _sent_gathers,
    AllToAll: _sent_exchanges,
    ShardSum: _sent_shard_sums,
    ShardGather: _sent_gathers,
}
