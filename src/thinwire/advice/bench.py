"""Steps with one algorithm after the other, without a network; and what they would take on one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from torch import nn

from thinwire.advice.local import LocalBench, local_benches
from thinwire.advice.replicated import Subject
from thinwire.advice.result import Prediction
from thinwire.advice.timeline import Network, Stopwatch, Timeline
from thinwire.advice.words import code_of
from thinwire.channel import Transport, gather_numbers
from thinwire.errors import ConfigError

# Of a turn: in their first step fronts agree, plan and compile, and in the second they have a residual.
UNTIMED_STEPS, TIMED_STEPS = 2, 3
# One in each direction, so that no algorithm is always the first.
MIN_ROUNDS = 2

OneStep = Callable[[nn.Module], object]


class Bench:
    """Steps with one algorithm after the other, each made again for its turn, so that one alone takes memory.

    In several rounds, in one direction and then in the other, so that a busy machine slows all of them.
    """

    def __init__(self, subject: Subject, one_step: OneStep, stopwatch: Stopwatch) -> None:
        self.subject, self.one_step, self.stopwatch = subject, one_step, stopwatch
        self.timelines: dict[str, list[Timeline]] = {name: [] for name in subject.variants}
        # Memory and residual.
        self.kept_bytes: dict[str, tuple[int, int]] = {}
        self.without_averaging: list[Timeline] = []
        self.local = local_benches(subject.module, stopwatch)

    def run(self, budget_seconds: float, transport: Transport, progress: Callable[[str], None]) -> None:
        """Make as many rounds as the time allows, equally many on all processes."""
        averagings = dict.fromkeys(each.averaging for each in self.local)
        turns: list[Callable[[], None]] = [partial(self._turn, name) for name in (None, *self.timelines)]
        turns += [partial(each.take_turn, UNTIMED_STEPS, TIMED_STEPS) for each in averagings]
        start, num_rounds, told, done = time.perf_counter(), MIN_ROUNDS, "", 0
        while done < num_rounds:
            progress(f"round {done + 1} of {num_rounds}, some steps with every algorithm{told}")
            for turn in turns:
                turn()
            turns.reverse()
            done += 1
            if done == MIN_ROUNDS:
                # The mean over all processes: a module that communicates must run equally often everywhere.
                own_seconds = (time.perf_counter() - start) / done
                (round_seconds,) = mean_over_processes([own_seconds], transport)
                # The budget bends where steps are long: fewer would tell nothing.
                num_rounds = max(MIN_ROUNDS, int(budget_seconds / round_seconds))
                told = f", {round_seconds:.1f} s each"

    def predictions(self, network: Network, world_size: int) -> list[Prediction]:
        """Return what each way of averaging would take, its loss unknown."""
        gradients = [self._predicted(name, network, world_size) for name in self.timelines]
        models = [self._predicted_local(each, network, world_size) for each in self.local]
        return gradients + models

    def _turn(self, name: str | None) -> None:
        """Time some steps with an algorithm, or with None without averaging."""
        with self.subject.turn_of(name) as engine:
            found = [self._step() for _ in range(UNTIMED_STEPS + TIMED_STEPS)][UNTIMED_STEPS:]
            if name is None or engine is None:
                self.without_averaging += found
            else:
                self.timelines[name] += found
                self.kept_bytes[name] = engine.memory_bytes(), engine.residual_bytes()
        # Hooks are called in a backward pass only.
        if name is not None and not all(each.sent for each in found):
            raise ConfigError(
                "one_step(model) must run a backward pass on the model that it is given, through all of its "
                "parameters"
            )
        # Without gradients, so that what inner optimizers take is no time at all.
        self.subject.model.zero_grad(set_to_none=True)

    def _step(self) -> Timeline:
        self.subject.model.zero_grad()
        self.stopwatch.start()
        self.one_step(self.subject.model)
        return self.stopwatch.timeline()

    def _predicted(self, name: str, network: Network, world_size: int) -> Prediction:
        timelines, (memory_bytes, residual_bytes) = self.timelines[name], self.kept_bytes[name]
        # Of the last step: in the first one processes compare settings as well. All processes of a replica
        # send over one link.
        wire_bytes = (self.subject.shards or 1) * timelines[-1].wire_bytes(world_size)
        return Prediction(
            name,
            code_of(name, None, is_sharded=self.subject.shards is not None),
            *slowest_of([each.step_seconds(network) for each in timelines], world_size),
            message_bytes=timelines[-1].message_bytes(world_size),
            memory_bytes=memory_bytes,
            is_lossy=not self.subject.variants[name].keeps_16_bits,
            sent_bytes=wire_bytes,
            received_bytes=wire_bytes,
            residual_bytes=residual_bytes,
        )

    def _predicted_local(self, local: LocalBench, network: Network, world_size: int) -> Prediction:
        way, averaging = local.way, local.averaging
        message_bytes, wire_bytes = local.bytes_per_step(world_size)
        wire_bytes *= self.subject.shards or 1
        own_seconds = [each.seconds for each in self.without_averaging]
        step_seconds, *quartiles = slowest_of(own_seconds, world_size)
        extra_seconds = local.extra_seconds(network, step_seconds)
        # Between two averagings nobody waits for anybody: the mean of so many steps varies so much less than
        # one of them does. With the quartiles of single steps, all ways would tie on a machine with other
        # work.
        narrower = math.sqrt(way.every_steps / way.streaming.fragments)
        low_seconds, high_seconds = (step_seconds + (each - step_seconds) / narrower for each in quartiles)
        return Prediction(
            way.name,
            code_of(way.name, way, is_sharded=self.subject.shards is not None),
            step_seconds + extra_seconds,
            low_seconds + extra_seconds,
            high_seconds + extra_seconds,
            message_bytes=message_bytes,
            memory_bytes=averaging.memory_bytes,
            is_lossy=True,
            averages_less_often=True,
            sent_bytes=wire_bytes,
            received_bytes=wire_bytes,
            residual_bytes=averaging.residual_bytes,
        )


def slowest_of(seconds: Sequence[float], world_size: int) -> tuple[float, float, float]:
    """Return median and quartiles of the slowest of as many steps as there are processes."""
    # All of k independent steps are below a time with the k-th power of the chance that one is.
    ordered = sorted(seconds)

    def below(share: float) -> float:
        return ordered[math.ceil(len(ordered) * math.pow(share, 1 / world_size)) - 1]

    return below(0.5), below(0.25), below(0.75)


def mean_over_processes(numbers: Sequence[float], transport: Transport) -> list[float]:
    """Return the mean of each number over all processes. Collective."""
    everyone = gather_numbers(numbers, transport, "advise: what the processes have measured")
    return [fmean(column) for column in zip(*everyone, strict=True)]
