"""The `thinwire demo` command: options in, live progress, a table out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from thinwire.cli.common import tell_without_numba
from thinwire.cli.report import write_report
from thinwire.demo.model import GPT, SIZES
from thinwire.demo.train import (
    ALGORITHMS,
    DemoOptions,
    JobInterruptedError,
    Summary,
    TrainedStep,
    read_records,
    run_job,
    summarize,
)
from thinwire.errors import ConfigError

ELASTIC_MEMBERS, ELASTIC_SIZE = 3, "tiny"
AVERAGED_STEPS = 20
PLAIN_LINES = 10
FOOTNOTE = (
    "* Computed, not measured: the step without its waiting, plus 2(N-1)/N of its bytes at that rate, as a "
    "ring all-reduce of N processes sends; without overlap, latency ignored."
)


def demo(
    *,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Members that come and go, with DiLoCo: one is killed, and one joins."
        ),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Training processes on this machine.",
            show_default=f"{DemoOptions.processes}; with --elastic, {ELASTIC_MEMBERS}",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps of each algorithm.")] = DemoOptions.steps,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(ALGORITHMS)}; repeat the option to compare.",
            show_default=", ".join(DemoOptions.algorithms),
        ),
    ] = None,
    matrix_rank: Annotated[
        int, typer.Option(help="Rank of the low-rank factors: more bytes, more exact.")
    ] = DemoOptions.matrix_rank,
    model_size: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="One of tiny, small, medium; medium, of 10.9 M parameters, is 5 times slower.",
            show_default=f"{DemoOptions.model_size}; with --elastic, {ELASTIC_SIZE}",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial model and the batches.")] = DemoOptions.seed,
    output: Annotated[
        Path, typer.Option(help="Folder for the records, one line of JSON for each step, and the log.")
    ] = DemoOptions.output,
) -> None:
    """Train a small GPT on Python's own standard library, once per algorithm, and compare them.

    Every algorithm starts from the same model and sees the same batches. The training processes run on this
    machine and exchange gradients with Gloo over its loopback interface. At the end, a page of HTML compares
    them.

    With `--elastic`, members train with DiLoCo instead; one is killed and one joins while you look, and the
    others go on.

    Example: `thinwire demo --steps 100 --algorithm exact --algorithm powersgd`
    """
    if elastic and algorithm:
        raise ConfigError("--elastic trains with DiLoCo in 4 bits; leave --algorithm out")
    usual_processes = ELASTIC_MEMBERS if elastic else DemoOptions.processes
    usual_size = ELASTIC_SIZE if elastic else DemoOptions.model_size
    # Checks everything, before anything starts.
    options = DemoOptions(
        processes=usual_processes if processes is None else processes,
        steps=steps,
        algorithms=tuple(algorithm or DemoOptions.algorithms),
        matrix_rank=matrix_rank,
        model_size=usual_size if model_size is None else model_size,
        seed=seed,
        output=output,
    )
    console = Console(highlight=False)
    try:
        if elastic:
            show_elastic(options, console)
        else:
            # Before processes start, which takes seconds.
            console.print(opening(options), soft_wrap=True)
            with shown_progress(console, options) as show:
                run_job(options, show)
            show_summary(options, console)
    except JobInterruptedError as interruption:
        # Not as an error of ours: the user wanted the end, and a shell knows it by 128 + the signal.
        typer.echo(f"thinwire: {interruption}", err=True)
        raise typer.Exit(128 + interruption.signal_number) from None
    tell_without_numba()


def show_elastic(options: DemoOptions, console: Console) -> None:
    """Run the elastic demo, print what happens, and write the page."""
    # torchft is an extra, and the other demo does without.
    from thinwire.demo.elastic import run_elastic  # noqa: PLC0415
    from thinwire.localsgd.members.torchft_group import torchft_module  # noqa: PLC0415

    torchft_module("torchft")  # before anything is announced that would not come
    console.print(
        f"{options.processes} members train a byte-level GPT with DiLoCo, {options.steps} steps; one will be "
        "killed, and one will join.",
        soft_wrap=True,
    )
    paths = run_elastic(options, lambda line: console.print(line, soft_wrap=True))
    page = options.output / "report.html"
    write_report(paths, page)
    console.print(f"Members, losses and joins as curves: {page}", soft_wrap=True)


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


def opening(options: DemoOptions) -> str:
    """Return what is about to happen, in one line."""
    # Not on torch's meta device: what that imports takes longer than the largest model.
    parameters = sum(parameter.numel() for parameter in GPT(SIZES[options.model_size]).parameters())
    return (
        f"Training a byte-level GPT of {parameters / 1e6:.1f} M parameters on Python's standard library: "
        f"{options.processes} processes, {options.steps} steps with each of {', '.join(options.algorithms)}."
    )


def show_summary(options: DemoOptions, console: Console) -> None:
    """Print the final table from the records on disk, and write the page."""
    paths = [options.record_path(name) for name in options.algorithms]
    console.print(summary_table([summarize(read_records(path)) for path in paths]))
    console.print(FOOTNOTE, f"Every step is a line of {options.output}/*.jsonl", sep="\n", soft_wrap=True)
    page = options.output / "report.html"
    # From the files, as the user can do again with other runs beside them.
    write_report(paths, page)
    console.print(f"Compared at length: {page}", soft_wrap=True)


def summary_table(summaries: Sequence[Summary]) -> Table:
    """Return a table with a column for each algorithm and a row for each figure."""
    table = Table(title="The same training, once per algorithm")
    table.add_column("per step of process 0")
    for summary in summaries:
        table.add_column(summary.algorithm, justify="right")
    for label, cell in FIGURES.items():
        table.add_row(label, *map(cell, summaries))
    return table


def _milliseconds_at(bits_per_second: float) -> Callable[[Summary], str]:
    return lambda summary: f"{1e3 * summary.implied_step_seconds(bits_per_second):.1f}"


FIGURES: dict[str, Callable[[Summary], str]] = {
    # A run that was interrupted has no last step, and no such loss.
    "held-out loss, nats/byte": lambda summary: (
        "not measured" if summary.heldout_loss is None else f"{summary.heldout_loss:.3f}"
    ),
    "ms (median)": lambda summary: f"{1e3 * summary.step_seconds:.1f}",
    "ms waiting (median)": lambda summary: f"{1e3 * summary.waiting_seconds:.1f}",
    "MB sent": lambda summary: f"{summary.message_bytes / 1e6:.3f}",
    "compression ratio": lambda summary: f"{summary.compression_ratio:.1f}",
    "ms at 10 Gbit/s *": _milliseconds_at(1e10),
    "ms at 1 Gbit/s *": _milliseconds_at(1e9),
    "ms at 100 Mbit/s *": _milliseconds_at(1e8),
}
