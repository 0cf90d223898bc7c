"""Models that are averaged now and then: the front itself is timed, and what lies between is computed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from thinwire.advice.timeline import Network, Stopwatch, Timeline
from thinwire.advice.variants import LOCAL_VARIANTS, LocalVariant
from thinwire.errors import ConfigError, GradientError
from thinwire.fronts.local_sgd import LocalSGD
from thinwire.sync import engine_of

__all__ = ["Averaging", "LocalBench", "local_benches"]


@dataclass(eq=False)
class Averaging:
    """A front that averages a whole model after every step of an optimizer which changes nothing.

    Attributes:
        front: Entered.
        optimizer: That it follows.
        stopwatch: Times it.
        timelines: Of all averagings so far.
        memory_bytes: Kept between steps, as last counted.
    """

    front: LocalSGD
    optimizer: torch.optim.Optimizer
    stopwatch: Stopwatch
    timelines: list[Timeline] = field(default_factory=list)
    memory_bytes: int = 0

    def make(self) -> None:
        """Average once."""
        # The optimizer finds no gradients, so all that is timed is the averaging that follows its step.
        self.stopwatch.start()
        self.optimizer.step()
        self.timelines.append(self.stopwatch.timeline())

    def note_memory(self) -> None:
        """Count what is kept between steps: last averages, outer optimizer's state, algorithm's memory."""
        outer = self.front.outer
        kept: list[Any] = [] if outer is None else list(outer.state.values())
        state_bytes = sum(
            _held_bytes(value)
            for of_parameter in kept
            for value in of_parameter.values()
            if isinstance(value, torch.Tensor)
        )
        # Each averaged tensor has a copy of what all held after the last averaging, in at least 32 bits.
        last_bytes = sum(
            _held_bytes(each) * max(4, each.itemsize) // each.itemsize
            for each in self.front.module.parameters()
            if each.requires_grad
        )
        self.memory_bytes = engine_of(self.front).memory_bytes() + state_bytes + last_bytes


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


def local_benches(module: nn.Module, stopwatch: Stopwatch, entered: ExitStack) -> list[LocalBench]:
    """Return a bench for each way that this model allows.

    Args:
        module: Is averaged; its parameters stay what they are.
        stopwatch: Of the steps.
        entered: Leaves the fronts again.
    """
    trained = [each for each in module.parameters() if each.requires_grad]
    found: list[LocalBench] = []
    for way in LOCAL_VARIANTS:
        # Of its own: each front hangs on an optimizer's steps.
        optimizer = torch.optim.SGD(trained, lr=0.0)
        try:
            # With all its settings: what a model does not allow (more fragments than layers) is not offered.
            way.front(
                module,
                optimizer,
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
            front = way.front(module, optimizer, every_steps=1, process_group=stopwatch.transport, **given)
            alike = Averaging(entered.enter_context(front), optimizer, stopwatch)
        found.append(LocalBench(way, alike))
    return found
