"""Measure how fast a network is, on the processes that will train."""

from typing import TYPE_CHECKING

from thinwire.lazy import import_later
from thinwire.probe.link_timings import PairTiming, Probe, Timing

__all__ = ["PairTiming", "Probe", "Timing", "probe"]

if TYPE_CHECKING:
    from thinwire.probe.prober import probe
else:
    __getattr__, __dir__ = import_later(__name__, {"probe": "prober"})
