"""What else a machine did while steps were timed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

from thinwire.channel import Transport, gather_bytes, gather_numbers

PROC_STAT = Path("/proc/stat")

# Below, it hardly shows in what is measured.
MIN_SHARE, MIN_SPREAD = 0.1, 0.2

PURPOSE = "advise: what else the machines did"


class ProcessorUse:
    """What the processors of this machine do from now on."""

    def __init__(self) -> None:
        self._own_seconds, self._seconds = time.process_time(), _seconds()

    def others_share(self, transport: Transport) -> float | None:
        """Return the share of the processors that others than the group's processes took. Collective.

        Args:
            transport: Over the group.

        Returns:
            Of the machine where it was largest, the same on all; None where the system does not tell.
        """
        own_seconds = time.process_time() - self._own_seconds
        busy, every = (now - before for now, before in zip(_seconds(), self._seconds, strict=True))
        hosts = gather_bytes(gethostname().encode(), transport, PURPOSE)
        return others_share(hosts, gather_numbers([own_seconds, busy, every], transport, PURPOSE))


def others_share(hosts: Sequence[bytes], seconds: Sequence[Sequence[float]]) -> float | None:
    """Return the largest share of a machine's processors that others than the group's processes took.

    Args:
        hosts: Of each process.
        seconds: Of each process: its own, those of its machine's processors that they were busy, and all of
            them; NaN where the system does not tell.

    Examples:
        >>> others_share([b"one", b"one"], [(1.0, 3.5, 10.0), (2.0, 3.5, 10.0)])
        0.05
    """
    shares = []
    for host in dict.fromkeys(hosts):
        of_host = [row for name, row in zip(hosts, seconds, strict=True) if name == host]
        _, busy, every = of_host[0]
        # NaN fails this, too.
        if every > 0:
            shares.append(max(0.0, busy - sum(own for own, *_ in of_host)) / every)
    return max(shares, default=None)


def disturbance(others: float | None, low_seconds: float, high_seconds: float) -> tuple[str, ...]:
    """Return what makes predictions less certain, in at most one sentence.

    Args:
        others: As of `others_share`.
        low_seconds: A quarter of the steps without averaging were faster.
        high_seconds: A quarter of them were slower.
    """
    found = []
    if others is not None and others > MIN_SHARE:
        found.append(f"other programs took {others:.0%} of the machine's processors")
    if high_seconds > (1 + MIN_SPREAD) * low_seconds:
        found.append(
            f"half of the steps without averaging took {1e3 * low_seconds:.1f} to {1e3 * high_seconds:.1f} ms"
        )
    if not found:
        return ()
    return (f"While it measured, {', and '.join(found)}: on a quiet machine predictions are surer.",)


def _seconds() -> tuple[float, float]:
    """Return the time of all processors that they were busy, and all of it; NaN where nobody tells."""
    try:
        first, *numbers = PROC_STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:  # Linux alone has it
        return math.nan, math.nan
    if first != "cpu":
        return math.nan, math.nan
    # Time that a host of virtual machines gave to others is theirs; that of guests is in `user` already.
    user, nice, system, idle, waiting, *others = (int(each) for each in numbers[:8])
    busy = user + nice + system + sum(others)
    ticks = os.sysconf("SC_CLK_TCK")
    return busy / ticks, (busy + idle + waiting) / ticks
