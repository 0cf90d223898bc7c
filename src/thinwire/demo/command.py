"""The `thinwire demo` command: options in, live progress, a table out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.demo.launch import JobInterruptedError, run_job
from thinwire.demo.model import GPT, SIZES
from thinwire.demo.options import ALGORITHMS, DemoOptions
from thinwire.demo.progress import progress_view
from thinwire.demo.records import read_records
from thinwire.demo.report import FOOTNOTE, summarize, summary_table
from thinwire.report.command import write_report


def demo(
    *,
    processes: Annotated[
        int, typer.Option(help="Training processes on this machine.")
    ] = DemoOptions.processes,
    steps: Annotated[int, typer.Option(help="Training steps of each algorithm.")] = DemoOptions.steps,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(ALGORITHMS)}; repeat the option to compare.",
            show_default=" and ".join(DemoOptions.algorithms),
        ),
    ] = None,
    matrix_rank: Annotated[
        int, typer.Option(help="Rank of the low-rank factors: more bytes, more exact.")
    ] = DemoOptions.matrix_rank,
    model_size: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="One of tiny, small, medium; medium, of 10.9 M parameters, is 5 times slower.",
        ),
    ] = DemoOptions.model_size,
    seed: Annotated[int, typer.Option(help="Of the initial model and the batches.")] = DemoOptions.seed,
    output: Annotated[
        Path, typer.Option(help="Folder for the records, one JSONL line a step, and the log.")
    ] = DemoOptions.output,
) -> None:
    """Train a small GPT on Python's own standard library, once per algorithm, and compare them.

    Every algorithm starts from the same model and sees the same batches. The training processes run on this
    machine and exchange gradients with Gloo over its loopback interface. At the end, a page of HTML compares
    them.

    Example: `thinwire demo --steps 100 --algorithm exact --algorithm powersgd`
    """
    options = DemoOptions(
        processes=processes,
        steps=steps,
        algorithms=tuple(algorithm or DemoOptions.algorithms),
        matrix_rank=matrix_rank,
        model_size=model_size,
        seed=seed,
        output=output,
    )
    console = Console(highlight=False)
    console.print(opening(options), soft_wrap=True)
    try:
        train(options, console)
    except JobInterruptedError as interruption:
        typer.echo(f"thinwire: {interruption}", err=True)
        raise typer.Exit(128 + interruption.signal_number) from None
    show_report(options, console)


def opening(options: DemoOptions) -> str:
    """What is about to happen, in one line."""
    # Not on torch's meta device: what that imports takes longer than the largest model.
    parameters = sum(parameter.numel() for parameter in GPT(SIZES[options.model_size]).parameters())
    return (
        f"Training a byte-level GPT of {parameters / 1e6:.1f} M parameters on Python's standard library: "
        f"{options.processes} processes, {options.steps} steps with each of {', '.join(options.algorithms)}."
    )


def train(options: DemoOptions, console: Console) -> None:
    """Run the training job and show its progress."""
    view = progress_view(console, options)
    with view.context():
        run_job(options, view.show)


def show_report(options: DemoOptions, console: Console) -> None:
    """Print the final table from the records on disk, and write the page."""
    summaries = [summarize(read_records(options.record_path(name))) for name in options.algorithms]
    console.print(summary_table(summaries))
    console.print(FOOTNOTE, f"Every step is a line of {options.output}/*.jsonl", sep="\n", soft_wrap=True)
    page = options.output / "report.html"
    write_report([options.record_path(name) for name in options.algorithms], page)
    console.print(f"Compared at length: {page}", soft_wrap=True)
