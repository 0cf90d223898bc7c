"""Timing several ways to train in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from in_lab import interface_sent_bytes
from progress import Kept

# PyTorch's PowerSGD averages whole gradients for at least two steps, and DDP then rebuilds its buckets.
UNTIMED_STEPS = 4


Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Contender(Generic[Batch]):
    """A way to train.

    Attributes:
        step: Takes one step; its argument is drawn before the clock starts. It may return the milliseconds
            that count in place of those of the whole step.
        period_steps: Steps after which what it does begins again. A turn is that many, or several such.
    """

    step: Callable[[Batch], float | None]
    period_steps: int = 1


@dataclass
class Measured:
    """What one host measured of one contender.

    Attributes:
        step_ms: Of each step; of a contender with a longer period, its mean in each turn.
        sent_bytes: By this host's interface, per step.
        others_share: Of the machine's processors, what processes outside of the lab took meanwhile, by turn.
    """

    step_ms: list[float]
    sent_bytes: float
    others_share: list[float]


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
    kept: Kept,
    setting: str,
    untimed_steps: int = UNTIMED_STEPS,
) -> dict[str, Measured]:
    """Time contenders in turns, in a different order every round. Collective, between hosts of the lab.

    Args:
        contenders: By name, the same on all hosts.
        draw: Returns what a step takes.
        rounds: Turns of each, after one that does not count.
        steps: Of a turn, at least.
        kept: Has the turns of a run that was interrupted; the first host adds to it.
        setting: Tells these turns from others that are kept.
        untimed_steps: Of the first turn, at least.
    """
    turns = {(key["name"], key["number"]): turn for key, turn in kept.all() if key["setting"] == setting}
    # All have read before anyone adds.
    dist.barrier()
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            if (name, number) in turns:
                continue
            contender = contenders[name]
            period_steps = contender.period_steps
            # Whole periods, so that each turn begins where the last one did.
            num_steps = -(-(steps if number else untimed_steps) // period_steps) * period_steps
            dist.barrier()
            before_bytes, took_ms, use = interface_sent_bytes(), list[float](), ProcessorUse()
            for _ in range(num_steps):
                drawn = draw()
                start = time.perf_counter()
                counted_ms = contender.step(drawn)
                whole_ms = 1e3 * (time.perf_counter() - start)
                took_ms.append(whole_ms if counted_ms is None else counted_ms)
            # The first turn is each start's own.
            if number:
                turn = {
                    "step_ms": took_ms if period_steps == 1 else [mean(took_ms)],
                    "sent_bytes": (interface_sent_bytes() - before_bytes) / num_steps,
                    "others_share": use.others_share(),
                }
                turns[name, number] = turn
                if dist.get_rank() == 0:
                    kept.add(turn, setting=setting, name=name, number=number)
    found = {}
    for name in contenders:
        of_name = [turns[name, number] for number in range(1, rounds + 1)]
        found[name] = Measured(
            [step for turn in of_name for step in turn["step_ms"]],
            mean(turn["sent_bytes"] for turn in of_name),
            [turn["others_share"] for turn in of_name],
        )
    return found


def turns_done(kept: Kept, settings: Collection[str], names: Collection[str], rounds: int) -> int:
    """Return how many turns of a benchmark's settings and contenders are kept."""
    return sum(
        key["setting"] in settings and key["name"] in names and key["number"] <= rounds
        for key, _ in kept.all()
    )
