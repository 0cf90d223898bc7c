"""A step on one process without any network: when each message is sent, and when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from thinwire.probe.measured_link import Transfer
from thinwire.wire import Collective, wire_bytes

# Returns a collective's time for the bytes that each process contributes.
Network = Callable[[Collective, int], Transfer]


class Sent(NamedTuple):
    """A message."""

    at_seconds: float
    handed_bytes: int
    waited_seconds: float
    collective: Collective = "all_reduce"


class Timeline(NamedTuple):
    """A step: its messages in the order in which they were sent, and its time without a network."""

    sent: tuple[Sent, ...]
    seconds: float

    def wire_bytes(self, members: int) -> int:
        return sum(wire_bytes(message.collective, message.handed_bytes, members) for message in self.sent)

    def step_seconds(self, network: Network) -> float:
        """Return the step's time on a network that carries one message after the other."""
        # A wait for a message that has not arrived delays everything after it, including later messages.
        delay = busy_until = 0.0
        arrivals: list[float] = []
        for seconds, is_wait, index in self._in_order():
            if is_wait:
                delay = max(delay, arrivals[index] - seconds)
            else:
                took = network(self.sent[index].collective, self.sent[index].handed_bytes)
                busy_until = max(busy_until, seconds + delay) + took.busy_seconds
                arrivals.append(busy_until + took.late_seconds)
        return self.seconds + delay

    @property
    def rounds(self) -> int:
        """The longest chain of messages in which each was sent after the wait for the one before."""
        longest, rounds = 0, list[int]()
        for _, is_wait, index in self._in_order():
            if is_wait:
                longest = max(longest, rounds[index])
            else:
                rounds.append(longest + 1)
        return longest

    def _in_order(self) -> list[tuple[float, bool, int]]:
        # At equal times, keep the order of sending.
        sends = [(message.at_seconds, False, index) for index, message in enumerate(self.sent)]
        waits = [(message.waited_seconds, True, index) for index, message in enumerate(self.sent)]
        return sorted(sends + waits)
