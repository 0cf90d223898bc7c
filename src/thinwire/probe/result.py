"""What a probe has found of a network, and what follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from thinwire.errors import ConfigError

__all__ = ["PairTiming", "Probe", "Timing", "nodes_of"]

VERSION = 1

# Two processes are near each other if a message between them takes less than this share of the slowest.
NEAR_BELOW = 1 / 3


@dataclass(frozen=True)
class Timing:
    """An averaging collective of one message size.

    Attributes:
        message_bytes: What each process contributes.
        seconds: Of each repetition, mean over the processes.
    """

    message_bytes: int
    seconds: list[float]

    @property
    def median_seconds(self) -> float:
        """The middle one."""
        return median(self.seconds)

    @property
    def spread_seconds(self) -> float:
        """Between the quartiles; 0 of a single repetition."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4)
        return high - low


@dataclass(frozen=True)
class PairTiming:
    """A message between two processes.

    Attributes:
        processes: Their ranks.
        message_bytes: Its size.
        seconds: One direction, the median.
    """

    processes: tuple[int, int]
    message_bytes: int
    seconds: float


@dataclass(frozen=True)
class Probe:
    """What was measured. `save` and `load` keep it as JSON.

    Attributes:
        world_size: Processes that took part.
        backend: Of the process group.
        device: Where the messages lay, such as "cpu".
        timings: By message size, ascending.
        pairs: Of single pairs of processes, where measured.
        nodes: Process ranks that are near each other; one list if no structure was seen.
    """

    world_size: int
    backend: str
    device: str
    timings: list[Timing]
    pairs: list[PairTiming]
    nodes: list[list[int]]

    @property
    def latency_seconds(self) -> float:
        """The time of an averaging of almost nothing."""
        return self.timings[0].median_seconds

    @property
    def bytes_per_second(self) -> float:
        """What each process's link carries, from the two largest messages, sent as a ring all-reduce does."""
        small, large = self.timings[-2:]
        gained = large.median_seconds - small.median_seconds
        sent = ring_share(self.world_size) * (large.message_bytes - small.message_bytes)
        return sent / gained if gained > 0 else math.inf

    def average_seconds(self, message_bytes: float) -> float:
        """How long an averaging takes: linear between the measured sizes, and beyond the largest."""
        if message_bytes <= self.timings[0].message_bytes:
            return self.latency_seconds
        for small, large in pairwise(self.timings):
            if message_bytes <= large.message_bytes:
                share = (message_bytes - small.message_bytes) / (large.message_bytes - small.message_bytes)
                return small.median_seconds + share * (large.median_seconds - small.median_seconds)
        last = self.timings[-1]
        beyond = ring_share(self.world_size) * (message_bytes - last.message_bytes)
        return last.median_seconds + beyond / self.bytes_per_second

    def to_json(self) -> str:
        """As `load` reads it."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Read what `save` wrote.

        Raises:
            ConfigError: It is not such a file, or of another version.
        """
        try:
            return cls._from_plain(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not what `thinwire probe --save` writes ({error}); measure again"
            ) from error

    @classmethod
    def _from_plain(cls, plain: dict[str, Any]) -> Probe:
        if plain["version"] != VERSION:
            raise ValueError(f"version {plain['version']}, expected {VERSION}")
        timings = [
            Timing(int(each["message_bytes"]), list(map(float, each["seconds"]))) for each in plain["timings"]
        ]
        if len(timings) < 2 or not all(each.seconds for each in timings):
            raise ValueError("there are not two timings")
        return cls(
            world_size=int(plain["world_size"]),
            backend=str(plain["backend"]),
            device=str(plain["device"]),
            timings=timings,
            pairs=[
                PairTiming(
                    (each["processes"][0], each["processes"][1]),
                    int(each["message_bytes"]),
                    float(each["seconds"]),
                )
                for each in plain["pairs"]
            ],
            nodes=[list(map(int, node)) for node in plain["nodes"]],
        )


def ring_share(world_size: int) -> float:
    """How many times a message each process of a ring all-reduce sends."""
    return 2 * (world_size - 1) / world_size


def nodes_of(world_size: int, pairs: Sequence[PairTiming]) -> list[list[int]]:
    """Processes that are joined by pairs that are much faster than the slowest one.

    Examples:
        >>> near, far = PairTiming((0, 1), 1000, 0.001), PairTiming((1, 2), 1000, 0.1)
        >>> nodes_of(3, [near, far])
        [[0, 1], [2]]
    """
    slowest = max((pair.seconds for pair in pairs), default=0.0)
    node_of = list(range(world_size))
    for pair in pairs:
        if pair.seconds < NEAR_BELOW * slowest:
            one, other = (node_of[process] for process in pair.processes)
            node_of = [min(one, other) if node in (one, other) else node for node in node_of]
    nodes = [
        [process for process in range(world_size) if node_of[process] == node]
        for node in sorted(set(node_of))
    ]
    return nodes if len(nodes) < world_size else [list(range(world_size))]
