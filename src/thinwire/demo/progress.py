"""What a run looks like while it runs: live bars on a terminal, plain lines in a pipe."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from thinwire.demo.options import DemoOptions
from thinwire.demo.records import StepRecord

AVERAGED_STEPS = 20
PLAIN_LINES = 10


class ProgressView(Protocol):
    """Shows steps as they are recorded, while its context is open."""

    def context(self) -> AbstractContextManager[object]:
        """Open while there is progress to show."""

    def show(self, record: StepRecord) -> None:
        """Show one more step."""


def progress_view(console: Console, options: DemoOptions) -> ProgressView:
    """The view that suits where the output goes."""
    return LiveProgress(console, options) if console.is_terminal else PlainProgress(console, options)


class RecentSteps:
    """Averages over the last steps of one algorithm."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=AVERAGED_STEPS)

    def add(self, record: StepRecord) -> None:
        """Take in one more step; a step of another algorithm starts anew."""
        if self._records and self._records[-1].algorithm != record.algorithm:
            self._records.clear()
        self._records.append(record)

    def __str__(self) -> str:
        seconds = sum(record.step_seconds for record in self._records)
        loss = fmean(record.loss for record in self._records)
        steps = len(self._records) / seconds
        megabytes = sum(record.message_bytes for record in self._records) / 1e6 / seconds
        return f"loss {loss:.3f}  {steps:4.1f} steps/s  {megabytes:4.1f} MB/s sent"


class LiveProgress:
    """A bar for each algorithm, redrawn in place."""

    def __init__(self, console: Console, options: DemoOptions) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(min_width=2 * len(str(options.steps)) + 1)),
            TextColumn("{task.fields[recent]}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._recent = RecentSteps()
        self._tasks = {
            name: self._progress.add_task(name, total=options.steps, start=False, recent="")
            for name in options.algorithms
        }

    def context(self) -> AbstractContextManager[object]:
        """Draws inside, and leaves the last state standing."""
        return self._progress

    def show(self, record: StepRecord) -> None:
        """Move the bar of the record's algorithm."""
        self._recent.add(record)
        task = self._tasks[record.algorithm]
        if record.step == 1:
            self._progress.start_task(task)
        self._progress.update(task, completed=record.step, recent=str(self._recent))


class PlainProgress:
    """A line every few steps."""

    def __init__(self, console: Console, options: DemoOptions) -> None:
        self._console, self._steps = console, options.steps
        self._width = max(map(len, options.algorithms))
        self._recent = RecentSteps()

    def context(self) -> AbstractContextManager[object]:
        """Lines need no preparation."""
        return nullcontext()

    def show(self, record: StepRecord) -> None:
        """Print the first step, the last one, and about ten between."""
        self._recent.add(record)
        if record.step in (1, self._steps) or record.step % max(1, self._steps // PLAIN_LINES) == 0:
            step = f"step {record.step:>{len(str(self._steps))}}/{self._steps}"
            self._console.print(
                f"{record.algorithm:>{self._width}}  {step}  {self._recent}", soft_wrap=True, highlight=False
            )
