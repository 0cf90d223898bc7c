"""The `thinwire report` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from thinwire.errors import ConfigError
from thinwire.watch import read_run
from thinwire.watch.records import printable


def report(
    *,
    runs: list[Path] = typer.Argument(metavar="RUN.jsonl…", help="Files that thinwire.Watch wrote."),
    output: Path = typer.Option(Path("report.html"), "--output", "-o", help="The page to write."),
) -> None:
    """Compare runs on one page of HTML, to open in a browser.

    It has bytes and times in a table, loss and relative error as curves, and the plans.

    Example: `thinwire report exact.jsonl powersgd.jsonl -o report.html`
    """
    write_report(runs, output)
    print(f"saved as {printable(output)}")


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Read runs, up to their damage if there is any, which is printed, and write the page."""
    # Writing the page would destroy the run.
    if output.resolve() in [path.resolve() for path in paths]:
        raise ConfigError(f"{printable(output)} is one of the files to read; give a different --output")
    from thinwire.watch.report import left_out, report_page  # noqa: PLC0415 - slow to import, needed here alone

    runs = [read_run(path) for path in paths]
    # Made before anything is printed or written: a run without steps leaves an older page alone.
    page = report_page(runs)
    damaged = [f"{printable(run.path)}: {run.damage}" for run in runs if run.damage is not None]
    for sentence in [*damaged, *left_out(runs)]:
        print(f"thinwire: {sentence}", file=sys.stderr)
    output.write_text(page, encoding="utf-8")
