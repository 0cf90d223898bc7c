"""One step's exchange: starts buckets, finishes their rounds, commits all or rolls back all."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.profiler import record_function

from thinwire.algorithms import Algorithm, Bucket, Memory, Rounds
from thinwire.channel import Channel, Pending
from thinwire.nonfinite import OnNonfinite
from thinwire.plan import BUCKET_SEPARATOR

__all__ = ["Exchange"]


@dataclass
class _Task:
    """A generator of rounds: what it sent last and is waiting for, or that it stands at its gate."""

    bucket: Bucket | None
    memory: Memory | None
    rounds: Rounds
    message: torch.Tensor | None
    at_gate: bool = False

    def advance(self, mean: torch.Tensor) -> None:
        """Hand over a mean; the next message, the gate or the end follows."""
        try:
            self.message = self.rounds.send(mean)
            self.at_gate = self.message is None
        except StopIteration:
            self.message = None


class Exchange:
    """Drives the buckets of one step through an algorithm's rounds.

    Every collective is issued by the thread that calls `start` and `finish`, in the order of buckets
    and then of rounds, which is the same on every process.

    Args:
        channel: Where messages are averaged; may be replaced between steps.
        host_check: Whether the host learns if all means of a step were finite. If not, it does not wait for
            the device: a step with others leaves memory as it was just so, but counts as committed.
        on_nonfinite: What the gradients of a step with others become: zeros with "zero", else NaN. With
            "nan", a step that writes no memory is not looked at.

    Attributes:
        host_check: As given.
        unseen_nonfinite: Steps that were not finite and that the host did not see, a tensor of one element;
            None before the first that could be.
    """

    def __init__(
        self, channel: Channel, *, host_check: bool = True, on_nonfinite: OnNonfinite = "nan"
    ) -> None:
        self.channel = channel
        self.unseen_nonfinite: torch.Tensor | None = None
        self.host_check = host_check
        self._looks_always = on_nonfinite != "nan"
        self._fill = 0.0 if on_nonfinite == "zero" else torch.nan
        self._tasks: list[_Task] = []
        self._pending: list[Pending] = []
        self._step = 0

    def start(self, algorithm: Algorithm, bucket: Bucket, memory: Memory, *, step: int) -> None:
        """Run a bucket to its first message and send it, while the backward pass goes on.

        Args:
            algorithm: Makes the rounds.
            bucket: Written from now on.
            memory: Written when the step is committed.
            step: The step's number, for errors.

        Raises:
            CommunicationError: The message could not be sent.
        """
        rounds = algorithm.exchange(bucket, memory)
        with _shown("thinwire: round 1"):
            message = next(rounds)
        if message is None:
            raise AssertionError(f"{algorithm} reached its gate without a message")
        self._step = step
        purpose = f"step {step}, round 1 of the bucket of {bucket.specs[0].name}"
        self._pending.append(self.channel.average(message, purpose))
        self._tasks.append(_Task(bucket, memory, rounds, message))

    def abandon(self) -> None:
        """Forget a step that can't be finished; memory is as it was."""
        for task in self._tasks:
            task.rounds.close()
        self._tasks, self._pending = [], []

    def finish(self, closing: Rounds | None = None) -> Generator[None, None, bool]:
        """Finish all buckets. Yields whenever messages are under way, before it waits for them.

        Args:
            closing: Rounds that are no bucket's. They travel with the buckets' second, and commit last.

        Returns:
            Whether the step was committed. False if any mean was not finite: memory is as it was, and
            every gradient is filled. Without `host_check`, always True.

        Raises:
            CommunicationError: A collective failed; memory is as it was.
        """
        tasks, pending = self._tasks, self._pending
        self._tasks, self._pending = [], []
        last = [] if closing is None else [_Task(None, None, closing, next(closing))]
        try:
            yield
            with _shown("thinwire: wait for round 1"):
                means = [each.wait() for each in pending]
            all_means = yield from self._later_rounds(tasks, means, last)
            buckets = [task.bucket for task in tasks if task.bucket is not None]
            gated = [task for task in [*tasks, *last] if task.at_gate]
            if not gated and not self._looks_always:
                return True
            # What has no gate is written already, and tells more than its mean: it may be of a narrower type.
            written = [task.bucket.flat for task in tasks if task.bucket is not None and not task.at_gate]
            looked_at = [*(all_means if gated else ()), *(written if self._looks_always else ())]
            with _shown("thinwire: commit"):
                return self._close(gated, buckets, _all_finite(looked_at))
        finally:
            for task in [*tasks, *last]:
                task.rounds.close()

    def _close(self, gated: Sequence[_Task], buckets: Sequence[Bucket], finite: torch.Tensor) -> bool:
        """Let all tasks commit, or none; whether they did, as far as the host knows."""
        if not self.host_check:
            for task in gated:
                _commit_where(finite, task)
            for bucket in buckets:
                bucket.flat.masked_fill_(~finite.to(bucket.flat.device), self._fill)
            unseen = (~finite).long()
            self.unseen_nonfinite = (
                unseen if self.unseen_nonfinite is None else self.unseen_nonfinite.add_(unseen)
            )
            return True
        start = time.perf_counter()
        is_finite = bool(finite)  # waits for an accelerator
        self.channel.traffic.waiting_seconds += time.perf_counter() - start
        if not is_finite:
            for bucket in buckets:
                bucket.flat.fill_(self._fill)
            return False
        for task in gated:
            _commit(task)
        return True

    def _later_rounds(
        self, tasks: Sequence[_Task], means: list[torch.Tensor], joining: list[_Task]
    ) -> Generator[None, None, list[torch.Tensor]]:
        """All rounds after the first, the messages of all tasks as one; returns every mean of the step."""
        all_means = list(means)
        number = 1
        while tasks:
            number += 1
            purpose = f"step {self._step}, round {number} of all buckets"
            with _shown(f"thinwire: round {number}"):
                for task, mean in zip(tasks, means, strict=True):
                    task.advance(mean)
            waiting = [task for task in tasks if task.message is not None]
            tasks = sorted([*waiting, *_in_the_type_of(waiting, joining)], key=_kind)
            joining = []
            messages = [task.message for task in tasks if task.message is not None]
            shared = [self.channel.average(flat, purpose) for flat in _coalesced(messages)]
            if shared:
                yield
            with _shown(f"thinwire: wait for round {number}"):
                flats = [each.wait() for each in shared]
            all_means += flats
            means = _parted(flats, messages)
        return all_means


def _shown(name: str) -> AbstractContextManager[object]:
    """A range in `torch.profiler`'s picture; nothing while that is off."""
    is_on: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if is_on else nullcontext()


def _in_the_type_of(waiting: Sequence[_Task], joining: Sequence[_Task]) -> Sequence[_Task]:
    """`joining` with messages of the type that is under way anyway, so that they travel with it."""
    for task in joining if waiting else ():
        if task.message is not None and waiting[0].message is not None:
            task.message = task.message.to(waiting[0].message)
    return joining


def _kind(task: _Task) -> str:
    """Messages of one kind can travel as one."""
    return "" if task.message is None else f"{task.message.device} {task.message.dtype}"


def _coalesced(messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One flat tensor for each run of messages of one type on one device."""
    runs = groupby(messages, key=lambda message: (message.device, message.dtype))
    return [torch.cat(list(run)) for _, run in runs]


def _parted(flats: Sequence[torch.Tensor], messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`flats` cut up again into the shapes of the messages they were made of."""
    runs = groupby(messages, key=lambda message: (message.device, message.dtype))
    return [
        part
        for flat, (_, run) in zip(flats, runs, strict=True)
        for part in flat.split_with_sizes([message.numel() for message in run])
    ]


def _commit(task: _Task) -> None:
    """Let a task write memory."""
    if next(task.rounds, None) is not None:
        raise AssertionError("a message after the gate")


def _commit_where(finite: torch.Tensor, task: _Task) -> None:
    """Let a bucket's task write memory, then take that back on the device unless `finite`.

    Where the task has dropped something, which only the host can take back, the host asks.

    Cost: a copy of what the bucket has in memory, for the moment.
    """
    if task.bucket is None or task.memory is None:
        raise AssertionError("whether parameters are used is the host's to decide")
    kept = (task.memory.error, task.memory.factor, task.memory.sent)
    labels = _labels(task.bucket)
    before = [{label: memory[label].clone() for label in labels if label in memory} for memory in kept]
    _commit(task)
    for memory, old in zip(kept, before, strict=True):
        dropped = old.keys() - memory.keys()
        if dropped and not finite:
            memory.update({label: old[label] for label in dropped})
        for label in labels:
            if label in memory and label not in dropped:
                _keep_where(finite, memory[label], old.get(label))


def _keep_where(finite: torch.Tensor, written: torch.Tensor, was: torch.Tensor | None) -> None:
    """Put back, in place, what was there before; zeros where there was nothing of that shape."""
    if was is None or was.shape != written.shape:
        was = torch.zeros_like(written)
    written.copy_(torch.where(finite.to(written.device), written, was))


def _labels(bucket: Bucket) -> list[str]:
    """What memory may call the bucket's parameters, and the bucket as a whole."""
    names = [spec.name for spec in bucket.specs]
    return [*names, f"{names[0]}{BUCKET_SEPARATOR}{names[-1]}"]


def _all_finite(means: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether every element is finite, a tensor of one element: asking it is one host synchronisation."""
    extremes = [torch.stack(torch.aminmax(mean)).double() for mean in means if mean.numel()]  # NaN wins both
    on_one_device = [pair.to(extremes[0].device, non_blocking=True) for pair in extremes]
    return torch.cat(on_one_device).isfinite().all() if extremes else torch.tensor(True)
