"""What else the processors of a machine did while something was measured."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

from thinwire.channel import Transport, gather_bytes, gather_numbers

PROC_STAT = Path("/proc/stat")
PURPOSE = "advise: what else the machines did"


class ProcessorUse:
    """What the processors of this machine do from now on."""

    def __init__(self) -> None:
        self._before = _seconds()

    def others_share(self, transport: Transport) -> float | None:
        """Return the share of the processors that others than the group's processes took. Collective.

        Of the machine where it was largest, the same on all; None if the system does not tell.
        """
        spent = [now - before for now, before in zip(_seconds(), self._before, strict=True)]
        hosts = gather_bytes(gethostname().encode(), transport, PURPOSE)
        return others_share(hosts, gather_numbers(spent, transport, PURPOSE))


def others_share(hosts: Sequence[bytes], seconds: Sequence[Sequence[float]]) -> float | None:
    """Return the largest share of a machine's processors that others than the group's processes took.

    Seconds are of each process: its own, those of its machine's processors that they were busy, and all.

    Examples:
        >>> others_share([b"one", b"one"], [(1.0, 3.5, 10.0), (2.0, 3.5, 10.0)])
        0.05
    """
    shares = []
    for host in set(hosts):
        of_host = [row for name, row in zip(hosts, seconds, strict=True) if name == host]
        _, busy, every = of_host[0]
        if every > 0:  # NaN fails this, too
            shares.append(max(0.0, busy - sum(own for own, *_ in of_host)) / every)
    return max(shares, default=None)


def _seconds() -> tuple[float, float, float]:
    """Return the time of this process, and of all processors: busy, and all of it; NaN if nobody tells."""
    own = time.process_time()
    try:
        first_line, _, _ = PROC_STAT.read_text(encoding="ascii").partition("\n")
    except OSError:  # Linux alone has it
        return own, math.nan, math.nan
    # Time that a host of virtual machines gave to others is theirs; that of guests is in `user` already.
    user, nice, system, idle, waiting, *others = map(int, first_line.split()[1:9])
    busy, ticks = user + nice + system + sum(others), os.sysconf("SC_CLK_TCK")
    return own, busy / ticks, (busy + idle + waiting) / ticks
