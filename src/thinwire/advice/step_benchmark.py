"""Steps with one algorithm after the other, without a network; and what they would take on one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import DDPAdapter, adapter_of, switched
from thinwire.advice.losses import BASELINE, Training, expected_losses, priced
from thinwire.advice.prediction import NATIVE, Prediction, code_of
from thinwire.advice.timeline import Stopwatch, Timeline
from thinwire.algorithms import Algorithm
from thinwire.comm import Transport, gather_numbers, own_subgroup
from thinwire.errors import ConfigError
from thinwire.probe.measured_link import MeasuredLink
from thinwire.sync import Engine

if TYPE_CHECKING:
    from thinwire.advice.sharded_subject import ShardedSubject

# Steps of a turn: in their first step adapters agree, plan and compile; in the second they have a residual.
UNTIMED_STEPS, TIMED_STEPS = 2, 3
# One in each direction, so that no algorithm is always the first.
MIN_ROUNDS = 2

OneStep = Callable[[nn.Module], object]
Quartiles = tuple[float, float, float]  # the median comes first


class DDPSubject:
    """A copy of the user's model, in a DDP group of this process only, whose steps are timed."""

    shards: int | None = None  # processes that hold a replica together; None if each holds all of it

    def __init__(self, module: nn.Module, transport: Transport, entered: ExitStack) -> None:
        # In a larger one, DDP would broadcast buffers in each step, among processes that each measure alone.
        group = own_subgroup(1, None)
        entered.callback(dist.destroy_process_group, group)
        self._transport = transport
        self._ddp = DistributedDataParallel(module, process_group=group)
        self.model: nn.Module = self._ddp
        self._adapter: DDPAdapter | None = None
        switched(self._ddp, lambda: self._adapter, "advise")

    @contextmanager
    def averaging_with(self, algorithm: Algorithm | None) -> Iterator[Engine | None]:
        """Average steps with an algorithm, or not at all; what it remembers is freed at the end."""
        if algorithm is None:
            with self._ddp.no_sync():  # DDP calls no hook in there
                yield None
            return
        self._adapter = adapter_of(self._ddp, algorithm, self._transport)
        try:
            yield self._adapter.engine
        finally:
            self._adapter = None


@dataclass
class TimedSteps:
    """Timings of steps with an algorithm, and the bytes that it keeps between them."""

    timelines: list[Timeline] = field(default_factory=list)
    memory_bytes: int = 0
    residual_bytes: int = 0


class PricedSteps:
    """Steps with each priced algorithm, timed or planned, and what they would take on a network."""

    def __init__(
        self, training: Training, transport: Transport, gradient_bytes: int, shards: int | None = None
    ) -> None:
        self.training, self.gradient_bytes = training, gradient_bytes
        self.transport = transport  # between all processes that measure
        self.shards = shards  # processes that hold a replica together
        self.variants, self.losses = priced(), expected_losses(training)
        self.baseline = NATIVE if shards else BASELINE
        self.variants[self.baseline] = self.variants.pop(BASELINE)
        self.losses[self.baseline] = self.losses.pop(BASELINE)
        self.alone = TimedSteps()
        self.timed = {name: TimedSteps() for name in self.variants}

    def predictions(self, link: MeasuredLink, *, round_trip_seconds: float | None = None) -> list[Prediction]:
        """Return a prediction for each algorithm, the mean of what all processes predict. Collective."""
        members, shards = self.training.members, self.shards
        network = partial(link.transfer, round_trip_seconds=round_trip_seconds)
        inside_seconds = link.inside_seconds(self.gradient_bytes)
        seconds = [
            quartile + inside_seconds
            for timed in self.timed.values()
            for quartile in slowest_of([line.step_seconds(network) for line in timed.timelines], members)
        ]
        # All in one message, and alike on all processes, so that all choose alike.
        means = iter(mean_over_processes(seconds, self.transport))
        predictions = []
        for name, timed in self.timed.items():
            last = timed.timelines[-1]
            prediction = Prediction(
                name,
                code_of(name, "FSDP2" if shards else "DDP"),
                step_seconds=next(means),
                low_seconds=next(means),
                high_seconds=next(means),
                # All of a replica send over one link.
                sent_bytes=(shards or 1) * last.wire_bytes(members),
                memory_bytes=timed.memory_bytes,
                is_lossy=not self.variants[name].keeps_16_bits,
                residual_bytes=timed.residual_bytes,
                loss=self.losses[name],
                rounds=last.rounds,
            )
            predictions.append(prediction)
        return predictions

    def compute_seconds(self, num_processes: int) -> Quartiles:
        """Return how long steps take without averaging, and their quartiles. Collective."""
        seconds = [timeline.seconds for timeline in self.alone.timelines]
        # Without averaging, too, the slowest process sets the pace. The spread is that of single ones.
        typical, *_ = slowest_of(seconds, num_processes)
        _, *quartiles = slowest_of(seconds, 1)
        compute, low, high = mean_over_processes([typical, *quartiles], self.transport)
        return compute, low, high


class StepBenchmark(PricedSteps):
    """Steps with one algorithm after the other, each made again for its turn, so that one alone takes memory.

    In several rounds, in one direction and then in the other, so that a busy machine slows all of them.
    """

    def __init__(
        self,
        subject: DDPSubject | ShardedSubject,
        one_step: OneStep,
        stopwatch: Stopwatch,
        training: Training,
        transport: Transport,
    ) -> None:
        trained = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
        gradient_bytes = sum(parameter.nbytes for parameter in trained)
        super().__init__(training, transport, gradient_bytes, subject.shards)
        self.subject, self.one_step, self.stopwatch = subject, one_step, stopwatch

    def run(self, budget_seconds: float, progress: Callable[[str], None]) -> None:
        """Make as many rounds as the time allows, equally many on all processes."""
        turns: list[tuple[TimedSteps, Algorithm | None]] = [(self.alone, None)]
        turns += [(timed, self.variants[name].algorithm) for name, timed in self.timed.items()]
        start, num_rounds, pace, done = time.perf_counter(), MIN_ROUNDS, "", 0
        while done < num_rounds:
            progress(f"round {done + 1} of {num_rounds}, some steps with every algorithm{pace}")
            for timed, algorithm in turns:
                self._take_turn(timed, algorithm)
            turns.reverse()
            done += 1
            if done == MIN_ROUNDS:
                # The mean over all processes: a module that communicates must run equally often everywhere.
                seconds = (time.perf_counter() - start) / done
                (round_seconds,) = mean_over_processes([seconds], self.transport)
                # The budget bends if steps are long: fewer would tell nothing.
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


def slowest_of(seconds: Sequence[float], processes: int) -> Quartiles:
    """Return median and quartiles of the slowest of as many steps as there are processes."""
    # All of k independent steps are below a time with the k-th power of the chance that one is.
    ordered = sorted(seconds)

    def below(share: float) -> float:
        return ordered[math.ceil(len(ordered) * math.pow(share, 1 / processes)) - 1]

    return below(0.5), below(0.25), below(0.75)


def mean_over_processes(numbers: Sequence[float], transport: Transport) -> list[float]:
    """Return the mean of each number over all processes. Collective."""
    everyone = gather_numbers(numbers, transport, "advise: what the processes have measured")
    return [fmean(column) for column in zip(*everyone, strict=True)]
