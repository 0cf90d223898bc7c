"""What work of more than some seconds looks like meanwhile: live on a terminal, plain lines in a pipe."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from thinwire.demo.options import DemoOptions
from thinwire.demo.records import TrainedStep
from thinwire.launch import Terminated, terminated_as_interrupted

AVERAGED_STEPS = 20
PLAIN_LINES = 10
PLAIN_EVERY_SECONDS = 10.0


@contextmanager
def shown_progress(console: Console, options: DemoOptions) -> Iterator[Callable[[TrainedStep], None]]:
    """Show the steps of a run: a bar over all algorithms on a terminal, a few whole lines in a pipe.

    Yields:
        What takes each step and shows it.
    """
    recent: deque[TrainedStep] = deque(maxlen=AVERAGED_STEPS)
    width, digits = max(map(len, options.algorithms)), len(str(options.steps))
    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=None)
    with Progress(*columns, console=console, expand=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=options.steps * len(options.algorithms))

        def show(step: TrainedStep) -> None:
            # The averages are of one algorithm.
            if recent and recent[-1].algorithm != step.algorithm:
                recent.clear()
            recent.append(step)
            seconds = fmean(each.step_seconds for each in recent)
            megabytes = fmean(each.message_bytes for each in recent) / 1e6
            done = options.steps * options.algorithms.index(step.algorithm) + step.step
            # Of all algorithms: those to come may take longer a step, or less.
            left = options.steps * len(options.algorithms) - done
            line = (
                f"{step.algorithm:>{width}}  step {step.step:>{digits}}/{options.steps}  "
                f"loss {fmean(each.loss for each in recent):.3f}  {1 / seconds:4.1f} steps/s  "
                f"{megabytes / seconds:4.1f} MB/s sent"
            ) + (f"  {left * seconds:.0f} s left in all" if left else "")
            progress.update(bar, completed=done, description=line)
            is_shown = (
                step.step in (1, options.steps) or step.step % max(1, options.steps // PLAIN_LINES) == 0
            )
            if step.step == options.steps if console.is_terminal else is_shown:
                console.print(line, soft_wrap=True, highlight=False, markup=False)

        yield show


@contextmanager
def shown_measuring(console: Console, budget_seconds: float) -> Iterator[Callable[[str], None]]:
    """Show what is being measured, and the time left; in a pipe, that it is. Say that an end keeps nothing.

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
    """Show which check is under way, and the time left; in a pipe a line at most every 10 s."""
    begun = shown = clock()
    done = 0

    def show(name: str) -> None:
        nonlocal shown, done
        now = clock()
        left = f"about {(now - begun) / done * (total - done):.0f} s left" if done else "under a minute left"
        done += 1
        line = f"check {done} of {total}, {left}: {name}"
        status.update(escape(line))
        if not console.is_terminal and now - shown >= PLAIN_EVERY_SECONDS:
            shown = now
            console.print(f"thinwire: {line}", soft_wrap=True, highlight=False, markup=False)

    with console.status("") as status:
        yield show
