"""The `thinwire demo` command: start the training processes, follow their records, compare them."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.job import exit_if_stopped, make_folder, tell_without_numba
from thinwire.cli.report import write_report
from thinwire.demo.gpt import GPT, SIZES
from thinwire.demo.train import ALGORITHMS, DemoOptions
from thinwire.errors import ThinwireError
from thinwire.launch import LocalJob
from thinwire.watch import read_run

NAMES, USUAL_NAMES = ", ".join(ALGORITHMS), ", ".join(DemoOptions.algorithms)


class JobError(ThinwireError, RuntimeError):
    """The training job failed; the message says where its log is."""


def demo(
    *,
    processes: int = typer.Option(DemoOptions.processes, help="Training processes on this machine."),
    steps: int = typer.Option(DemoOptions.steps, help="Training steps of each algorithm."),
    algorithm: list[str] | None = typer.Option(
        None, metavar="NAME", help=f"One of {NAMES}; may be repeated.", show_default=USUAL_NAMES
    ),
    matrix_rank: int = typer.Option(
        DemoOptions.matrix_rank, help="Matrix rank of PowerSGD: a higher one sends more bytes, more exactly."
    ),
    model_size: str = typer.Option(
        DemoOptions.model_size, help="One of tiny, small and medium (10.9 M parameters, 5 times slower)."
    ),
    seed: int = typer.Option(DemoOptions.seed, help="Seed of the initial model and the batches."),
    output: Path = typer.Option(DemoOptions.output, help="Folder for the records of steps, and the log."),
) -> None:
    """Train a small GPT on Python's own standard library, once per algorithm, and compare them.

    Every algorithm starts from the same model and sees the same batches. The training processes run on this
    machine and exchange gradients with Gloo over its loopback interface. At the end, a page of HTML compares
    them.

    Example: `thinwire demo --steps 100 --algorithm exact --algorithm powersgd`
    """
    # Checks everything before anything starts.
    options = DemoOptions(
        processes=processes,
        steps=steps,
        algorithms=algorithm or DemoOptions.algorithms,
        matrix_rank=matrix_rank,
        model_size=model_size,
        seed=seed,
        output=output,
    )
    make_folder("--output", output)
    console = Console(highlight=False, soft_wrap=True)
    paths = run_algorithms(options, console)
    # From the files, so that the user can repeat it, also with other runs.
    write_report(paths, page := output / "report.html")
    console.print(f"Compared at length: {page}")
    tell_without_numba()


def run_algorithms(options: DemoOptions, console: Console) -> list[Path]:
    """Train with every algorithm, and print the table; return the records."""
    from thinwire.watch.report_page import summary  # noqa: PLC0415 - slow to import

    paths = [options.record_path(name) for name in options.algorithms]
    for path in paths:
        path.unlink(missing_ok=True)  # a watch would continue an existing file, as after a resume
    log_path = Path(options.output, "processes.log")
    parameters = sum(parameter.numel() for parameter in GPT(SIZES[options.model_size]).parameters())
    # Print before processes start, which takes seconds.
    console.print(
        f"Training a byte-level GPT of {parameters / 1e6:.1f} M parameters on Python's standard library: "
        f"{options.processes} processes, {options.steps} steps with each of {', '.join(options.algorithms)}."
    )
    with log_path.open("wb") as log:
        job = LocalJob(options.command(), options.processes, errors=log)
        exit_if_stopped(job.run())
    if job.failure is not None:
        raise JobError(f"the training job failed: {job.failure}; see {log_path}")
    table = Table("", title="The same training, once per algorithm")
    columns = [summary(read_run(path), ["heldout_loss"]) for path in paths]
    for column in columns:
        table.add_column(column["run"], justify="right")
    for label in list(columns[0])[2:]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table, f"Every step is a line of {options.output}/*.jsonl", sep="\n")
    return paths
