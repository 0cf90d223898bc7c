"""Whether the error memory goes on growing."""

from __future__ import annotations

from statistics import fmean

# Below so many, a quarter of them is noise.
MIN_SAMPLES = 32
MIN_STEPS = 1000
MAX_GROWTH = 1.3
STILL_GROWING = 1.1


class GrowthAlarm:
    """Compares the residual now with that of half as many steps ago.

    Error feedback keeps the residual within a multiple of the gradients: it grows at first, then stays. So
    the residual, as a multiple of what a step sends, is averaged over the second half of all samples and over
    the quarter before, whenever their number has doubled. Growth with the number of steps doubles it, growth
    with its root is 1.4 times. It is an alarm if it is more than 1.3 times twice in succession, the last
    quarter is still 1.1 times the one before, and there were 1 000 steps.
    """

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._grew = False

    def start_anew(self) -> None:
        """Forget all samples: the algorithm or the plan is another one."""
        self._samples, self._grew = [], False

    def growth_after(self, relative_norm: float, step: int) -> float | None:
        """Take a sample; return by how much it grew while their number doubled, if that is an alarm."""
        samples = self._samples
        samples.append(relative_norm)
        count = len(samples)
        # A power of two has a single bit: the number of samples has doubled since the last look.
        if count < MIN_SAMPLES or count & (count - 1):
            return None
        growth = _ratio(samples[count // 2 :], samples[count // 4 : count // 2])
        # A residual that grew and then levelled off is no cause for a warning.
        lately = _ratio(samples[-count // 4 :], samples[count // 2 : -count // 4])
        grew_before, self._grew = self._grew, growth > MAX_GROWTH
        alarms = self._grew and grew_before and lately > STILL_GROWING and step >= MIN_STEPS
        return growth if alarms else None


def _ratio(later: list[float], earlier: list[float]) -> float:
    """Return the mean of some samples over that of earlier ones; 1 where those are zero."""
    before = fmean(earlier)
    return fmean(later) / before if before > 0 else 1.0
