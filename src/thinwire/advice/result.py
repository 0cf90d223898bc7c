"""What is advised, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Advice", "Prediction", "choose", "tied"]


@dataclass(frozen=True)
class Prediction:
    """What one way of averaging would cost.

    Attributes:
        name: As it is written in code.
        code: The line to add.
        step_seconds: Predicted.
        low_seconds: A quarter of the steps would be faster.
        high_seconds: A quarter of the steps would be slower.
        message_bytes: What a process sends per step, counted as of an all-reduce.
        memory_bytes: What it keeps between steps.
        is_lossy: Whether the mean is rougher than 16 bits, or the models drift apart for some steps.
        loss_gap_order: 0 where no gap to exact averaging's loss was measured; else, the smaller, the smaller
            was the gap (docs/choosing.md). A hint: your model's may be others.
        averages_less_often: Whether whole models are averaged now and then, in place of gradients.
    """

    name: str
    code: str
    step_seconds: float
    low_seconds: float
    high_seconds: float
    message_bytes: float
    memory_bytes: int
    is_lossy: bool
    loss_gap_order: int
    averages_less_often: bool = False


@dataclass(frozen=True)
class Advice:
    """All predictions, fastest first, and what follows.

    Attributes:
        predictions: Of everything that was considered.
        baseline: Averaging in 16 bits, to compare with.
        best: What is advised: of those that tie with the fastest the one with the smallest loss gap, but an
            approximation only if it wins more than `least_gain` over the fastest of the others.
        tied: The fastest, and those that are no slower for sure: their quartiles overlap with its own.
        break_even_bits_per_second: The link rate below which the fastest compression wins so much over the
            baseline; 0 if never, infinite if always.
        compute_seconds: A step without any averaging, predicted as the others.
        least_gain: What an approximation must win at least, as a share of the baseline's step.
    """

    predictions: tuple[Prediction, ...]
    baseline: Prediction
    best: Prediction
    tied: tuple[Prediction, ...]
    break_even_bits_per_second: float
    compute_seconds: float
    least_gain: float

    @property
    def compress(self) -> bool:
        """Whether compressed messages are advised."""
        return self.best.is_lossy and not self.best.averages_less_often

    @property
    def nothing_to_win(self) -> bool:
        """Whether no averaging at all would win less than `least_gain`, or no message would be smaller."""
        return not self.best.is_lossy and (
            self.compute_seconds > (1 - self.least_gain) * self.best.step_seconds
            or self.compressed_bytes >= self.baseline.message_bytes
        )

    @property
    def compressed_bytes(self) -> float:
        """What a process hands over per step with the smallest compressed messages."""
        compressed = [each for each in self.predictions if each.is_lossy and not each.averages_less_often]
        return min(each.message_bytes for each in compressed)

    low_rank_bytes = compressed_bytes  # its name before there were others


def choose(ranked: Sequence[Prediction], least_gain: float) -> Prediction:
    """Return what to advise; see `Advice.best`.

    Args:
        ranked: Predictions, fastest first.
        least_gain: What an approximation must win at least, as a share of the step.
    """
    careful = [each for each in ranked if not each.is_lossy]
    max_seconds = (1 - least_gain) * careful[0].step_seconds
    worth = [each for each in tied(ranked) if not each.is_lossy or each.step_seconds < max_seconds]
    return min(worth or tied(careful), key=lambda each: (each.loss_gap_order, each.step_seconds))


def tied(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Return the first, and those whose quartiles overlap with its own."""
    return [each for each in ranked if each.low_seconds <= ranked[0].high_seconds]
