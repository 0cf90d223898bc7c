"""From the records of a run to its final table: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.table import Table

from thinwire.demo.records import StepRecord

LINK_BITS_PER_SECOND = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
FOOTNOTE = (
    "* Computed, not measured: the step without its waiting, plus 2(N-1)/N of its bytes at that rate, as a "
    "ring all-reduce of N processes sends; without overlap, latency ignored."
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What one algorithm did to one run.

    Attributes:
        algorithm: its name.
        processes: how many processes trained together.
        heldout_loss: after the last step, in nats a byte; None if the run stopped before it was measured.
        step_seconds: median.
        waiting_seconds: for messages, median over steps.
        working_seconds: median over steps of the time not spent waiting.
        message_bytes: sent by process 0, mean over steps.
        compression_ratio: uncompressed / compressed, over the whole run.
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
        """The step time on a link of this rate, computed: nothing overlaps, latency is ignored."""
        ring_share = 2 * (self.processes - 1) / self.processes
        return self.working_seconds + 8 * self.message_bytes * ring_share / bits_per_second


def summarize(records: Sequence[StepRecord]) -> Summary:
    """The figures of one algorithm's steps.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("got no records, expected at least one step")
    message_bytes = sum(record.message_bytes for record in records)
    gradient_bytes = sum(record.gradient_bytes for record in records)
    return Summary(
        algorithm=records[-1].algorithm,
        processes=records[-1].processes,
        heldout_loss=records[-1].heldout_loss,
        step_seconds=median(record.step_seconds for record in records),
        waiting_seconds=median(record.waiting_seconds for record in records),
        working_seconds=median(record.step_seconds - record.waiting_seconds for record in records),
        message_bytes=fmean(record.message_bytes for record in records),
        compression_ratio=gradient_bytes / message_bytes if message_bytes else 1.0,
    )


def summary_table(summaries: Sequence[Summary]) -> Table:
    """One column an algorithm, one row a figure."""
    table = Table(title="The same training, once per algorithm")
    table.add_column("a step of process 0")
    for summary in summaries:
        table.add_column(summary.algorithm, justify="right")
    for label, cells in _rows(summaries):
        table.add_row(label, *cells)
    return table


def _rows(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    rows = [
        ("held-out loss, nats/byte", [_loss(summary.heldout_loss) for summary in summaries]),
        ("ms a step (median)", [_ms(summary.step_seconds) for summary in summaries]),
        ("ms waiting (median)", [_ms(summary.waiting_seconds) for summary in summaries]),
        ("MB sent a step", [f"{summary.message_bytes / 1e6:.3f}" for summary in summaries]),
        ("compression ratio", [f"{summary.compression_ratio:.1f}" for summary in summaries]),
    ]
    for name, rate in LINK_BITS_PER_SECOND.items():
        implied = [_ms(summary.implied_step_seconds(rate)) for summary in summaries]
        rows.append((f"ms at {name} *", implied))
    return rows


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _loss(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.3f}"
