"""One step's exchange: carries the requests of its buckets, in rounds, up to the commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from thinwire import comm
from thinwire.algorithms import (
    AllFinite,
    AllGather,
    AllToAll,
    Bucket,
    Commit,
    Jointly,
    Mean,
    Message,
    Request,
    Requests,
    all_finite,
)
from thinwire.comm import Transport, Work
from thinwire.errors import CommunicationError, ConfigError
from thinwire.tensors.layout import as_one


class Task:
    """A generator of requests, standing at one."""

    def __init__(self, requests: Requests) -> None:
        if not isinstance(requests, Generator):
            raise ConfigError(
                f"an exchange has returned {type(requests).__name__}, expected a generator; yield each "
                "request, and Commit as the last one"
            )
        self.requests = requests
        self.request: Request | tuple[Message, ...] | None = None  # what it asks for; None at its end
        self.gate: Commit | None = None  # its commit, once it has come there
        self.is_committed = False  # whether it has passed that
        self.answer(None)  # a generator that has not begun takes nothing else

    def answer(self, answer: Any) -> None:
        """Hand over the answer to its request; the next one follows."""
        try:
            self.request = self.requests.send(answer)
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
        if isinstance(self.request, Commit):
            self.gate = self.request

    def commit(self, is_healthy: torch.Tensor | None = None) -> None:
        """Let it pass its commit; going on to its end is what writes memory."""
        self.is_committed = True
        self.answer(is_healthy)


class CollectiveScheduler:
    """Drives the buckets of one step through their rounds."""

    # Backends match collectives by nothing but their order: members that disagree in it wait forever, or
    # mix messages up. So one thread sends all, at points of the caller's code, which are the same on every
    # member; never when something has happened to arrive, which differs.

    def __init__(self, transport: Transport, name: str) -> None:
        self.tasks: list[Task] = []
        self._closing: list[Task] = []  # of `close_with`; among `tasks` once their first message is sent
        self._transport, self._name = transport, name
        self._rounds: list[Round] = []  # under way
        self._previous: Round | None = None  # the first message of the last bucket
        self._number = 1

    def start(self, requests: Requests, name: str, bucket: Bucket | None = None) -> None:
        """Run a bucket to its first message and send it, while the backward pass goes on."""
        with shown("thinwire: round 1"):
            task = Task(requests)
            # Compute this bucket alone: waiting for the others would delay the first message until after
            # the backward pass.
            _compute_jointly([task])
            first = Round([task], self._transport.size, f"{self._name}, round 1 of the bucket of {name}")
            self._send(first)
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
        end = self._rounds.index(previous) + 1
        earlier = self._rounds[:end]
        with shown("thinwire: wait for earlier buckets"):
            self._wait(earlier)
        with shown("thinwire: earlier buckets"):
            tasks = [task for round_ in earlier for task in round_.tasks]
            purpose = f"{self._name}, a later round of the buckets before number {len(self.tasks)}"
            for round_ in earlier:
                round_.answer()
            del self._rounds[:end]
            _compute_jointly(tasks)
            later = Round(_waiting(tasks), self._transport.size, purpose)
            self._send(later)

    def close_with(self, requests: Requests) -> None:
        """Add requests that are no bucket's: the first travels with the buckets' second; they commit last."""
        self._closing.append(Task(requests))

    def advance(self) -> bool:
        """Wait for the round under way and send the next one, of all buckets together; do not wait for that.

        To be called when all buckets have been started, as `Step.advance` says. Returns whether there is a
        round under way; if not, all buckets stand at their commit.
        """
        with shown(f"thinwire: wait for round {self._number}"):
            self._wait(self._rounds)
        self._number += 1
        with shown(f"thinwire: round {self._number}"):
            # All before anything is sent: so the next messages of all buckets travel as one.
            for round_ in self._rounds:
                round_.answer()
            # Drop the references: a message keeps its buffers alive, and a Gloo work its group's threads.
            self._rounds, self._previous = [], None
            _compute_jointly(self.tasks)
            purpose = f"{self._name}, round {self._number} of all buckets"
            later = Round([*_waiting(self.tasks), *self._closed()], self._transport.size, purpose)
            self._send(later)
        return bool(later.tasks)

    def _closed(self) -> list[Task]:
        """Add what closes the step to its tasks, and return it if that was not done before."""
        means = [task.request.tensor.dtype for task in self.tasks if isinstance(task.request, Mean)]
        closing = [task for task in self._closing if task not in self.tasks]
        for task in closing if means else ():
            if isinstance(task.request, Mean):
                # In the type of what is sent anyway: a separate message would cost a latency more.
                task.request = Mean(task.request.tensor.to(means[0]))
        self.tasks += closing
        return closing

    def _wait(self, rounds: Sequence[Round]) -> None:
        for round_ in rounds:
            for work in round_.works:
                work.wait()

    def _send(self, later: Round) -> None:
        if later.tasks:
            later.send(self._transport)
            self._rounds.append(later)

    @property
    def commits(self) -> Sequence[Commit]:
        """The commits that tasks wait at, or have already passed, once `advance` has returned False."""
        return [task.gate for task in self.tasks if task.gate is not None]

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
        # One question for all buckets: a question for each would make the host wait for the device.
        return torch.stack([answer.to(answers[0].device, non_blocking=True) for answer in answers]).all()

    def commit_early(self) -> None:
        """Let those pass that stand at a commit behind which no memory is written.

        Only if no one goes back to the gradients as they were: if the step is dropped, they are filled.
        """
        self.commit([task for task in self.tasks if task.gate is not None and not task.gate.writes])

    def commit(self, tasks: Sequence[Task], is_healthy: torch.Tensor | None = None) -> None:
        """Let some tasks pass their commits and write memory."""
        # The closing tasks read the buckets' means, and those are there when all is computed together.
        for is_closing in (False, True):
            some = [task for task in tasks if (task in self._closing) is is_closing]
            for task in some:
                if not task.is_committed:
                    task.commit(is_healthy)
            _compute_jointly(some)

    def close(self) -> None:
        """Forget all buckets; they write nothing any more."""
        for task in [*self.tasks, *self._closing]:
            task.requests.close()
        self.tasks, self._closing = [], []  # with what they have received
        # The rounds stay: what was sent can't be called back, and `drain` must know of it.

    def drain(self) -> None:
        """Wait for what was under way when it was closed; whether that has failed no longer matters.

        Until then the backend may write to the messages, which may lie in the gradients themselves.
        """
        for round_ in self._rounds:
            for work in round_.works:
                with suppress(CommunicationError):
                    work.wait()
        self._rounds = []


def shown(name: str) -> AbstractContextManager[object]:
    """Return a context that is a range in `torch.profiler`'s picture; nothing while that is off."""
    is_on: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if is_on else nullcontext()


def _one_bool(answer: object) -> torch.Tensor:
    if isinstance(answer, torch.Tensor) and answer.dtype is torch.bool and answer.numel() == 1:
        return answer.reshape(())  # of several buckets they are stacked
    got = type(answer).__name__
    if isinstance(answer, torch.Tensor):
        got = f"{answer.dtype} of shape {tuple(answer.shape)}"
    raise ConfigError(
        f"a Commit's function has returned {got}, expected a tensor of one bool; such as all_finite(mean)"
    )


def _waiting(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks that stand at a message."""
    return [task for task in tasks if not (task.request is None or isinstance(task.request, Commit))]


def _compute_jointly(tasks: Sequence[Task]) -> None:
    """Serve what tasks want computed, those that name one function together, until none wants anything."""
    # Again and again: with its answer a task may want the next thing computed.
    while wanted := [(task, task.request) for task in tasks if isinstance(task.request, Jointly)]:
        function = wanted[0][1].function
        served = [(task, request.items) for task, request in wanted if request.function is function]
        items = [item for _, of_task in served for item in of_task]
        results = list(function(items))
        if len(results) != len(items):
            raise ConfigError(
                f"a function of Jointly has returned {len(results)} results, expected one for each of its "
                f"{len(items)} items"
            )
        for task, of_task in served:
            task.answer(results[: len(of_task)])
            del results[: len(of_task)]


class Packed(NamedTuple):
    """Requests of one operation, type and device, as one message."""

    owners: list[tuple[int, int]]  # the task of the round, and the place in its tuple
    message: comm.Message
    answers: Callable[[], Iterable[torch.Tensor]]


class Round:
    """Some tasks' messages, sent together; their answers are handed over when all have come."""

    def __init__(self, tasks: Sequence[Task], num_members: int, purpose: str) -> None:
        self.tasks, self.packed, self.works = tasks, list[Packed](), list[Work]()
        asked: list[tuple[str, int, int, Any]] = []
        for number, task in enumerate(tasks):
            requests = task.request if isinstance(task.request, tuple) else (task.request,)
            for place, request in enumerate(() if isinstance(task.request, Commit) else requests):
                tensor = _checked(request, num_members, task.requests)
                kind = f"{tensor.device} {tensor.dtype} {type(request).__name__}"
                asked.append((kind, number, place, request))
        # Backends match collectives by their order alone, and wait forever where it differs. Sorted, it
        # follows from what is asked for: not from which bucket asked first.
        for _, of_kind in groupby(sorted(asked, key=lambda entry: entry[:3]), key=lambda entry: entry[0]):
            alike = list(of_kind)
            tensors = [request.tensor for *_, request in alike]
            owners = [(number, place) for _, number, place, _ in alike]
            self.packed.append(Packed(owners, *_packed(type(alike[0][3]), tensors, num_members, purpose)))

    def send(self, transport: Transport) -> None:
        """Start its messages."""
        # One by one: if a later one is refused, the earlier ones are known to be under way.
        for packed in self.packed:
            self.works.append(transport.start(packed.message))

    def answer(self) -> None:
        """Hand its tasks what has come."""
        answers: list[dict[int, torch.Tensor]] = [{} for _ in self.tasks]
        for packed in self.packed:
            for (number, place), answer in zip(packed.owners, packed.answers(), strict=True):
                answers[number][place] = answer
        for task, of_task in zip(self.tasks, answers, strict=True):
            if isinstance(task.request, tuple):
                task.answer(tuple(of_task[place] for place in range(len(of_task))))
            elif of_task:
                task.answer(of_task[0])


def _checked(message: object, num_members: int, asker: Requests) -> torch.Tensor:
    """Return a message's tensor, if it can be sent."""
    name = getattr(asker, "__qualname__", "an algorithm")
    if not isinstance(message, Message):
        raise ConfigError(
            f"{name} has asked for {message!r}, expected Mean, AllGather or AllToAll, of which several "
            "may stand in a tuple; or, alone, Jointly or Commit"
        )
    tensor: object = message.tensor
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        wrong = f"{got}, expected a dense tensor"
    elif isinstance(message, AllToAll) and (tensor.dim() != 2 or len(tensor) != num_members):
        wrong = f"shape {tuple(tensor.shape)}, expected a row for each of the {num_members} members"
    elif not isinstance(message, AllToAll) and tensor.dim() != 1:
        wrong = f"shape {tuple(tensor.shape)}, expected a flat tensor; send tensor.view(-1)"
    elif isinstance(message, Mean) and not tensor.is_contiguous():
        wrong = f"strides {tensor.stride()}, expected a contiguous tensor; send tensor.contiguous()"
    elif isinstance(message, Mean) and not tensor.is_floating_point():
        wrong = f"{tensor.dtype}, expected a floating type; AllGather and AllToAll carry every type"
    else:
        return tensor
    raise ConfigError(f"{name} has asked for {type(message).__name__} of {wrong}")


def _packed(
    kind: type, tensors: list[torch.Tensor], num_members: int, purpose: str
) -> tuple[comm.Message, Callable[[], Iterable[torch.Tensor]]]:
    """Return requests of one kind as one message, and what gives the answers."""
    if kind is AllToAll:
        # Side by side: of each request row i is for member i.
        rows = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors, dim=1)
        received, widths = torch.empty_like(rows), [tensor.shape[1] for tensor in tensors]
        answers = partial(received.split_with_sizes, widths, dim=1)
        return comm.Message("all_to_all", rows, received, purpose), answers
    sizes = [tensor.numel() for tensor in tensors]
    if kind is AllGather:
        # Contiguous, for transports carry a tensor's memory as it lies, as bytes.
        flat = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
        gathered = flat.new_empty(num_members, flat.numel())
        answers = partial(gathered.split_with_sizes, sizes, dim=1)
        return comm.Message("all_gather", flat, gathered, purpose), answers
    # One alone is not copied, so its mean comes to lie where the request was.
    flat = tensors[0] if len(tensors) == 1 else as_one(tensors)
    mean = comm.Message("all_reduce", flat, flat, purpose, "mean")
    return mean, lambda: [flat] if len(sizes) == 1 else flat.split_with_sizes(sizes)
