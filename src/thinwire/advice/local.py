"""Models that are averaged now and then: the front itself is timed, and what lies between is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from thinwire.advice.timeline import Network, Stopwatch, Timeline
from thinwire.advice.variants import LOCAL_VARIANTS, LocalVariant
from thinwire.errors import ConfigError, GradientError
from thinwire.fronts.local_sgd import LocalSGD
from thinwire.sync import engine_of


@dataclass(eq=False)
class Averaging:
    """A front that averages a whole model after every step of an optimizer which changes nothing.

    Attributes:
        make: Makes it, for an optimizer.
        trained: What the optimizer holds.
        stopwatch: Times it.
        timelines: Of all averagings that were timed so far.
        memory_bytes: Kept between steps, as last counted.
        residual_bytes: As of `Prediction`.
    """

    make: Callable[[torch.optim.Optimizer], LocalSGD]
    trained: list[torch.Tensor]
    stopwatch: Stopwatch
    timelines: list[Timeline] = field(default_factory=list)
    memory_bytes: int = 0
    residual_bytes: int = 0

    def take_turn(self, untimed: int, timed: int) -> None:
        """Average some times, with a front that is made for this turn alone.

        Args:
            untimed: Averagings before those that are timed.
            timed: Those.
        """
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
    kept: list[Any] = [] if front.outer is None else list(front.outer.state.values())
    state_bytes = sum(
        _held_bytes(value)
        for of_parameter in kept
        for value in of_parameter.values()
        if isinstance(value, torch.Tensor)
    )
    # Each averaged tensor has a copy of what all held after the last averaging, in at least 32 bits.
    last_bytes = sum(
        _held_bytes(each) * max(4, each.itemsize) // each.itemsize
        for each in front.module.parameters()
        if each.requires_grad
    )
    return engine_of(front).memory_bytes() + state_bytes + last_bytes


def _held_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of what this process holds of a tensor: of a sharded one its shard."""
    held: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.nbytes


@dataclass(frozen=True, eq=False)
class LocalBench:
    """A way of averaging now and then, and what times its averagings.

    Attributes:
        way: What is priced.
        averaging: Of the whole model at once, with its algorithm.
    """

    way: LocalVariant
    averaging: Averaging

    def extra_seconds(self, network: Network, own_seconds: float) -> float:
        """Return what averaging adds to a step, mean: its arithmetic, and what of its messages is waited for.

        Args:
            network: Tells how long messages take.
            own_seconds: A step without averaging.
        """
        timelines, fragments = self.averaging.timelines, self.way.fragments
        arithmetic_seconds = median(each.seconds for each in timelines)
        # Each fragment has messages of its own: with fewer bytes in each, but as many of them.
        waited_seconds = fragments * median(
            each.step_seconds(lambda kind, handed_bytes: network(kind, -(-handed_bytes // fragments)))
            - each.seconds
            for each in timelines
        )
        # A fragment's messages travel while its delay is computed. The link carries one after the other, so
        # what all fragments hide is no more than the steps between two averagings.
        hidden_steps = min(self.way.every_steps, fragments * self.way.delay_steps)
        exposed_seconds = max(0.0, waited_seconds - hidden_steps * own_seconds)
        return (arithmetic_seconds + exposed_seconds) / self.way.every_steps

    def bytes_per_step(self, members: int) -> tuple[float, float]:
        """Return mean bytes per step: counted as of an all-reduce, and on the wire, each way.

        Args:
            members: Of the group.
        """
        # In the first one processes compare settings as well.
        last = self.averaging.timelines[-1]
        return (
            last.message_bytes(members) / self.way.every_steps,
            last.wire_bytes(members) / self.way.every_steps,
        )


def local_benches(module: nn.Module, stopwatch: Stopwatch) -> list[LocalBench]:
    """Return a bench for each way that this model allows.

    Args:
        module: Is averaged; its parameters stay what they are.
        stopwatch: Of the steps.
    """
    trained: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
    found: list[LocalBench] = []
    for way in LOCAL_VARIANTS:
        try:
            # With all its settings: what a model does not allow (more fragments than layers) is not offered.
            way.front(
                module,
                torch.optim.SGD(trained, lr=0.0),
                every_steps=way.every_steps,
                process_group=stopwatch.transport,
                **way.options,
            )
        except (ConfigError, GradientError):
            continue
        # Distances, delays and outer rates change nothing in how long an averaging of everything takes.
        alike = next(
            (
                each.averaging
                for each in found
                if each.way.front is way.front
                and each.way.options.get("algorithm") == way.options.get("algorithm")
            ),
            None,
        )
        if alike is None:
            given = {"algorithm": way.options["algorithm"]} if "algorithm" in way.options else {}
            make = partial(way.front, module, every_steps=1, process_group=stopwatch.transport, **given)
            alike = Averaging(make, trained, stopwatch)
        found.append(LocalBench(way, alike))
    return found
