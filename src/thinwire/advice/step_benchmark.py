"""Times steps with one algorithm after the other, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import DDPAdapter, adapter_of, switched
from thinwire.advice.priced_steps import PricedSteps, Sent, TimedSteps, Timeline
from thinwire.algorithms import Algorithm
from thinwire.comm import Message, Recording, Transport, Work, gather_numbers
from thinwire.comm.process_group import own_subgroup
from thinwire.comm.transport import CombinedWork
from thinwire.errors import ConfigError
from thinwire.sync import Engine
from thinwire.sync.streams import record_event
from thinwire.tensors.accelerators import wait_for

if TYPE_CHECKING:
    from thinwire.advice.sharded_subject import ShardedSubject

# Steps of a turn: adapters agree, plan and compile in the first step, and have a residual from the second on.
UNTIMED_STEPS, TIMED_STEPS = 2, 3
# One in each direction, so that no algorithm always comes first.
MIN_ROUNDS = 2

OneStep = Callable[[nn.Module], object]


class DDPSubject:
    """A copy of the user's model, in a DDP group of this process only, whose steps are timed."""

    shards: int | None = None  # processes that together hold a replica; None if each holds all of it

    def __init__(self, module: nn.Module, transport: Transport, entered: ExitStack) -> None:
        # In a larger group, DDP would broadcast buffers in each step, but each process measures on its own.
        group = own_subgroup(1, None)
        entered.callback(dist.destroy_process_group, group)
        self._transport = transport
        self.model = DistributedDataParallel(module, process_group=group)
        self._adapter: DDPAdapter | None = None
        switched(self.model, lambda: self._adapter, "advise")

    @contextmanager
    def averaging_with(self, algorithm: Algorithm | None) -> Iterator[Engine | None]:
        """Average steps with an algorithm, or not at all; its state is freed at the end."""
        if algorithm is None:
            with self.model.no_sync():  # DDP calls no hooks inside
                yield None
            return
        self._adapter = adapter_of(self.model, algorithm, self._transport)
        try:
            yield self._adapter.engine
        finally:
            self._adapter = None


class StepBenchmark:
    """Times steps with each algorithm in turn, on processes that send nothing: a `LoopbackTransport` answers.

    On an accelerator, device events show when it has made a message, and when its stream would wait.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._mark: Callable[[], Any] = time.perf_counter
        if device.type != "cpu":
            # On the current stream: hooks may run on a different one than the training loop.
            self._mark = partial(record_event, device)
        self.transport = Recording(LoopbackTransport(size), self._mark)

    def run(
        self,
        subject: DDPSubject | ShardedSubject,
        one_step: OneStep,
        steps: PricedSteps,
        budget_seconds: float,
        progress: Callable[[str], None],
    ) -> None:
        """Make as many rounds as the time allows, the same number on all processes.

        Directions alternate, so that a busy machine slows all algorithms.
        """
        turns: list[tuple[TimedSteps, Algorithm | None]] = [(steps.alone, None)]
        turns += [(timed, steps.variants[name].algorithm) for name, timed in steps.timed.items()]
        start, num_rounds, pace, done = time.perf_counter(), MIN_ROUNDS, "", 0
        while done < num_rounds:
            progress(f"round {done + 1} of {num_rounds}, some steps with every algorithm{pace}")
            for timed, algorithm in turns:
                # Attached anew each time, so that only one algorithm takes memory.
                with subject.averaging_with(algorithm) as engine:
                    self._take_turn(timed, engine, subject.model, one_step)
            turns.reverse()
            done += 1
            if done == MIN_ROUNDS:
                # The mean over all processes: a module that communicates must run the same number of times.
                seconds = (time.perf_counter() - start) / done
                (round_seconds,) = steps.mean_over_processes([seconds])
                # Long steps may exceed the budget: fewer rounds would measure nothing.
                num_rounds = max(MIN_ROUNDS, int(budget_seconds / round_seconds))
                pace = f", {round_seconds:.1f} s each"

    def _take_turn(
        self, timed: TimedSteps, engine: Engine | None, model: nn.Module, one_step: OneStep
    ) -> None:
        """Time some steps with an engine, or without averaging."""
        timelines = []
        for _ in range(UNTIMED_STEPS + TIMED_STEPS):
            model.zero_grad()
            timelines.append(self._timeline_of(partial(one_step, model)))
        if engine is not None:
            timed.memory_bytes = engine.state.memory_bytes()
            timed.residual_bytes = engine.state.residual_bytes()
            # Hooks are called in a backward pass only.
            if not all(timeline.sent for timeline in timelines[UNTIMED_STEPS:]):
                needs = "a backward pass on the model that it is given, through all of its parameters"
                raise ConfigError(f"one_step(model) must run {needs}")
        timed.timelines += timelines[UNTIMED_STEPS:]
        model.zero_grad(set_to_none=True)

    def _timeline_of(self, step: Callable[[], object]) -> Timeline:
        """Make a step, and return its messages and its time."""
        self.transport.notes.clear()
        start = self._mark()
        step()
        end = self._mark()
        wait_for(self._device)  # before this, events have no times

        def seconds_until(mark: Any) -> float:
            return float(mark - start if self._device.type == "cpu" else start.elapsed_time(mark) / 1e3)

        sent = []
        for note in self.transport.notes:
            # A message without a wait must have arrived when the next step begins.
            awaited_at = end if note.awaited_at is None else note.awaited_at
            times = seconds_until(note.sent_at), seconds_until(awaited_at)
            sent.append(Sent(times[0], note.handed_bytes, times[1], note.collective))
        return Timeline(tuple(sent), seconds_until(end))


class LoopbackTransport(Transport):
    """A group in which all members send at the same time, and the same values as this one.

    Results have typical values: arithmetic on zeros or garbage might take a different time.
    """

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def start(self, message: Message) -> Work:
        tensor, output = message.tensor, message.output
        if message.collective == "all_reduce" and message.operation == "sum":
            tensor.mul_(self.size)  # mean and maximum of equal tensors need no change
        elif message.collective == "all_gather":
            output.copy_(tensor.expand_as(output))
        elif message.collective == "all_to_all":
            # All send the same: each member sends to this one what this one sends to the first.
            output.copy_(tensor[0].expand_as(output))
        return CombinedWork(lambda: None)


def mean_over_processes(numbers: Sequence[float], transport: Transport) -> list[float]:
    """Return the mean of each number over all processes. Collective."""
    everyone = gather_numbers(numbers, transport, "advise: what the processes have measured")
    return [fmean(column) for column in zip(*everyone, strict=True)]
