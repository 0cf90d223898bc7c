"""The collectives of one step: carries what its buckets ask for, in rounds, up to the commit.

How a gradient passes through, with two buckets `a` and `b`:

    backward pass             step.start(a, gradients)      plan.run(a, memory) is a generator: it runs to its
                                │                           first request, which is sent (round 1 of a)
                              step.start(b, gradients)      the same of b, while a's message travels
    last gradient is there    step.finish()
                                ├ advance()                 waits, answers a and b, which go on to their next
                                │                           requests: those of a kind travel as one (round 2)
                                ├ advance() …               until both stand at their Commit
                                └ commit()                  all received numbers are finite? both are resumed,
                                                            and write means and memory; or neither is
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from thinwire import comm
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
from thinwire.comm import Transport, Work
from thinwire.errors import CommunicationError, ConfigError
from thinwire.tensors.layout import concat_view
from thinwire.torch_private import is_profiling


class Task:
    """A bucket's generator of requests, standing at one."""

    def __init__(self, requests: Requests, bucket: str = "") -> None:
        self.bucket = bucket  # its first parameter
        if not isinstance(requests, Generator):
            raise ConfigError(
                f"a plan has returned {type(requests).__name__}, expected a generator; yield each "
                "request, and Commit as the last one"
            )
        self.requests = requests
        # The request that it stands at; None at its end.
        self.request: Request | tuple[CollectiveRequest, ...] | None = None
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
                "a plan's run has ended without Commit, expected it as the last request; yield "
                "Commit(lambda: all_finite(…)) before memory is written"
            ) from None
        # A message behind the commit could fail where other buckets have written their memory already.
        if self.is_committed and not isinstance(self.request, Jointly):
            raise ConfigError(
                f"a plan's run has asked for {self.request!r} behind its Commit, expected its end"
            )
        if isinstance(self.request, Commit):
            self.gate = self.request
            if not isinstance(self.gate.is_healthy, AllFinite) and not callable(self.gate.is_healthy):
                raise ConfigError(
                    f"Commit takes a function, got {type(self.gate.is_healthy).__name__}; write "
                    "Commit(lambda: all_finite(mean))"
                )


class CollectiveScheduler:
    """Drives the buckets of one step through their rounds."""

    # Backends match collectives by nothing but their order. If rank 0 sent bucket a's second message first,
    # since a's answer came first there, and rank 1 bucket b's, the one would be taken for the other, or both
    # would wait forever. So one thread sends all, at points of the caller's code that are the same on every
    # rank; never when something has happened to arrive.

    def __init__(self, transport: Transport, name: str, *, pipelined: bool = False) -> None:
        self.tasks: list[Task] = []
        self.name = name  # of the step
        self.writes = False  # whether memory is written behind some commit that a task has come to
        self._closing: list[Task] = []  # of `close_with`
        self._transport, self._size, self._is_pipelined = transport, transport.size, pipelined
        self._rounds: list[Round] = []  # under way
        self._previous: Round | None = None  # the first message of the last bucket
        self._number = 1

    def start(self, requests: Requests, bucket: str) -> None:
        """Run a bucket to its first message and send it, while the backward pass goes on."""
        with profiler_range(f"thinwire: round 1 of {bucket}"):
            task = Task(requests, bucket)
            # This bucket alone: waiting for the others would delay its message until after the backward pass.
            _compute_jointly([task])
            self._send([task], f"{self.name}, round 1 of the bucket of {bucket}")
        # Added only once it is sent: otherwise nothing of the bucket is in flight.
        self.tasks.append(task)
        if self._is_pipelined:
            # Wait for what was sent up to the first message of the last bucket but one: what was sent since
            # then keeps the link busy meanwhile, and for longer than members are apart. Decide by what was
            # started, not by what arrived, so every member sends in the same order.
            previous, self._previous = self._previous, self._rounds[-1]
            while previous in self._rounds:
                self._advance_first()

    def _advance_first(self) -> bool:
        """Wait for the round that was sent first, and send what its buckets ask for next, alone."""
        if self._rounds:
            first = self._rounds.pop(0)
            bucket = first.tasks[0].bucket
            with profiler_range(f"thinwire: next round of {bucket}"):
                waiting = self._receive([first], first.tasks, bucket)
                if waiting:
                    self._send(waiting, f"{self.name}, a later round of the bucket of {bucket}")
        return bool(self._rounds)

    def advance_next(self) -> bool:
        """Advance all buckets; if they are pipelined, only the one whose message was sent first.

        While that one is decoded, the next one's message travels. Returns whether there is a round under way.
        """
        # The step's closing message travels with the second ones of all buckets.
        return self._advance_first() if self._is_pipelined and not self._closing else self.advance()

    def close_with(self, requests: Requests) -> None:
        """Add requests that are no bucket's: the first travels with the buckets' second; they commit last."""
        self._closing.append(Task(requests))

    def advance(self) -> bool:
        """Wait for the round under way and send the next one, of all buckets together; see `Step.advance`."""
        with profiler_range(f"thinwire: round {self._number + 1}"):
            # All before anything is sent: so the next messages of all buckets travel as one.
            waiting = self._receive(self._rounds, self.tasks, f"round {self._number}")
            self._rounds, self._previous = [], None
            self._number += 1
            if self._closing:
                self.writes = True
                types = [task.request.tensor.dtype for task in waiting if isinstance(task.request, Mean)]
                for task in self._closing:
                    if types and isinstance(task.request, Mean):
                        # In the type of what is sent anyway: a separate message would cost a latency more.
                        task.request = Mean(task.request.tensor.to(types[0]))
                waiting += [task for task in self._closing if task.gate is None]
            if waiting:
                self._send(waiting, f"{self.name}, round {self._number} of all buckets")
        return bool(waiting)

    # For means that are applied bucket by bucket, during the next forward pass.

    def collect(self) -> None:
        """Wait for the messages under way, in turn; buckets come to their next ones, not sent yet."""
        while self._rounds:
            first = self._rounds.pop(0)
            with profiler_range(f"thinwire: average of {first.tasks[0].bucket}"):
                self._receive([first], first.tasks, first.tasks[0].bucket)

    def send_last_first(self) -> None:
        """Send what buckets stand at, that of the last bucket first: the next forward pass begins there."""
        for task in reversed(self.tasks):
            if not isinstance(task.request, Commit):
                self._send([task], f"{self.name}, the mean of the bucket of {task.bucket}")

    def take(self, task: Task) -> None:
        """Wait for the mean of one bucket, and let that bucket pass its commit."""
        for round_ in [round_ for round_ in self._rounds if task in round_.tasks]:
            self._receive([round_], round_.tasks, task.bucket)
            self._rounds.remove(round_)
        with profiler_range(f"thinwire: decode {task.bucket}"):
            self.commit([task])

    def _receive(self, rounds: Sequence[Round], tasks: Sequence[Task], what: str) -> list[Task]:
        """Wait for rounds, and answer tasks; return those that then stand at a message."""
        with profiler_range(f"thinwire: wait for {what}"):
            for round_ in rounds:
                for work in round_.works:
                    work.wait()
        for round_ in rounds:
            round_.answer()
        _compute_jointly(tasks)
        waiting = []
        for task in tasks:
            if isinstance(task.request, Commit):
                self.writes |= task.request.writes
            elif task.request is not None:
                waiting.append(task)
        return waiting

    def _send(self, tasks: Sequence[Task], purpose: str) -> None:
        later = Round(tasks, self._size, purpose)
        for packed in later.packed:
            later.works.append(self._transport.start(packed.message))
        self._rounds.append(later)

    # The commit.

    def is_healthy(self) -> torch.Tensor:
        """Return whether all that was received may be used, as a tensor of one bool; not read back."""
        received, answers = list[torch.Tensor](), list[torch.Tensor]()
        for task in (*self.tasks, *self._closing):
            if task.gate is None:
                continue
            if isinstance(task.gate.is_healthy, AllFinite):
                received += task.gate.is_healthy.tensors
            else:
                answers.append(_one_bool(task.gate.is_healthy()))
        # Check all buckets at once: on an accelerator the number of launches is what costs.
        if received:
            answers.insert(0, all_finite(*received))
        if not answers:
            return torch.tensor(True)
        if len(answers) == 1:
            return answers[0]
        # One question for all buckets: a question for each would make the host wait for the device.
        return torch.stack([answer.to(answers[0].device, non_blocking=True) for answer in answers]).all()

    def commit_early(self) -> None:
        """Let those pass behind whose commit no memory is written; their gradients are gone then."""
        passed = []
        for task in self.tasks:
            if task.gate is not None and not task.gate.writes:
                passed.append(task)
        if passed:
            self.commit(passed)

    def commit(self, tasks: Sequence[Task], is_healthy: torch.Tensor | None = None) -> None:
        """Let tasks pass their commits: going on to their ends is what writes memory."""
        for task in tasks:
            if not task.is_committed:
                task.is_committed = True
                task.answer(is_healthy)
        _compute_jointly(tasks)

    def commit_closing(self) -> None:
        self.commit(self._closing)

    def close(self) -> None:
        """Forget all buckets; they write nothing any more."""
        for task in (*self.tasks, *self._closing):
            task.requests.close()
        self.tasks, self._closing = [], []  # with what they have received
        # The rounds stay: what was sent can't be called back, and `drain` must know of it.

    def drain(self) -> None:
        """Wait for what was under way when it was closed; whether that has failed no longer matters."""
        # Until then the backend may write to the messages, which may lie in the gradients themselves.
        for round_ in self._rounds:
            for work in round_.works:
                with suppress(CommunicationError):
                    work.wait()
        self._rounds = []


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a context that is a range in `torch.profiler`'s picture; nothing while that is off."""
    return record_function(name) if is_profiling() else nullcontext()


def _one_bool(answer: object) -> torch.Tensor:
    if isinstance(answer, torch.Tensor) and answer.dtype is torch.bool and answer.numel() == 1:
        return answer.reshape(())  # of several buckets they are stacked
    got = type(answer).__name__
    if isinstance(answer, torch.Tensor):
        got = f"{answer.dtype} of shape {tuple(answer.shape)}"
    raise ConfigError(
        f"a Commit's function has returned {got}, expected a tensor of one bool; such as all_finite(mean)"
    )


def _compute_jointly(tasks: Sequence[Task]) -> None:
    """Serve what tasks want computed, those that name one function together, until none wants anything."""
    # Again and again: with its answer a task may want the next thing computed.
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
                f"a function of Jointly has returned {len(results)} results, expected one for each of its "
                f"{len(items)} items"
            )
        for task, count in served:
            task.answer(results[:count])
            del results[:count]


class Packed(NamedTuple):
    """Requests of one collective, type and device, as one message."""

    message: comm.Message
    asked: list[tuple[list[Any], int]]  # to whose answers it belongs, and as which of them
    widths: list[int]  # of the answers, along the last dimension


class Round:
    """Some tasks' messages, sent together; their answers are handed over when all have come."""

    def __init__(self, tasks: Sequence[Task], num_members: int, purpose: str) -> None:
        self.tasks, self.packed, self.works = tasks, list[Packed](), list[Work]()
        self._answers: list[tuple[Task, list[Any]]] = []
        kinds: dict[str, list[tuple[list[Any], int, CollectiveRequest]]] = {}
        for task in tasks:
            requests = task.request if isinstance(task.request, tuple) else (task.request,)
            if not isinstance(task.request, Commit):
                answers: list[Any] = [None] * len(requests)
                self._answers.append((task, answers))
                for index, request in enumerate(requests):
                    sent = _checked(request, num_members, task.requests)
                    kind = f"{sent.tensor.device} {sent.tensor.dtype} {type(sent).__name__}"
                    kinds.setdefault(kind, []).append((answers, index, sent))
        # Backends match collectives by their order alone, and wait forever where it differs. Sorted, it
        # follows from what is asked for: not from which bucket asked first.
        for kind in sorted(kinds):
            tensors, asked, widths = [], [], []
            for answers, index, sent in kinds[kind]:
                tensors.append(sent.tensor)
                asked.append((answers, index))
                widths.append(sent.tensor.shape[-1])
            if isinstance(sent, Mean):
                # One alone is not copied, so its mean comes to lie where the request was.
                flat = tensors[0] if len(tensors) == 1 else concat_view(tensors)
                message = comm.Message("all_reduce", flat, flat, purpose, "mean")
            else:
                # Contiguous, for transports carry a tensor's memory as it lies, as bytes.
                flat = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors, dim=-1)
                if isinstance(sent, AllGather):
                    gathered = flat.new_empty(num_members, len(flat))
                    message = comm.Message("all_gather", flat, gathered, purpose)
                else:
                    message = comm.Message("all_to_all", flat, torch.empty_like(flat), purpose)
            self.packed.append(Packed(message, asked, widths))

    def answer(self) -> None:
        """Hand its tasks what has come."""
        for message, asked, widths in self.packed:
            received = message.output
            parts = (received,) if len(asked) == 1 else received.split_with_sizes(widths, dim=-1)
            for (answers, index), part in zip(asked, parts, strict=True):
                answers[index] = part
        for task, answers in self._answers:
            task.answer(tuple(answers) if isinstance(task.request, tuple) else answers[0])
        # A message keeps its buffers alive, and a Gloo work its group's threads.
        self.packed, self.works, self._answers = [], [], []


def _checked(request: object, num_members: int, asker: Requests) -> CollectiveRequest:
    """Return a request, if it can be sent."""
    name = getattr(asker, "__qualname__", "an algorithm")
    if not isinstance(request, CollectiveRequest):
        raise ConfigError(
            f"{name} has asked for {request!r}, expected Mean, AllGather or AllToAll, of which several "
            "may stand in a tuple; or, alone, Jointly or Commit"
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
    raise ConfigError(f"{name} has asked for {type(request).__name__} of {wrong}")
