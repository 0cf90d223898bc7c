"""Timing several ways to train in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from in_lab import interface_sent_bytes

__all__ = ["Contender", "Measured", "take_turns"]

# PyTorch's PowerSGD averages whole gradients for at least two steps, and DDP then rebuilds its buckets.
UNTIMED_STEPS = 4


Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Contender(Generic[Batch]):
    """A way to train.

    Attributes:
        step: Takes one step; its argument is drawn before the clock starts.
        period_steps: Steps after which what it does begins again. A turn is that many, or several such.
    """

    step: Callable[[Batch], None]
    period_steps: int = 1


@dataclass
class Measured:
    """What one host measured of one contender.

    Attributes:
        step_ms: Of each step; of a contender with a longer period, its mean in each turn.
        sent_bytes: By this host's interface, per step.
        others_share: Of the machine's processors, what processes outside of the lab took meanwhile, by turn.
    """

    step_ms: list[float] = field(default_factory=list)
    sent_bytes: float = 0.0
    others_share: list[float] = field(default_factory=list)


class ProcessorUse:
    """What the machine's processors do from now on."""

    def __init__(self) -> None:
        self._own_seconds, (self._busy, self._all) = time.process_time(), _jiffies()

    def others_share(self) -> float:
        """Return the share that others than the hosts' processes took. Collective."""
        own_seconds = torch.tensor(time.process_time() - self._own_seconds)
        dist.all_reduce(own_seconds)
        busy, every = _jiffies()
        own = own_seconds.item() * os.sysconf("SC_CLK_TCK")
        return max(0.0, busy - self._busy - own) / max(1, every - self._all)


def _jiffies() -> tuple[int, int]:
    """Return the time of all processors that they were busy, and all of it."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, idle, wait, *interrupts = map(int, first.split()[1:8])
    busy = user + nice + system + sum(interrupts)
    return busy, busy + idle + wait


def take_turns(
    contenders: Mapping[str, Contender[Batch]],
    draw: Callable[[], Batch],
    *,
    rounds: int,
    steps: int,
    untimed_steps: int = UNTIMED_STEPS,
) -> dict[str, Measured]:
    """Time contenders in turns, in another order every round. Collective, between hosts of the lab.

    Args:
        contenders: By name, the same on all hosts.
        draw: Returns what a step takes.
        rounds: Turns of each, after one that does not count.
        steps: Of a turn, at least.
        untimed_steps: Of the first turn, at least.
    """
    found = {name: Measured() for name in contenders}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            contender = contenders[name]
            period_steps = contender.period_steps
            # Whole periods, so that each turn begins where the last one did.
            num_steps = -(-(steps if number else untimed_steps) // period_steps) * period_steps
            dist.barrier()
            before_bytes, took_ms, use = interface_sent_bytes(), list[float](), ProcessorUse()
            for _ in range(num_steps):
                drawn = draw()
                start = time.perf_counter()
                contender.step(drawn)
                took_ms.append(1e3 * (time.perf_counter() - start))
            if number:
                measured = found[name]
                measured.step_ms += took_ms if period_steps == 1 else [mean(took_ms)]
                measured.sent_bytes += (interface_sent_bytes() - before_bytes) / num_steps / rounds
                measured.others_share.append(use.others_share())
    return found
