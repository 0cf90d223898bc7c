"""Times steps with one algorithm after the other, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import DDPAdapter, adapter_of, switched
from thinwire.advice.priced_steps import PricedSteps, TimedSteps
from thinwire.advice.stopwatch import Stopwatch
from thinwire.advice.timeline import Timeline
from thinwire.algorithms import Algorithm
from thinwire.comm import Transport, gather_numbers
from thinwire.comm.process_group import own_subgroup
from thinwire.errors import ConfigError
from thinwire.sync import Engine

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
        self._ddp = DistributedDataParallel(module, process_group=group)
        self.model: nn.Module = self._ddp
        self._adapter: DDPAdapter | None = None
        switched(self._ddp, lambda: self._adapter, "advise")

    @contextmanager
    def averaging_with(self, algorithm: Algorithm | None) -> Iterator[Engine | None]:
        """Average steps with an algorithm, or not at all; its state is freed at the end."""
        if algorithm is None:
            with self._ddp.no_sync():  # DDP calls no hooks inside
                yield None
            return
        self._adapter = adapter_of(self._ddp, algorithm, self._transport)
        try:
            yield self._adapter.engine
        finally:
            self._adapter = None


class StepBenchmark:
    """Times steps with each algorithm in turn, attached anew each time, so that only one takes memory."""

    def __init__(self, subject: DDPSubject | ShardedSubject, one_step: OneStep, stopwatch: Stopwatch) -> None:
        self.subject, self.one_step, self.stopwatch = subject, one_step, stopwatch

    def run(self, priced: PricedSteps, budget_seconds: float, progress: Callable[[str], None]) -> None:
        """Make as many rounds as the time allows, the same number on all processes.

        Directions alternate, so that a busy machine slows all algorithms.
        """
        turns: list[tuple[TimedSteps, Algorithm | None]] = [(priced.alone, None)]
        turns += [(timed, priced.variants[name].algorithm) for name, timed in priced.timed.items()]
        start, num_rounds, pace, done = time.perf_counter(), MIN_ROUNDS, "", 0
        while done < num_rounds:
            progress(f"round {done + 1} of {num_rounds}, some steps with every algorithm{pace}")
            for timed, algorithm in turns:
                self._take_turn(timed, algorithm)
            turns.reverse()
            done += 1
            if done == MIN_ROUNDS:
                # The mean over all processes: a module that communicates must run the same number of times.
                seconds = (time.perf_counter() - start) / done
                (round_seconds,) = priced.mean_over_processes([seconds])
                # Long steps may exceed the budget: fewer rounds would measure nothing.
                num_rounds = max(MIN_ROUNDS, int(budget_seconds / round_seconds))
                pace = f", {round_seconds:.1f} s each"

    def _take_turn(self, timed: TimedSteps, algorithm: Algorithm | None) -> None:
        """Time some steps with an algorithm, or without averaging."""
        model, timelines = self.subject.model, list[Timeline]()
        with self.subject.averaging_with(algorithm) as engine:
            for _ in range(UNTIMED_STEPS + TIMED_STEPS):
                model.zero_grad()
                self.stopwatch.start()
                self.one_step(model)
                timelines.append(self.stopwatch.timeline())
            if engine is not None:
                timed.memory_bytes = engine.state.memory_bytes()
                timed.residual_bytes = engine.state.residual_bytes()
        # Hooks are called in a backward pass only.
        if algorithm is not None and not all(timeline.sent for timeline in timelines[UNTIMED_STEPS:]):
            needs = "a backward pass on the model that it is given, through all of its parameters"
            raise ConfigError(f"one_step(model) must run {needs}")
        timed.timelines += timelines[UNTIMED_STEPS:]
        model.zero_grad(set_to_none=True)


def mean_over_processes(numbers: Sequence[float], transport: Transport) -> list[float]:
    """Return the mean of each number over all processes. Collective."""
    everyone = gather_numbers(numbers, transport, "advise: what the processes have measured")
    return [fmean(column) for column in zip(*everyone, strict=True)]
