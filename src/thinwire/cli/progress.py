"""What work of more than some seconds looks like meanwhile: live on a terminal, plain lines in a pipe."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from thinwire.demo.options import DemoOptions
from thinwire.demo.records import TrainedStep
from thinwire.end_signals import Terminated, terminated_as_interrupted

AVERAGED_STEPS = 20
PLAIN_LINES = 10
PLAIN_EVERY_SECONDS = 10.0


@contextmanager
def shown_progress(console: Console, options: DemoOptions) -> Iterator[Callable[[TrainedStep], None]]:
    """Show the steps of a run, in the way that suits where the output goes.

    Args:
        console: Where it goes.
        options: The settings of the run.

    Yields:
        What takes each step and shows it.
    """
    recent: deque[TrainedStep] = deque(maxlen=AVERAGED_STEPS)

    def take(step: TrainedStep) -> str:
        # The averages are of one algorithm.
        if recent and recent[-1].algorithm != step.algorithm:
            recent.clear()
        recent.append(step)
        seconds = sum(each.step_seconds for each in recent)
        loss = fmean(each.loss for each in recent)
        megabytes = sum(each.message_bytes for each in recent) / 1e6 / seconds
        return f"loss {loss:.3f}  {len(recent) / seconds:4.1f} steps/s  {megabytes:4.1f} MB/s sent"

    def left(step: TrainedStep) -> str:
        # Of all algorithms: those to come may take longer a step, or less.
        to_come = len(options.algorithms) - 1 - options.algorithms.index(step.algorithm)
        steps = options.steps * to_come + options.steps - step.step
        return f"{steps * fmean(each.step_seconds for each in recent):.0f} s left in all" if steps else ""

    if not console.is_terminal:
        # In a pipe or a file: a few whole lines, no control characters.
        width, digits = max(map(len, options.algorithms)), len(str(options.steps))

        def print_line(step: TrainedStep) -> None:
            averages = take(step)
            if step.step in (1, options.steps) or step.step % max(1, options.steps // PLAIN_LINES) == 0:
                place = f"step {step.step:>{digits}}/{options.steps}"
                line = f"{step.algorithm:>{width}}  {place}  {averages}  {left(step)}"
                console.print(line.rstrip(), soft_wrap=True, highlight=False)

        yield print_line
        return

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        # As wide as it will get, or the line would jump.
        MofNCompleteColumn(table_column=Column(min_width=2 * len(str(options.steps)) + 1)),
        TextColumn("{task.fields[recent]}"),
        TextColumn("{task.fields[left]}"),
        console=console,
        expand=True,
    ) as progress:
        tasks = {
            name: progress.add_task(name, total=options.steps, start=False, recent="", left="")
            for name in options.algorithms
        }

        def move_bar(step: TrainedStep) -> None:
            # Only now: before, another algorithm was training.
            if step.step == 1:
                progress.start_task(tasks[step.algorithm])
            task, averages = tasks[step.algorithm], take(step)
            # Time is told by the bar that moves, not by one that has come to its end.
            in_all = left(step) if step.step < options.steps else ""
            progress.update(task, completed=step.step, recent=averages, left=in_all)

        yield move_bar


@contextmanager
def shown_measuring(console: Console, budget_seconds: float) -> Iterator[Callable[[str], None]]:
    """Show what is being measured, and the time left; in a pipe, that it is. Say that an end keeps nothing.

    Args:
        console: Where it goes.
        budget_seconds: About how long all of it takes.

    Yields:
        What takes the words.

    Raises:
        SystemExit: It was interrupted, or asked to end.
    """
    end = time.monotonic() + budget_seconds

    def show(doing: str) -> None:
        left_seconds = end - time.monotonic()
        # A few steps of a large model take longer than any budget.
        left = f"about {left_seconds:.0f} s left" if left_seconds > 0 else "longer than was asked for"
        status.update(f"{doing}; {left}")

    begin = f"measuring, about {budget_seconds:.0f} s …"
    if not console.is_terminal:
        console.print(f"thinwire: {begin}", soft_wrap=True, highlight=False)
    try:
        with terminated_as_interrupted(), console.status(begin) as status:
            yield show
    except KeyboardInterrupt as interrupt:
        by = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
        console.print(
            f"thinwire: stopped by {by.name}; nothing is kept, the same command begins anew",
            soft_wrap=True,
            highlight=False,
        )
        # As a shell tells an end by a signal.
        raise SystemExit(128 + by) from interrupt


@contextmanager
def shown_checks(
    console: Console, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], None]]:
    """Show which check is under way, and the time left; in a pipe a line at most every 10 s.

    Args:
        console: Where it goes.
        total: How many there are.
        clock: In seconds.

    Yields:
        What takes the name of each check when it begins.
    """
    begun = shown = clock()
    done = 0

    def show(name: str) -> None:
        nonlocal shown, done
        now = clock()
        left = f"about {(now - begun) / done * (total - done):.0f} s left" if done else "under a minute left"
        done += 1
        line = f"check {done} of {total}, {left}: {name}"
        status.update(Text(line))
        if not console.is_terminal and now - shown >= PLAIN_EVERY_SECONDS:
            shown = now
            console.print(f"thinwire: {line}", soft_wrap=True, highlight=False, markup=False)

    with console.status("") as status:
        yield show
