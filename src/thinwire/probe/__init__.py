"""Measure how fast a network is, on the processes that will train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.probe.link_timings import PairTiming, Probe, Timing

if TYPE_CHECKING:
    from thinwire.probe.prober import probe
else:

    def __getattr__(name: str) -> Any:
        """Import `probe` when it is first used: a saved one is read without torch."""
        if name != "probe":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from thinwire.probe.prober import probe  # noqa: PLC0415

        return probe


__all__ = ["PairTiming", "Probe", "Timing", "probe"]


def __dir__() -> list[str]:
    """Return the public names, those not yet imported too."""
    return __all__
