"""Models that are averaged now and then: the front itself is timed, and what lies between is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import nn

from thinwire.advice.timeline import Network, Stopwatch, Timeline
from thinwire.advice.variants import LOCAL_VARIANTS, LocalVariant
from thinwire.errors import ConfigError, GradientError
from thinwire.localsgd import LocalSGD
from thinwire.sync import engine_of


@dataclass(eq=False)
class Averaging:
    """A front that averages a whole model after every step of an optimizer which changes nothing."""

    make: Callable[[torch.optim.Optimizer], LocalSGD]
    trained: list[torch.Tensor]
    stopwatch: Stopwatch
    timelines: list[Timeline] = field(default_factory=list)
    # As of `Prediction`, as last counted.
    memory_bytes: int = 0
    residual_bytes: int = 0

    def take_turn(self, untimed: int, timed: int) -> None:
        """Average some times, with a front that is made for this turn alone."""
        optimizer = torch.optim.SGD(self.trained, lr=0.0)
        with self.make(optimizer) as front:
            for number in range(untimed + timed):
                # The optimizer finds no gradients, so all that is timed is the averaging after its step.
                self.stopwatch.start()
                optimizer.step()
                timeline = self.stopwatch.timeline()
                if number >= untimed:
                    self.timelines.append(timeline)
            self.memory_bytes, self.residual_bytes = _kept_bytes(front), engine_of(front).residual_bytes()


def _kept_bytes(front: LocalSGD) -> int:
    """Return what is kept between steps: last averages, outer optimizer's state, algorithm's memory."""
    kept = [] if front.outer is None else list(front.outer.state.values())
    states = [each for state in kept for each in state.values() if isinstance(each, torch.Tensor)]
    # Each averaged tensor has a copy of what all held after the last averaging, in at least 32 bits.
    last_bytes = sum(
        _held(each).numel() * max(4, each.itemsize)
        for each in front.module.parameters()
        if each.requires_grad
    )
    return engine_of(front).memory_bytes() + sum(_held(each).nbytes for each in states) + last_bytes


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: of a sharded one its shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass(frozen=True, eq=False)
class LocalBench:
    """A way of averaging now and then, and what times averagings of the whole model with its algorithm."""

    way: LocalVariant
    averaging: Averaging

    def extra_seconds(self, network: Network, own_seconds: float) -> float:
        """Return what averaging adds to a step, mean: arithmetic, and what of its messages is waited for."""
        timelines, fragments = self.averaging.timelines, self.way.streaming.fragments
        arithmetic_seconds = median(each.seconds for each in timelines)
        # Each fragment has messages of its own: with fewer bytes in each, but as many of them.
        waited_seconds = fragments * median(
            each.step_seconds(lambda kind, handed_bytes: network(kind, -(-handed_bytes // fragments)))
            - each.seconds
            for each in timelines
        )
        # A fragment's messages travel while its delay is computed. The link carries one after the other, so
        # what all fragments hide is no more than the steps between two averagings.
        hidden_steps = min(self.way.every_steps, fragments * self.way.streaming.delay_steps)
        exposed_seconds = max(0.0, waited_seconds - hidden_steps * own_seconds)
        return float(arithmetic_seconds + exposed_seconds) / self.way.every_steps

    def bytes_per_step(self, members: int) -> tuple[float, float]:
        """Return mean bytes per step: counted as of an all-reduce, and on the wire, each way."""
        # In the first one processes compare settings as well.
        last, every_steps = self.averaging.timelines[-1], self.way.every_steps
        return last.message_bytes(members) / every_steps, last.wire_bytes(members) / every_steps


def local_benches(module: nn.Module, stopwatch: Stopwatch) -> list[LocalBench]:
    """Return a bench for each way that this model allows."""
    trained: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
    # Distances, delays and outer rates change nothing in how long an averaging of everything takes.
    averagings: dict[object, Averaging] = {}
    benches = []
    for way in LOCAL_VARIANTS:
        make = partial(way.front, module, replicas=stopwatch.transport)
        try:
            # With all its settings: what a model does not allow (more fragments than layers) is not offered.
            make(torch.optim.SGD(trained, lr=0.0), every_steps=way.every_steps, **way.options)
        except (ConfigError, GradientError):
            continue
        algorithm = {name: value for name, value in way.options.items() if name == "algorithm"}
        averaging = Averaging(partial(make, every_steps=1, **algorithm), trained, stopwatch)
        alike = way.front, algorithm.get("algorithm")
        benches.append(LocalBench(way, averagings.setdefault(alike, averaging)))
    return benches
