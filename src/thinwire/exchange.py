"""One step's exchange: starts buckets, finishes their rounds, commits all or rolls back all."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from thinwire.algorithms import Algorithm, Bucket, Memory, Rounds
from thinwire.channel import Channel, Pending

__all__ = ["Exchange"]


@dataclass
class _Task:
    """A generator of rounds: what it sent last and is waiting for, or that it stands at its gate."""

    bucket: Bucket | None
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
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
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
        message = next(rounds)
        if message is None:
            raise AssertionError(f"{algorithm} reached its gate without a message")
        self._step = step
        purpose = f"step {step}, round 1 of the bucket of {bucket.specs[0].name}"
        self._pending.append(self.channel.average(message, purpose))
        self._tasks.append(_Task(bucket, rounds, message))

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
            every gradient with memory is filled with NaN.

        Raises:
            CommunicationError: A collective failed; memory is as it was.
        """
        tasks, pending = self._tasks, self._pending
        self._tasks, self._pending = [], []
        last = [] if closing is None else [_Task(None, closing, next(closing))]
        try:
            yield
            means = [each.wait() for each in pending]
            all_means = yield from self._later_rounds(tasks, means, last)
            gated = [task for task in [*tasks, *last] if task.at_gate]
            if gated and not _all_finite(all_means):
                for task in gated:
                    if task.bucket is not None:
                        task.bucket.flat.fill_(torch.nan)
                return False
            for task in gated:
                if next(task.rounds, None) is not None:
                    raise AssertionError("a message after the gate")
            return True
        finally:
            for task in [*tasks, *last]:
                task.rounds.close()

    def _later_rounds(
        self, tasks: Sequence[_Task], means: list[torch.Tensor], joining: list[_Task]
    ) -> Generator[None, None, list[torch.Tensor]]:
        """All rounds after the first, the messages of all tasks as one; returns every mean of the step."""
        all_means = list(means)
        number = 1
        while tasks:
            number += 1
            purpose = f"step {self._step}, round {number} of all buckets"
            for task, mean in zip(tasks, means, strict=True):
                task.advance(mean)
            waiting = [task for task in tasks if task.message is not None]
            tasks = sorted([*waiting, *_in_the_type_of(waiting, joining)], key=_kind)
            joining = []
            messages = [task.message for task in tasks if task.message is not None]
            shared = [self.channel.average(flat, purpose) for flat in _coalesced(messages)]
            if shared:
                yield
            flats = [each.wait() for each in shared]
            all_means += flats
            means = _parted(flats, messages)
        return all_means


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


def _all_finite(means: Sequence[torch.Tensor]) -> bool:
    """Whether every element is finite: one host synchronisation."""
    extremes = [torch.stack(torch.aminmax(mean)).double() for mean in means if mean.numel()]  # NaN wins both
    on_one_device = [pair.to(extremes[0].device, non_blocking=True) for pair in extremes]
    return not extremes or bool(torch.cat(on_one_device).isfinite().all())
