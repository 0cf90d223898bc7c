"""The `thinwire report` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from thinwire.cli.job import check_output, write_output
from thinwire.errors import ConfigError
from thinwire.watch import read_run


def report(
    *,
    runs: list[Path] = typer.Argument(metavar="RUN.jsonl…", help="Files that thinwire.Watch wrote."),
    output: Path = typer.Option(Path("report.html"), "--output", "-o", help="The page to write."),
) -> None:
    """Write an HTML page that compares runs, to open in a browser.

    It has a table of bytes and times, curves of loss and relative error, and how each parameter is sent.

    Example: `thinwire report exact.jsonl powersgd.jsonl -o report.html`
    """
    check_output("--output", output)
    write_report(runs, output)
    print(f"saved as {output}")


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Read runs, each up to any damage, which is printed, and write the page."""
    if output.resolve() in [path.resolve() for path in paths]:
        raise ConfigError(f"{output} is one of the files to read; give a different --output")
    from thinwire.watch.report_page import report_page  # noqa: PLC0415 - slow to import, needed here alone

    runs = [read_run(path) for path in paths]
    # Make the page first: a run without steps raises, and leaves an older file alone.
    write_output(output, report_page(runs))
    for run in runs:
        if run.damage:
            print(f"thinwire: {run.path}: {run.damage}", file=sys.stderr)
