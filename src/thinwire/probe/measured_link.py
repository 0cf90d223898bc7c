"""The model of a link: how long any collective takes on it, from the averagings that a probe has timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thinwire.checks import whole_number
from thinwire.comm import Collective, round_trips_over_gloo, wire_bytes
from thinwire.probe.link_timings import Probe, Timing, ring_share


class Transfer(NamedTuple):
    """How long a message keeps the link busy, and how much later than that it has arrived."""

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
        members: That exchange messages.
        shards: Processes of a machine that hold a replica together, and share its one link.
        processes: Of a machine, that average inside of it first, and then send what a single one would.
        is_stated: Whether nothing was measured: the probe is made up of a rate and a round trip.
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
        """Return the link between machines of some processes; inside of a machine averaging takes no time."""
        machines = whole_number("machines", machines, minimum=2)
        processes = whole_number("gpus", processes, minimum=1)
        # Any two sizes tell the rate, and a message of nothing takes half a round trip.
        per_byte = 8 * ring_share(machines) / bits_per_second
        timings = [Timing(4 + size, [round_trip_seconds / 2 + size * per_byte]) for size in (0, 1 << 24)]
        probe = Probe(machines, "gloo", "cpu", timings, [], [list(range(machines))])
        return cls(probe, machines, processes=processes, is_stated=True)

    @classmethod
    def of(cls, probe: Probe, shards: int = 1) -> MeasuredLink:
        """Return the link between the machines of a probe if they are alike, else between its processes."""
        # Without a rate every large message would seem to take as long as the largest that was probed.
        probe.known_rate()
        sizes = {len(node) for node in probe.nodes} if len(probe.nodes) > 1 else {1}
        if sizes == {1} or len(sizes) > 1:
            return cls(probe, probe.world_size, shards)
        # On machines that hold a replica each, all processes were probed, or else one of each.
        if shards > 1:
            return cls(probe, len(probe.nodes) if sizes == {shards} else probe.world_size, shards)
        return cls(probe, len(probe.nodes), processes=sizes.pop())

    def transfer(
        self, collective: Collective, handed_bytes: int, *, round_trip_seconds: float | None = None
    ) -> Transfer:
        """Return the time of a collective of so many bytes that all processes of a machine make at once.

        Over Gloo also on a link of a different round trip, as fast as the one that was probed.
        """
        sent_bytes = self.wire_bytes(collective, handed_bytes)
        averaged_bytes = sent_bytes / ring_share(self.probe.world_size)
        seconds = self.probe.average_seconds(averaged_bytes)
        if not self.counts_round_trips:
            return Transfer(seconds)  # each message follows the one before to its end
        # An averaging of almost nothing takes half a round trip: so the rest of a wait is known, too.
        probed_seconds = 2 * self.probe.latency_seconds
        if round_trip_seconds is None:
            round_trip_seconds = probed_seconds
        busy_seconds = sent_bytes / self.probe.known_rate()
        late_seconds = self._waiting(collective, handed_bytes, self.members, round_trip_seconds)
        if not self.is_stated:  # whatever else a message of this size has taken
            probed_waiting = self._waiting(
                "all_reduce", averaged_bytes, self.probe.world_size, probed_seconds
            )
            late_seconds += seconds - probed_waiting - busy_seconds
        return Transfer(busy_seconds, max(0.0, late_seconds))

    @property
    def counts_round_trips(self) -> bool:
        """Whether it is known how many round trips a message takes: over Gloo."""
        return self.probe.backend == "gloo"

    def _waiting(
        self, collective: Collective, handed_bytes: float, members: int, round_trip_seconds: float
    ) -> float:
        """Return how long a message waits besides its bytes."""
        round_trips, head_bytes = round_trips_over_gloo(collective, handed_bytes, members)
        seconds = round_trips * round_trip_seconds
        if head_bytes:  # the link is busy with the head while the question for the rest comes
            seconds += max(0.0, round_trip_seconds / 2 - head_bytes / self.probe.known_rate())
        return seconds

    def wire_bytes(self, collective: Collective, handed_bytes: int) -> float:
        """Return a collective's bytes on the link, counted as bytes that take as long as an averaging's."""
        sent = wire_bytes(collective, self.shards * handed_bytes, self.members)
        # The factors are of all processes: of several on a machine, most of an all-to-all leaves it.
        return sent if self.processes > 1 else self.probe.wire_factors.get(collective, 1.0) * sent

    def inside_seconds(self, gradient_bytes: int) -> float:
        """Return how long gradients take to be averaged inside of a machine, and to come back, on a ring.

        As of pairs of processes, one after the other; 0 if none inside of a machine was probed.
        """
        rate = self.probe.pair_bytes_per_second(inside=True) if self.processes > 1 else None
        return ring_share(self.processes) * gradient_bytes / rate if rate else 0.0
