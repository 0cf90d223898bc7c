"""The timings of a probe, the link's latency and rate computed from them, and their file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from statistics import median, quantiles

from thinwire.checks import number, whole_number
from thinwire.errors import ConfigError
from thinwire.wire import Collective

VERSION = 1
# If the quartiles are this many medians apart, something else disturbed the measurement.
DOUBTFUL_SPREAD = 5
# The time of shorter messages is mostly latency.
LEAST_PAIR_BYTES = 1 << 16


@dataclass(frozen=True)
class Timing:
    """Timings of averagings with one message size, in bytes that each process contributes.

    `seconds` has the time of each repetition, the mean over the processes.
    """

    message_bytes: int
    seconds: list[float]

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def spread_seconds(self) -> float:
        """The time between the quartiles; 0 for a single repetition."""
        return self.quartiles[1] - self.quartiles[0]

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of the repetitions."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = quantiles(self.seconds, n=4)
        return low, high


@dataclass(frozen=True)
class PairTiming:
    """A message between two ranks; `seconds` is the time of one direction, the fastest of several."""

    processes: tuple[int, int]
    message_bytes: int
    seconds: float


@dataclass(frozen=True)
class Probe:
    """The measurements of a probe. `save` and `load` keep them as JSON.

    Attributes:
        world_size: The number of processes that took part.
        backend: The process group's backend.
        device: The device of the messages, such as "cpu".
        timings: Timings of averagings, by ascending message size.
        pairs: Timings of single pairs of processes.
        nodes: The ranks on each machine, as `attach` finds machines; all in one list if it finds none.
        wire_factors: How much longer a collective takes than an averaging that puts as many bytes on the
            wire, if measured: at least 1; 2 if two processes send one after the other.
        hosts: Name of each process's machine, by rank; empty if not known.
    """

    world_size: int
    backend: str
    device: str
    timings: list[Timing]
    pairs: list[PairTiming]
    nodes: list[list[int]]
    wire_factors: dict[Collective, float] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)

    # Every message of a prediction needs both.
    @cached_property
    def latency_seconds(self) -> float:
        """The time of an averaging of almost nothing."""
        return self.timings[0].median_seconds

    @cached_property
    def bytes_per_second(self) -> float | None:
        """The rate of each process's link in a ring; None if no message clearly took longer than another."""
        # From the largest message, and the largest one whose quartiles are clearly lower: costs that don't
        # depend on the size cancel in the difference.
        large = self.timings[-1]
        for small in reversed(self.timings[:-1]):
            if small.quartiles[1] < large.quartiles[0]:
                sent = ring_share(self.world_size) * (large.message_bytes - small.message_bytes)
                return sent / (large.median_seconds - small.median_seconds)
        return None

    def known_rate(self) -> float:
        """Return `bytes_per_second`; ConfigError if it is unknown."""
        if self.bytes_per_second is not None:
            return self.bytes_per_second
        least, most = self.timings[0].message_bytes, self.timings[-1].message_bytes
        raise ConfigError(
            f"the link's rate is not known: {most:,} bytes were not measurably slower than {least:,}; "
            "probe again with a larger budget_seconds (--budget-seconds), on idle machines"
        )

    @property
    def doubt(self) -> str:
        """A sentence with the reason to doubt this probe; "" if there is none."""
        for timing in self.timings:
            if timing.spread_seconds > DOUBTFUL_SPREAD * timing.median_seconds:
                spread = f"bytes had a spread of over {DOUBTFUL_SPREAD} times their median"
                again = "probe again while nothing else uses the machines and the network"
                return f"averagings of {timing.message_bytes:,} {spread}; {again}"
        return ""

    def pair_bytes_per_second(self, *, inside: bool) -> float | None:
        """Return the rate of links inside `nodes`, or between them; None if it is unknown."""
        node_of = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        rates = [
            pair.message_bytes / pair.seconds
            for pair in self.pairs
            if (node_of.get(pair.processes[0]) == node_of.get(pair.processes[1])) == inside
            and pair.message_bytes >= LEAST_PAIR_BYTES
        ]
        return median(rates) if rates else None

    def average_seconds(self, message_bytes: float) -> float:
        """Return an averaging's time: linear between the measured sizes, and beyond the largest."""
        # Below the smallest size there is only latency.
        if message_bytes <= self.timings[0].message_bytes:
            return self.latency_seconds
        for small, large in pairwise(self.timings):
            if message_bytes <= large.message_bytes:
                share = (message_bytes - small.message_bytes) / (large.message_bytes - small.message_bytes)
                return small.median_seconds + share * (large.median_seconds - small.median_seconds)
        beyond = ring_share(self.world_size) * (message_bytes - large.message_bytes)
        return large.median_seconds + beyond / self.known_rate()

    def to_json(self) -> str:
        """Return it as text, which `from_json` parses."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` and `thinwire advise --probe` read; OSError if it can't be written."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Probe:
        """Read a file that `save` wrote; ConfigError if it can't be read, or is not such a file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; give a saved probe") from error
        except ValueError as error:
            wrote = "is not what `thinwire probe --save` writes"
            raise ConfigError(f"{path} {wrote} ({error}); measure again") from error

    @classmethod
    def from_json(cls, text: str) -> Probe:
        """Parse the result of `to_json`; ValueError if it is not one, or from a different version."""
        plain = json.loads(text)
        try:
            if plain["version"] != VERSION:
                raise ValueError(f"version {plain['version']!r:.40}, expected {VERSION}")
            plain["timings"] = [Timing(**timing) for timing in plain["timings"]]
            plain["pairs"] = [
                PairTiming(**pair | {"processes": tuple(pair["processes"])}) for pair in plain["pairs"]
            ]
            read = cls(**{known.name: plain[known.name] for known in fields(cls)})
            read._check()
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a field is missing or of a wrong type: {error}") from error
        return read

    def _check(self) -> None:
        whole_number("world_size", self.world_size, minimum=2)
        for name in (self.backend, self.device, *self.hosts):
            if not name.isprintable():  # a terminal would obey it
                raise ValueError(f"{name!r:.40} is no name")
        for rank in chain(*self.nodes, *(pair.processes for pair in self.pairs)):
            whole_number("a process", rank, minimum=0)
        for seconds in chain(*(timing.seconds for timing in self.timings), (p.seconds for p in self.pairs)):
            number("seconds", seconds, minimum=0)
        for factor in self.wire_factors.values():
            number("wire_factors", factor, minimum=1)
        sizes = [whole_number("message_bytes", t.message_bytes, minimum=1) for t in self.timings if t.seconds]
        # `average_seconds` divides by the difference of neighbouring sizes.
        if len(sizes) < max(2, len(self.timings)) or sizes != sorted(set(sizes)):
            raise ValueError("timings must be two or more, of ascending message_bytes, none without seconds")


def ring_share(world_size: int) -> float:
    """Return how many times a message each process of a ring all-reduce sends."""
    return 2 * (world_size - 1) / world_size
