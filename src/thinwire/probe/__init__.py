"""How fast is this network? Measured on the processes that will train."""

from thinwire.probe.measure import probe
from thinwire.probe.result import PairTiming, Probe, Timing

__all__ = ["PairTiming", "Probe", "Timing", "probe"]
