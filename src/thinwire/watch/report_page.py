"""A self-contained HTML page about runs: a table, curves and plans."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from statistics import fmean, median

import matplotlib
import numpy
from matplotlib.figure import Figure

from thinwire.errors import ConfigError
from thinwire.version import __version__
from thinwire.watch.records import SUMMED, Record, Run
from thinwire.wire import compression_ratio

MAX_POINTS = 200  # per curve: drawing takes time
STYLE = """
body { max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem; font: 15px/1.5 sans-serif; }
section { overflow-x: auto; }
svg { width: 100%; height: auto; }
th, td { padding: .3rem .5rem; text-align: right; vertical-align: top; border-bottom: 1px solid #ddd; }
"""


def report_page(runs: Sequence[Run]) -> str:
    """Return an HTML page about runs, without scripts or network."""
    if not runs:
        raise ConfigError("there are no runs to report on; give at least one file of a thinwire.Watch")
    for run in runs:
        if not run.steps:
            raise ConfigError(f"{run.path} has no step" + (f": {run.damage}" if run.damage else ""))
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=f"{run.name} ({run.path})") for run in runs]
    # The name of a file may be no UTF-8, which a page is.
    runs = [replace(run, name=run.name.encode(errors="replace").decode()) for run in runs]
    names = list(dict.fromkeys(name for run in runs for name in run.logged if run.points(name)))
    notes, plans = [], []
    for run in runs:
        notes += [f"{run.name}: {run.damage}"] if run.damage else []
        if run.resumed:
            notes.append(f"{run.name}: resumed {run.resumed}×; steps made twice are shown once")
        for plan in run.plans:
            title = escape(f"{run.name}, from step {plan['step']}: {plan['algorithm']}")
            plans.append(f"<details><summary>{title}</summary>{_table(_routes(run, plan))}</details>")
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>Thinwire: {escape(', '.join(run.name for run in runs))}</title><style>{STYLE}</style>",
        f"<h1>{len(runs)} {'run' if len(runs) == 1 else 'runs'}</h1>",
        *(f"<p>{escape(note)}.</p>" for note in notes),
        _table([summary(run, names) for run in runs]),
        _curves(runs, names),
        "<h2>Plans</h2><p>With the errors that were last read.</p>",
        *plans,
        f"<p>Made by Thinwire {__version__}.</p></html>\n",
    ]
    return "\n".join(parts)


def _table(rows: Sequence[dict[str, str]]) -> str:
    lines = ["".join(f"<th>{escape(name)}</th>" for name in rows[0])]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row.values()) for row in rows]
    return "<section><table>" + "".join(f"\n<tr>{line}</tr>" for line in lines) + "</table></section>"


def summary(run: Run, names: Sequence[str]) -> dict[str, str]:
    """Return a run's facts for a table row, by heading; `names` are its metrics."""
    total = {name: sum(record[name] for record in run.steps) for name in SUMMED}
    # A record may cover several steps.
    times = (
        1e3 * median(record[f"{name}_seconds"] / record["steps"] for record in run.steps)
        for name in ("exposed", "waiting", "arithmetic")
    )
    # With `host_check=False` the host does not know them; a partial sum would look like the total.
    nonfinite = [record["nonfinite_steps"] for record in run.steps]
    # The mean of the last twentieth of a metric's points.
    values = {name: [point.value for point in run.points(name)] for name in names}
    last = {name: f"{fmean(line[-max(1, len(line) // 20) :]):.4g}" for name, line in values.items() if line}
    sent, inside = (total[name] / total["steps"] / 1e6 for name in ("message_bytes", "inside_bytes"))
    return {
        "run": run.name,
        "algorithm": run.plans[-1]["algorithm"] if run.plans else "",
        "processes": f"{run.processes}" + f" on {run.machines} machines" * (run.machines < run.processes),
        "steps": f"{run.steps[-1]['step']}",
        "not finite": "not known" if None in nonfinite else f"{sum(nonfinite)}",
        **{name.replace("_", " "): last.get(name, "") for name in names},
        "ms per step": f"{1e3 * median(record['step_seconds'] for record in run.steps):.1f}",
        "ms exposed / waiting / arithmetic": " / ".join(f"{time:.1f}" for time in times),
        "MB per step": f"{sent:.3g}" + f", inside {inside:.3g}" * (inside > 0),
        "compression ratio": f"{compression_ratio(total['gradient_bytes'], total['message_bytes']):.1f}",
    }


def _routes(run: Run, plan: Record) -> list[dict[str, str]]:
    errors = run.norms[-1]["relative_error"] if run.norms else {}
    sums = {
        name: sum(route[name] for route in plan["routes"]) for name in ("gradient_bytes", "message_bytes")
    }
    return [
        {
            "parameter": route["label"],
            "travels as": route["detail"],
            "bytes before": f"{route['gradient_bytes']:,}",
            "bytes after": f"{route['message_bytes']:,}",
            "relative error": "" if (error := errors.get(route["label"])) is None else f"{error:.3f}",
        }
        for route in [*plan["routes"], {"label": "total", "detail": "", **sums}]
    ]


def _curves(runs: Sequence[Run], names: Sequence[str]) -> str:
    panels = {name: [[(at.step, at.value) for at in run.points(name)] for run in runs] for name in names}
    panels["relative error, mean of all layers"] = [
        [(read["step"], numpy.array([*read["relative_error"].values()], float).mean()) for read in run.norms]
        for run in runs
    ]
    # A single number is in the table; a curve needs two.
    panels = {name: lines for name, lines in panels.items() if any(len(line) > 1 for line in lines)}
    if not panels:
        return ""
    # Text stays text, for the browser to draw. Names are the user's: dollar signs in them are not formulas.
    with matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False, "axes.grid": True}):
        rows = (len(panels) + 1) // 2
        figure = Figure(figsize=(9, 2.9 * rows), layout="constrained")  # pyplot would look for a display
        for number, (name, lines) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(rows, 2, number, xlabel="steps", ylabel=name.replace("_", " ")[:40])
            for run, line in zip(runs, lines, strict=True):
                width = max(1, len(line) // MAX_POINTS)
                # A long line is drawn as means of `width` points each.
                steps, values = numpy.array(line[len(line) % width :]).reshape(-1, width, 2).mean(1).T
                axes.plot(steps, values, ".-", label=run.name)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left")
        drawn = io.StringIO()
        # Without the date, so that the same runs give the same page.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # signs that matplotlib's font lacks: the browser has others
            figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = drawn.getvalue()
    # HTML allows no XML declaration inside.
    return f"<h2>Curves</h2><section>{svg[svg.index('<svg') :]}</section>"
