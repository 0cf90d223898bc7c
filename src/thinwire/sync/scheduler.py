"""The collectives of one step: sends its buckets' requests, in rounds, up to the commit.

One step with two buckets `a` and `b`:

    backward pass             step.start(a, gradients)      plan.run(a, memory) is a generator: it runs to its
                                │                           first request, which is sent (round 1 of a)
                              step.start(b, gradients)      the same for b, while a's message is in flight
    last gradient is ready    step.finish()
                                ├ advance()                 waits, answers a and b, which run to their next
                                │                           requests: those of a kind go as one (round 2)
                                ├ advance() …               until both have reached their Commit
                                └ commit()                  all received numbers are finite? both are resumed,
                                                            and write means and memory; or neither is
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.profiler import record_function

from thinwire.algorithms import (
    AllFinite,
    AllGather,
    AllToAll,
    CollectiveRequest,
    Commit,
    Jointly,
    Mean,
    Request,
    Requests,
    all_finite,
)
from thinwire.comm import Message, Transport, Work
from thinwire.errors import CommunicationError, ConfigError
from thinwire.tensors.layout import concat_view
from thinwire.torch_private import is_profiling


class Task:
    """A bucket's generator of requests, suspended at one."""

    def __init__(self, requests: Requests, bucket: str = "", *, in_turn: bool = False) -> None:
        self.bucket = bucket  # its first parameter
        if not isinstance(requests, Generator):
            raise ConfigError(
                f"a plan returned {type(requests).__name__}, expected a generator; yield each request, and "
                "Commit as the last one"
            )
        self.requests = requests
        # The request at which it is suspended; None at its end.
        self.request: Request | tuple[CollectiveRequest, ...] | None = None
        self.commit: Commit | None = None  # once reached
        self.is_committed = False  # whether it has passed its commit
        # Requests of one tuple are sent together or, if `in_turn`, one after the other.
        self._in_turn = in_turn
        self._left: list[CollectiveRequest] = []  # not sent yet
        self.answers: list[torch.Tensor] = []  # to those that were sent
        self.answer(None)  # a generator that has not started accepts nothing else

    def answer(self, answer: Any) -> None:
        """Send the answer to its request to the generator, which runs to the next one."""
        if self._left:
            self.answers.append(answer)
            self.request = self._left.pop(0)
            return
        if self.answers:
            answer, self.answers = (*self.answers, answer), []
        try:
            self.request = self.requests.send(answer)
        except StopIteration:
            self.request = None
            if self.is_committed:
                return
            # Without a commit it has written memory whether or not the step was healthy.
            raise ConfigError(
                "a plan's run ended without Commit, expected it as the last request; yield Commit(lambda: "
                "all_finite(…)) before you write memory"
            ) from None
        # A message after the commit could fail when other buckets have already written their memory.
        if self.is_committed and not isinstance(self.request, Jointly):
            raise ConfigError(
                f"a plan's run requested {self.request!r} after its Commit; yield Commit as the last request"
            )
        if self._in_turn and isinstance(self.request, tuple):
            self.request, *self._left = self.request
        if isinstance(self.request, Commit):
            self.commit = self.request
            if not isinstance(self.commit.is_healthy, AllFinite) and not callable(self.commit.is_healthy):
                raise ConfigError(
                    f"Commit takes a function, got {type(self.commit.is_healthy).__name__}; write "
                    "Commit(lambda: all_finite(mean))"
                )


class CollectiveScheduler:
    """Drives the buckets of one step through their rounds."""

    # Backends match collectives only by their order. If rank 0 sent bucket a's second message first, because
    # a's answer arrived first there, and rank 1 sent bucket b's, they would be mixed up, or both would wait
    # forever. So one thread sends everything, at points of the caller's code that are the same on every rank,
    # never when something happens to arrive.

    def __init__(
        self, transport: Transport, name: str, *, pipelined: bool = False, in_turn: bool = False
    ) -> None:
        self.tasks: list[Task] = []  # one for each bucket
        self.name = name  # the step's
        self.writes = False  # whether any reached commit writes memory
        # For `commit_early`, which runs in every round: there may be a round for each bucket.
        self._early: dict[Task, None] = {}
        self._transport, self._is_pipelined, self._in_turn = transport, pipelined, in_turn
        self._rounds: list[Round] = []  # in flight
        self._means: dict[Task, Round] = {}  # those of them that `take` waits for
        self._previous: Round | None = None  # the first message of the last bucket
        self._number = 1

    def start(self, requests: Requests, bucket: str, *, rounds: int) -> None:
        """Run a bucket to its first message and send it, while the backward pass continues."""
        with profiler_range(f"thinwire: round 1 of {bucket}"):
            task = Task(requests, bucket, in_turn=self._in_turn)
            self.tasks.append(task)
            # Only this bucket: waiting for the others would delay its message until after the backward pass.
            _compute_jointly([task])
            self._send([task], f"round 1 of the bucket of {bucket}")
        if self._is_pipelined and rounds > 1:
            # Wait for everything up to the first message of the last bucket but one. What was sent after it
            # keeps the link busy meanwhile, for longer than members differ in time. Decide by what was
            # started, not by what has arrived, so that every member sends in the same order.
            previous, self._previous = self._previous, self._rounds[-1]
            while previous in self._rounds:
                self._advance_first()

    def _send(self, tasks: Sequence[Task], which: str) -> Round:
        """Send what tasks request."""
        sent = Round(tasks, self._transport.size, f"{self.name}, {which}")
        # First: if its second message is refused, `drain` must wait for its first one.
        self._rounds.append(sent)
        for message, _ in sent.packed:
            sent.works.append(self._transport.start(message))
        return sent

    def _advance_first(self) -> bool:
        """Wait for the round that was sent first, and send only its buckets' next requests."""
        if self._rounds:
            first = self._rounds[0]
            bucket = first.tasks[0].bucket
            with profiler_range(f"thinwire: next round of {bucket}"):
                waiting = self._receive([first], first.tasks, bucket)
                if waiting:
                    self._send(waiting, f"a later round of the bucket of {bucket}")
        return bool(self._rounds)

    def advance_next(self) -> bool:
        """Advance; if buckets are pipelined, only the one whose message was sent first.

        While it is decoded, the messages of others are in flight. Returns whether any round is in flight.
        """
        return self._advance_first() if self._is_pipelined else self.advance()

    def advance(self) -> bool:
        """Wait for the round in flight and send the next one, all buckets together; see `Step.advance`."""
        with profiler_range(f"thinwire: round {self._number + 1}"):
            # Receive all before sending anything, so that the next messages of all buckets are sent as one.
            waiting = self._receive(tuple(self._rounds), self.tasks, f"round {self._number}")
            self._number += 1
            if waiting:
                self._send(waiting, f"round {self._number} of all buckets")
        return bool(waiting)

    # For means that are applied bucket by bucket, during the next forward pass.

    def collect(self, tasks: Sequence[Task]) -> None:
        """Wait for these buckets' first messages; they run to their next requests, which are not sent yet."""
        for sent in tuple(self._rounds):
            if sent.tasks[0] in tasks and sent not in self._means.values():
                self._receive([sent], sent.tasks, sent.tasks[0].bucket)

    def send_means(self, tasks: Sequence[Task]) -> None:
        """Send these buckets' second messages, unless they were sent, without waiting."""
        for task in tasks:
            if task not in self._means and not isinstance(task.request, Commit):
                self._means[task] = self._send([task], f"the mean of the bucket of {task.bucket}")

    def take(self, task: Task) -> None:
        """Wait for the mean of one bucket, and commit that bucket."""
        if task in self._means:
            self._receive([self._means[task]], [task], task.bucket)
            del self._means[task]
        with profiler_range(f"thinwire: decode {task.bucket}"):
            self.commit([task])

    def _receive(self, rounds: Sequence[Round], tasks: Sequence[Task], what: str) -> list[Task]:
        """Wait for rounds, and answer tasks; return those that are then suspended at a message."""
        with profiler_range(f"thinwire: wait for {what}"):
            for sent in rounds:
                for work in sent.works:
                    work.wait()
        for sent in rounds:
            sent.answer()
            self._rounds.remove(sent)
        _compute_jointly(tasks)
        waiting = []
        for task in tasks:
            if isinstance(task.request, Commit):
                self.writes |= task.request.writes
                if not task.request.writes:
                    self._early[task] = None
            elif task.request is not None:
                waiting.append(task)
        return waiting

    # The commit.

    def is_healthy(self) -> torch.Tensor:
        """Return whether all received values may be used, as a tensor of one bool; not read back."""
        received, answers = list[torch.Tensor](), list[torch.Tensor]()
        for task in self.tasks:
            if task.commit is None:
                continue
            if isinstance(task.commit.is_healthy, AllFinite):
                received += task.commit.is_healthy.tensors
            else:
                answers.append(_one_bool(task.commit.is_healthy()))
        # Check all buckets together: on an accelerator, launches are the cost.
        if received:
            answers.insert(0, all_finite(*received))
        if not answers:
            return torch.tensor(True, device="cpu")
        if len(answers) == 1:
            return answers[0]
        # One answer for all buckets: reading one for each would make the host wait each time.
        return torch.stack([answer.to(answers[0].device, non_blocking=True) for answer in answers]).all()

    def commit_early(self) -> None:
        """Commit tasks that write no memory after their commit; this overwrites their gradients."""
        early, self._early = self._early, {}
        if early:
            self.commit([*early])

    def commit(self, tasks: Sequence[Task], is_healthy: torch.Tensor | None = None) -> None:
        """Resume tasks after their commits: they run to their ends and write memory."""
        for task in tasks:
            if not task.is_committed:
                task.is_committed = True
                task.answer(is_healthy)
        _compute_jointly(tasks)

    def close(self) -> None:
        """Drop all buckets, so that they write nothing any more."""
        for task in self.tasks:
            task.requests.close()
        self.tasks, self._early = [], {}  # drops what they have received, too
        # The rounds stay: sent messages can't be cancelled, and `drain` must wait for them.

    def drain(self) -> None:
        """Wait for messages that were in flight at `close`; whether they fail no longer matters."""
        # Until then the backend may write to the messages, which may be the gradients' own memory.
        for sent in self._rounds:
            for work in sent.works:
                with suppress(CommunicationError):
                    work.wait()
        self._rounds, self._means = [], {}


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a context that is a named range in `torch.profiler`; a null context if it is off."""
    return record_function(name) if is_profiling() else nullcontext()


def _one_bool(answer: object) -> torch.Tensor:
    if isinstance(answer, torch.Tensor) and answer.dtype is torch.bool and answer.numel() == 1:
        return answer.reshape(())  # so that several buckets' answers can be stacked
    got = type(answer).__name__
    if isinstance(answer, torch.Tensor):
        got = f"{answer.dtype} of shape {tuple(answer.shape)}"
    raise ConfigError(
        f"a Commit's function returned {got}, expected a tensor of one bool; such as all_finite(mean)"
    )


def _compute_jointly(tasks: Sequence[Task]) -> None:
    """Serve the tasks' `Jointly` requests, one call per function, until there are none."""
    # In a loop: after its answer a task may yield the next `Jointly`.
    while True:
        wanted = []
        for task in tasks:
            if isinstance(task.request, Jointly):
                wanted.append((task, task.request))
        if not wanted:
            return
        function, kind = wanted[0][1].function, wanted[0][1].kind
        served, items = list[tuple[Task, int]](), list[Any]()
        for task, request in wanted:
            if request.function is function and request.kind == kind:
                served.append((task, len(request.items)))
                items += request.items
        results = list(function(items) or [None] * len(items))
        if len(results) != len(items):
            raise ConfigError(
                f"a function of Jointly returned {len(results)} results, expected one for each of its "
                f"{len(items)} items"
            )
        for task, count in served:
            task.answer(results[:count])
            del results[:count]


class Round:
    """Some tasks' messages, sent together; tasks are answered when all have arrived."""

    def __init__(self, tasks: Sequence[Task], num_members: int, purpose: str) -> None:
        self.tasks, self.works = tasks, list[Work]()
        # Requests of one collective, dtype and device are one message, side by side in its last dimension.
        self.packed: list[tuple[Message, list[CollectiveRequest]]] = []
        self._asking: list[Task] = []  # tasks at a commit are left out: they may end before this is answered
        kinds = defaultdict[str, list[CollectiveRequest]](list)
        for task in tasks:
            if isinstance(task.request, Commit):
                continue
            self._asking.append(task)
            for request in task.request if isinstance(task.request, tuple) else (task.request,):
                sent = _checked(request, num_members, task.requests)
                kinds[f"{sent.tensor.device} {sent.tensor.dtype} {type(sent).__name__}"].append(sent)
        # Backends match collectives only by their order, and wait forever if it differs. Sorted, the order
        # depends on the requests, not on which bucket made one first.
        for kind in sorted(kinds):
            requests = kinds[kind]
            first, is_alone = requests[0], len(requests) == 1
            if isinstance(first, Mean):
                # A single request is not copied, so its mean is in the request's own memory.
                flat = first.tensor if is_alone else concat_view([request.tensor for request in requests])
                message = Message("all_reduce", flat, flat, purpose, "mean")
            else:
                # Contiguous, because transports send a tensor's memory as bytes.
                tensors = [request.tensor for request in requests]
                flat = first.tensor.contiguous() if is_alone else torch.cat(tensors, dim=-1)
                if isinstance(first, AllGather):
                    gathered = flat.new_empty(num_members, len(flat))
                    message = Message("all_gather", flat, gathered, purpose)
                else:
                    message = Message("all_to_all", flat, torch.empty_like(flat), purpose)
            self.packed.append((message, requests))

    def answer(self) -> None:
        """Answer its tasks."""
        answers: dict[int, torch.Tensor] = {}  # by the request's id
        for message, requests in self.packed:
            parts: Sequence[torch.Tensor] = [message.output]
            if len(requests) > 1:
                widths = [request.tensor.shape[-1] for request in requests]
                parts = message.output.split_with_sizes(widths, dim=-1)
            for request, part in zip(requests, parts, strict=True):
                answers[id(request)] = part
        for task in self._asking:
            if isinstance(task.request, tuple):
                task.answer(tuple(answers[id(request)] for request in task.request))
            else:
                task.answer(answers[id(task.request)])
        # A message keeps its buffers alive, and a Gloo work its group's threads.
        self.packed, self.works = [], []


def _checked(request: object, num_members: int, asker: Requests) -> CollectiveRequest:
    """Return a request; raise if it can't be sent."""
    name = getattr(asker, "__qualname__", "an algorithm")
    if not isinstance(request, CollectiveRequest):
        raise ConfigError(
            f"{name} requested {request!r}, expected Mean, AllGather or AllToAll, or several of them in a "
            "tuple, or a single Jointly or Commit"
        )
    tensor: object = request.tensor
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        wrong = f"{got}, expected a dense tensor"
    elif isinstance(request, AllToAll) and (tensor.dim() != 2 or len(tensor) != num_members):
        wrong = f"shape {tuple(tensor.shape)}, expected a row for each of the {num_members} members"
    elif not isinstance(request, AllToAll) and tensor.dim() != 1:
        wrong = f"shape {tuple(tensor.shape)}, expected a flat tensor; send tensor.view(-1)"
    elif isinstance(request, Mean) and not tensor.is_contiguous():
        wrong = f"strides {tensor.stride()}, expected a contiguous tensor; send tensor.contiguous()"
    elif isinstance(request, Mean) and not tensor.is_floating_point():
        wrong = f"{tensor.dtype}, expected a floating type; AllGather and AllToAll carry every type"
    else:
        return request
    raise ConfigError(f"{name} requested {type(request).__name__} of {wrong}")
