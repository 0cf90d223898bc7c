"""Does the error memory grow without bound?"""

from __future__ import annotations

from statistics import fmean

__all__ = ["GrowthAlarm"]

LEAST_SAMPLES = 32
MOST_GROWTH = 1.3


class GrowthAlarm:
    """Compares the error owed now with half as many steps ago.

    Error feedback keeps what is owed within a multiple of the gradients: it grows at first, then stays. So
    what is owed, as a multiple of what a step sends, is averaged over the second half of all samples and over
    the quarter before, whenever their number has doubled. Growth with the number of steps doubles it, growth
    with its root is 1.4 times; more than 1.3, twice in succession, is an alarm.
    """

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._grew = False

    def told(self, relative_norm: float) -> float | None:
        """Take a sample; by how much it grew while the number of samples doubled, if that is an alarm."""
        samples = self._samples
        samples.append(relative_norm)
        count = len(samples)
        if count < LEAST_SAMPLES or count & (count - 1):
            return None
        before = fmean(samples[count // 4 : count // 2])
        growth = fmean(samples[count // 2 :]) / before if before > 0 else 1.0
        grew_before, self._grew = self._grew, growth > MOST_GROWTH
        return growth if self._grew and grew_before else None
