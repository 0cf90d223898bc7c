"""Measure how fast a network is, on the processes that will train."""

from thinwire.probe.link_timings import PairTiming, Probe, Timing
from thinwire.probe.prober import probe

__all__ = ["PairTiming", "Probe", "Timing", "probe"]
