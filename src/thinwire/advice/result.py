"""What is advised, and why."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Advice", "Prediction"]


@dataclass(frozen=True)
class Prediction:
    """What one way of averaging would cost.

    Attributes:
        name: As it is written in code.
        code: The line to add.
        step_seconds: Predicted.
        low_seconds: A quarter of the steps would be faster.
        high_seconds: A quarter of the steps would be slower.
        message_bytes: What a process contributes a step.
        memory_bytes: What it keeps between steps.
        is_lossy: Whether the mean is rougher than 16 bits, or the models drift apart for some steps.
    """

    name: str
    code: str
    step_seconds: float
    low_seconds: float
    high_seconds: float
    message_bytes: float
    memory_bytes: int
    is_lossy: bool


@dataclass(frozen=True)
class Advice:
    """All predictions, fastest first, and what follows.

    Attributes:
        predictions: Of everything that was considered.
        baseline: Averaging in 16 bits, to compare with.
        best: What is advised: the fastest, but an approximation only if it wins more than `least_gain`
            over the fastest of the others.
        break_even_bits_per_second: The link rate below which the fastest low-rank approximation wins so much
            over the baseline; 0 if never, infinite if always.
        compute_seconds: A step without any averaging.
        least_gain: What an approximation must win at least, as a share of the baseline's step.
    """

    predictions: tuple[Prediction, ...]
    baseline: Prediction
    best: Prediction
    break_even_bits_per_second: float
    compute_seconds: float
    least_gain: float

    @property
    def compress(self) -> bool:
        """Whether an approximation is advised."""
        return self.best.is_lossy
