"""One step's exchange: carries the requests of its buckets, in rounds, up to the commit."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.profiler import record_function

from thinwire.algorithms import (
    AllFinite,
    Commit,
    Jointly,
    Mean,
    Message,
    Request,
    Requests,
    all_finite,
)
from thinwire.channel import Transport
from thinwire.errors import CommunicationError, ConfigError
from thinwire.sync.messages import send_all


class Task:
    """A generator of requests, standing at one.

    Attributes:
        request: What it asks for; None at its end.
        is_committed: Whether it has passed its commit.
    """

    def __init__(self, requests: Requests) -> None:
        if not isinstance(requests, Generator):
            raise ConfigError(
                f"an exchange has returned {type(requests).__name__}, expected a generator; yield each "
                "request, and Commit as the last one"
            )
        self._requests = requests
        self.request: Request | tuple[Message, ...] | None = None
        self.is_committed = False
        self.answer(None)  # a generator that has not begun takes nothing else

    def answer(self, answer: Any) -> None:
        """Hand over the answer to its request; the next one follows."""
        try:
            self.request = self._requests.send(answer)
        except StopIteration:
            self.request = None
            if self.is_committed:
                return
            # Without one it would have written its memory whether or not the step was healthy.
            raise ConfigError(
                "an exchange has ended without Commit, expected it as the last request; yield "
                "Commit(lambda: all_finite(…)) before memory is written"
            ) from None
        # A message behind the commit could fail where other buckets have written their memory already.
        if self.is_committed and not isinstance(self.request, Jointly):
            raise ConfigError(
                f"an exchange has asked for {self.request!r} behind its Commit, expected its end"
            )

    def commit(self, is_healthy: torch.Tensor | None = None) -> None:
        """Let it pass its commit; going on to its end is what writes memory."""
        self.is_committed = True
        self.answer(is_healthy)

    def close(self) -> None:
        """Forget it; it writes nothing."""
        self._requests.close()


class _Round:
    """Some tasks' messages, sent together; their answers are handed over when all have come."""

    def __init__(self, tasks: Sequence[Task], transport: Transport, purpose: str) -> None:
        self.tasks = tasks
        self._sent = send_all([task.request for task in tasks], transport, purpose)

    def wait(self) -> None:
        for _, sent in self._sent:
            sent.work.wait()

    def drain(self) -> None:
        for _, sent in self._sent:
            with suppress(CommunicationError):
                sent.work.wait()

    def answer(self) -> None:
        answers: list[dict[int, torch.Tensor]] = [{} for _ in self.tasks]
        for owners, sent in self._sent:
            for (number, place), part in zip(owners, sent.parts(), strict=True):
                answers[number][place] = part
        for task, of_task in zip(self.tasks, answers, strict=True):
            if isinstance(task.request, tuple):
                task.answer(tuple(of_task[place] for place in range(len(of_task))))
            elif of_task:
                task.answer(of_task[0])


class Exchange:
    """Drives the buckets of one step through their rounds.

    Every collective is issued by the thread that calls `start` and `advance`, in the order of buckets
    and then of rounds, which is the same on every member.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self.tasks: list[Task] = []
        # Tasks of `close_with`, which commit last; `_joining` are those whose first message is not sent yet.
        self._closing: list[Task] = []
        self._joining: list[Task] = []
        self._transport = transport
        self._name = name
        self._passed: list[Commit] = []  # of `commit_early`
        self._rounds: list[_Round] = []  # under way
        self._previous: _Round | None = None  # the first message of the last bucket
        self._number = 1

    # Backends match collectives by nothing but their order: members that disagree in it wait for ever, or
    # take one message for another. So one thread sends all, where the caller's code stands, which is the same
    # on every member; never when something has happened to arrive, which is not.

    def start(self, requests: Requests, name: str) -> None:
        """Run a bucket to its first message and send it, while the backward pass goes on."""
        with shown("thinwire: round 1"):
            task = Task(requests)
            # Compute this bucket alone: waiting for the others would delay the first message until after the
            # backward pass.
            _compute_jointly([task])
            purpose = f"{self._name}, round 1 of the bucket of {name}"
            self._rounds.append(_Round([task], self._transport, purpose))
        # Added only once it is sent: otherwise nothing of the bucket is in flight.
        self.tasks.append(task)

    def advance_earlier(self) -> None:
        """Wait for what was sent up to the first message of the last bucket but one; send what comes next.

        To be called after each `start`, at the same buckets on all members. What was sent since then keeps
        the link busy meanwhile, and for longer than members are apart.
        """
        # Decide by what was started, not by what arrived, so every member sends in the same order.
        previous, self._previous = self._previous, self._rounds[-1]
        if previous is None:
            return
        end = next(place for place, sent in enumerate(self._rounds, start=1) if sent is previous)
        earlier = self._rounds[:end]
        with shown("thinwire: wait for earlier buckets"):
            for each in earlier:
                each.wait()
        with shown("thinwire: earlier buckets"):
            tasks = [task for each in earlier for task in each.tasks]
            for each in earlier:
                each.answer()
            del self._rounds[:end]
            _compute_jointly(tasks)
            # An exchange that reaches its commit waits there for the others.
            waiting = [task for task in tasks if not isinstance(task.request, Commit)]
            if waiting:
                purpose = f"{self._name}, a later round of the buckets before number {len(self.tasks)}"
                self._rounds.append(_Round(waiting, self._transport, purpose))

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
        """
        with shown(f"thinwire: wait for round {self._number}"):
            for each in self._rounds:
                each.wait()
        self._number += 1
        with shown(f"thinwire: round {self._number}"):
            # All before anything is sent: so the next messages of all buckets travel as one.
            for each in self._rounds:
                each.answer()
            # Drop the references: a message keeps its buffers alive, and a Gloo work its group's threads.
            self._rounds, self._previous = [], None
            _compute_jointly(self.tasks)
            waiting = [
                task for task in self.tasks if not (task.is_committed or isinstance(task.request, Commit))
            ]
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
                self._rounds.append(_Round(waiting, self._transport, purpose))
        return bool(waiting)

    @property
    def commits(self) -> Sequence[Commit]:
        """The commits that tasks wait at, or have already passed, once `advance` has returned False."""
        standing = [task.request for task in self.tasks if isinstance(task.request, Commit)]
        return [*self._passed, *standing]

    def is_healthy(self) -> torch.Tensor:
        """Return whether all that was received may be used, as a tensor of one bool; not read back."""
        asked = [commit.is_healthy for commit in self.commits]
        # Check all buckets at once: on an accelerator the number of launches is what costs.
        received = [tensor for ask in asked if isinstance(ask, AllFinite) for tensor in ask.tensors]
        answers = [_one_bool(ask()) for ask in asked if not isinstance(ask, AllFinite)]
        if received:
            answers.insert(0, all_finite(*received))
        if not answers:
            return torch.tensor(True)
        if len(answers) == 1:
            return answers[0]
        # One question for all buckets: each of its own would make the host wait for the device.
        return torch.stack([each.to(answers[0].device, non_blocking=True) for each in answers]).all()

    def commit_early(self) -> None:
        """Let those pass that stand at a commit behind which no memory is written.

        Only where nobody goes back to the gradients as they were: if the step is dropped, they are filled.
        """
        early = [each for each in self.tasks if isinstance(each.request, Commit) and not each.request.writes]
        self._passed += [task.request for task in early if isinstance(task.request, Commit)]
        self.commit(early)

    def commit(self, tasks: Sequence[Task], is_healthy: torch.Tensor | None = None) -> None:
        """Let some tasks pass their commits and write memory."""
        # What closes the step reads the buckets' means, and those are there when all is computed together.
        closing = [task for task in tasks if task in self._closing]
        for some in ([task for task in tasks if task not in closing], closing):
            for task in some:
                if task.is_committed:
                    continue
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
            each.drain()
        self._rounds = []


def shown(name: str) -> AbstractContextManager[object]:
    """Return a context that is a range in `torch.profiler`'s picture; nothing while that is off."""
    is_on: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if is_on else nullcontext()


def _one_bool(answer: object) -> torch.Tensor:
    if not (isinstance(answer, torch.Tensor) and answer.dtype is torch.bool and answer.numel() == 1):
        of = type(answer).__name__
        got = f"{answer.dtype} of shape {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else of
        raise ConfigError(
            f"a Commit's function has returned {got}, expected a tensor of one bool; such as all_finite(mean)"
        )
    return answer.reshape(())  # of several buckets they are stacked


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
        if len(results) != sum(map(len, of_each)):
            raise ConfigError(
                f"a function of Jointly has returned {len(results)} results, expected one for each of its "
                f"{sum(map(len, of_each))} items"
            )
        for task, items in zip(served, of_each, strict=True):
            task.answer(results[: len(items)])
            del results[: len(items)]
