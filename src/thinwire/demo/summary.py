"""From the records of a run to its figures: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from thinwire.demo.records import TrainedStep
from thinwire.plan import compression_ratio
from thinwire.probe.result import ring_share


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What one algorithm did to one run.

    Attributes:
        algorithm: Its name.
        processes: How many processes trained together.
        heldout_loss: After the last step, in nats per byte; None if the run stopped before it was measured.
        step_seconds: Median over steps.
        waiting_seconds: For messages, median over steps.
        working_seconds: Median over steps of the time not spent waiting.
        message_bytes: Sent by process 0, mean over steps.
        compression_ratio: Uncompressed over compressed bytes, over the whole run.
    """

    algorithm: str
    processes: int
    heldout_loss: float | None
    step_seconds: float
    waiting_seconds: float
    working_seconds: float
    message_bytes: float
    compression_ratio: float

    def implied_step_seconds(self, bits_per_second: float) -> float:
        """Return the step time on a link of this rate, computed: nothing overlaps, latency is ignored."""
        return self.working_seconds + 8 * self.message_bytes * ring_share(self.processes) / bits_per_second


def summarize(steps: Sequence[TrainedStep]) -> Summary:
    """Return the figures of one algorithm's steps.

    Raises:
        ValueError: There are no steps.
    """
    if not steps:
        raise ValueError("got no records, expected at least one step")
    message_bytes = sum(step.message_bytes for step in steps)
    gradient_bytes = sum(step.gradient_bytes for step in steps)
    return Summary(
        algorithm=steps[-1].algorithm,
        processes=steps[-1].processes,
        heldout_loss=steps[-1].heldout_loss,
        step_seconds=median(step.step_seconds for step in steps),
        waiting_seconds=median(step.waiting_seconds for step in steps),
        # Of the differences: medians of two numbers do not subtract to the median of their difference.
        working_seconds=median(step.step_seconds - step.waiting_seconds for step in steps),
        # The mean, unlike above: some algorithms send much in one step of several, and links carry the sum.
        message_bytes=fmean(step.message_bytes for step in steps),
        compression_ratio=compression_ratio(gradient_bytes, message_bytes),
    )
