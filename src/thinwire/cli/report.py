"""The `thinwire report` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from thinwire.errors import ConfigError
from thinwire.watch import read_run
from thinwire.watch.records import printable


def report(
    *,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.jsonl…", help="Files of a thinwire.Watch.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
) -> None:
    """Compare runs on one page of HTML that needs nothing else.

    Bytes and times in a table, loss and relative error as curves, and the plans.

    Example: `thinwire report exact.jsonl powersgd.jsonl -o report.html`
    """
    write_report(runs, output)
    print(f"saved as {printable(output)}")


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Read runs, up to their damage if there is any, which is printed, and write the page.

    Args:
        paths: Of the runs.
        output: Of the page.

    Raises:
        ConfigError: A file can't be read, or has no step.
        OSError: The page can't be written.
    """
    # Writing the page would destroy the run.
    if output.resolve() in [path.resolve() for path in paths]:
        raise ConfigError(f"{printable(output)} is one of the files to read; give another --output")
    from thinwire.watch.report import left_out, report_page  # noqa: PLC0415 - slow to import, needed here alone

    runs = [read_run(path) for path in paths]
    # Made before anything is printed or written: a run without steps leaves an older page alone.
    page = report_page(runs)
    for run in runs:
        if run.damage is not None:
            print(f"thinwire: {printable(run.path)}: {run.damage}", file=sys.stderr)
    for sentence in left_out(runs):
        print(f"thinwire: {sentence}", file=sys.stderr)
    output.write_text(page, encoding="utf-8")
