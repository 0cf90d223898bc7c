"""A link's model: how long any collective takes on it, computed from a probe's timed averagings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thinwire.checks import whole_number
from thinwire.probe.link_timings import Probe, Timing, ring_share
from thinwire.wire import Collective, round_trips_over_gloo, wire_bytes


class Transfer(NamedTuple):
    """How long a message keeps the link busy, and how much later it arrives."""

    busy_seconds: float
    late_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The time it takes on a link that carries nothing else."""
        return self.busy_seconds + self.late_seconds


@dataclass(frozen=True)
class MeasuredLink:
    """The link between `members`, processes or machines that average with each other.

    Attributes:
        probe: The timings.
        members: The number of members that exchange messages.
        shards: Processes of a machine that together hold a replica, and share its one link.
        processes: Processes of a machine that average inside it first, and then send as a single one would.
        is_stated: Whether nothing was measured: the probe is made from a given rate and round trip.
    """

    probe: Probe
    members: int
    shards: int = 1
    processes: int = 1
    is_stated: bool = False

    @classmethod
    def of_rate(
        cls, bits_per_second: float, round_trip_seconds: float, machines: int, processes: int = 1
    ) -> MeasuredLink:
        """Return the link between machines with `processes` each; averaging inside them takes no time."""
        machines = whole_number("machines", machines, minimum=2)
        processes = whole_number("gpus", processes, minimum=1)
        # Any two sizes give the rate; an empty message takes half a round trip.
        per_byte = 8 * ring_share(machines) / bits_per_second
        timings = [Timing(4 + size, [round_trip_seconds / 2 + size * per_byte]) for size in (0, 1 << 24)]
        probe = Probe(machines, "gloo", "cpu", timings, [], [list(range(machines))])
        return cls(probe, machines, processes=processes, is_stated=True)

    @classmethod
    def of(cls, probe: Probe, shards: int = 1) -> MeasuredLink:
        """Return the link between a probe's machines if all have as many processes, else its processes."""
        # Without a rate, every larger message would seem to take as long as the largest probed one.
        probe.known_rate()
        sizes = {len(node) for node in probe.nodes} if len(probe.nodes) > 1 else {1}
        size = sizes.pop() if len(sizes) == 1 else 1
        # If each machine holds a replica, either all processes were probed, or one of each machine.
        if size == 1 or shards not in (1, size):
            return cls(probe, probe.world_size, shards)
        return cls(probe, len(probe.nodes), shards, size // shards)

    def transfer(
        self, collective: Collective, handed_bytes: int, *, round_trip_seconds: float | None = None
    ) -> Transfer:
        """Return the time of a collective of this many bytes that all processes of a machine make together.

        Over Gloo it can also be a link with another round trip and the probed rate.
        """
        sent_bytes = self.wire_bytes(collective, handed_bytes)
        averaged_bytes = sent_bytes / ring_share(self.probe.world_size)
        seconds = self.probe.average_seconds(averaged_bytes)
        if not self.counts_round_trips:
            return Transfer(seconds)  # each message starts after the one before has ended
        # An averaging of almost nothing takes half a round trip, which gives the rest of a wait, too.
        probed_seconds = 2 * self.probe.latency_seconds
        if round_trip_seconds is None:
            round_trip_seconds = probed_seconds
        busy_seconds = sent_bytes / self.probe.known_rate()
        late_seconds = self._waiting(collective, handed_bytes, self.members, round_trip_seconds)
        if not self.is_stated:  # add what else a probed message of this size has taken
            probed_wait = self._waiting("all_reduce", averaged_bytes, self.probe.world_size, probed_seconds)
            late_seconds += seconds - probed_wait - busy_seconds
        return Transfer(busy_seconds, max(0.0, late_seconds))

    @property
    def counts_round_trips(self) -> bool:
        """Whether the number of round trips per message is known: over Gloo."""
        return self.probe.backend == "gloo"

    def _waiting(
        self, collective: Collective, handed_bytes: float, members: int, round_trip_seconds: float
    ) -> float:
        """Return how long a message waits, in addition to the time of its bytes."""
        round_trips, head_bytes = round_trips_over_gloo(collective, handed_bytes, members)
        seconds = round_trips * round_trip_seconds
        if head_bytes:  # the link sends the head while the request for the rest arrives
            seconds += max(0.0, round_trip_seconds / 2 - head_bytes / self.probe.known_rate())
        return seconds

    def wire_bytes(self, collective: Collective, handed_bytes: int) -> float:
        """Return a collective's bytes on the link, scaled to take as long as an averaging's bytes."""
        sent = wire_bytes(collective, self.shards * handed_bytes, self.members)
        # The factors are for single processes: from a machine of several, most of an all-to-all leaves it.
        return sent if self.processes > 1 else self.probe.wire_factors.get(collective, 1.0) * sent

    def inside_seconds(self, gradient_bytes: int) -> float:
        """Return how long a machine takes for its reduce-scatter and all-gather of gradients, on a ring.

        Computed from pairs of processes, timed one after the other; 0 if none inside a machine was probed.
        """
        rate = self.probe.pair_bytes_per_second(inside=True) if self.processes > 1 else None
        return ring_share(self.processes) * gradient_bytes / rate if rate else 0.0
