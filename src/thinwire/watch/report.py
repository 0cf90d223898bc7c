"""Runs on one page of HTML: a summary, curves in the page's colours, and plans, filled into a template."""

from __future__ import annotations

import io
import re
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import accumulate
from statistics import fmean, median
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

from thinwire.errors import ConfigError
from thinwire.plan import compression_ratio
from thinwire.version import __version__
from thinwire.watch.records import RESERVED, PlanRecord, Run, printable

# A page is to be read, and drawing takes time.
MAX_NAMES, MAX_PLANS = 12, 20
HALF_NAME_LENGTH = 18
WIDTH_INCHES, ROW_INCHES = 9.0, 2.9
SMOOTHED_PARTS = 40
# Matplotlib writes these; the page's style sheet says what they are, in light and dark.
INK, RULE = "#010203", "#040506"
COLORS = [f"#07{number:02x}09" for number in range(8)]
VARIABLES = {INK: "--ink", RULE: "--rule"}
VARIABLES |= {color: f"--series-{number}" for number, color in enumerate(COLORS)}
STYLE: dict[Any, Any] = {
    # Letters stay letters: the page's font draws them, and they can be found and selected.
    "svg.fonttype": "none",
    "font.size": 10,
    # Names are the user's; two dollars in one are no formula.
    "text.parse_math": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), RULE),
}

Line = Sequence[tuple[float, float]]


def report_page(runs: Sequence[Run]) -> str:
    """Return one page of HTML that needs nothing else: no script, no network."""
    if not runs:
        raise ConfigError("there are no runs to report on; give at least one file of a thinwire.Watch")
    for run in runs:
        if not run.steps:
            damage = f": {run.damage}" if run.damage else ""
            raise ConfigError(f"{printable(run.path)} has no step{damage}")
    given = [run.name for run in runs]
    runs = [
        replace(run, name=f"{run.name} ({printable(run.path)})") if given.count(run.name) > 1 else run
        for run in runs
    ]
    names = _logged_names(runs)[:MAX_NAMES]
    template = files("thinwire.watch").joinpath("report.html.j2").read_text(encoding="utf-8")
    # Escaped: names come from files, and a file may come from anywhere. Strict: what is missing is an error,
    # not a blank.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(
        runs=[_summary(run, number % len(COLORS), names) for number, run in enumerate(runs)],
        names=names,
        left_out=left_out(runs),
        curves=_curves(runs, names),
        # The last ones, by which the run ended.
        plans=[
            (run.name, plan["step"], plan["algorithm"], _routes(run, plan))
            for run in runs
            for plan in run.plans[-MAX_PLANS:]
        ],
        series=len(COLORS),
        version=__version__,
    )


def left_out(runs: Sequence[Run]) -> list[str]:
    """Return what the page of these runs does not show, in words."""
    sentences, num_names = [], len(_logged_names(runs))
    if num_names > MAX_NAMES:
        sentences.append(f"of {num_names} names that were logged, the first {MAX_NAMES} are shown")
    for run in (each for each in runs if len(each.plans) > MAX_PLANS):
        plans = f"{len(run.plans)} plans of {reprlib.repr(run.name)}"
        sentences.append(f"of {plans}, the last {MAX_PLANS} are shown")
    return sentences


def _logged_names(runs: Sequence[Run]) -> list[str]:
    """Return the names with a number, in the order in which they were first logged."""
    found = (name for run in runs for each in run.logs for name, value in each.items() if value is not None)
    return [name for name in dict.fromkeys(found) if name not in RESERVED]


def _summary(run: Run, color: int, names: Sequence[str]) -> dict[str, Any]:
    steps, sent, inside, uncompressed = (
        sum(each[name] for each in run.steps)
        for name in ("steps", "message_bytes", "inside_bytes", "gradient_bytes")
    )
    logged = {name: [point.value for point in run.points(name)] for name in names}
    # With `host_check=False` the host does not learn of them; a sum of some would pass for all.
    known = [count for each in run.steps if (count := each["nonfinite_steps"]) is not None]
    machines = f" on {run.machines} machines" if run.machines < run.processes else ""
    return {
        "color": color,
        "name": run.name,
        "algorithm": run.plans[-1]["algorithm"] if run.plans else "",
        "processes": f"{run.processes}{machines}",
        "steps": run.steps[-1]["step"],
        "nonfinite": sum(known) if len(known) == len(run.steps) else "not known",
        "resumed": run.resumed,
        "damage": run.damage,
        "step_ms": 1e3 * median(each["step_seconds"] for each in run.steps),
        # A record may stand for several steps.
        "parts_ms": [
            1e3 * median(each[name] / each["steps"] for each in run.steps)
            for name in ("exposed_seconds", "waiting_seconds", "arithmetic_seconds")
        ],
        "step_megabytes": sent / steps / 1e6,
        "inside_megabytes": inside / steps / 1e6,
        "compression_ratio": compression_ratio(uncompressed, sent),
        # The mean of the last twentieth.
        "last": {name: fmean(each[-max(1, len(each) // 20) :]) for name, each in logged.items() if each},
    }


def _routes(run: Run, plan: PlanRecord) -> list[dict[str, Any]]:
    """Return a plan's lines, and as the last one their sum, as where a plan is printed."""
    errors = run.norms[-1]["relative_error"] if run.norms else {}
    total: dict[str, Any] = {"label": "total", "detail": "", "error": None}
    for name in ("gradient_bytes", "message_bytes"):
        total[name] = sum(each[name] for each in plan["routes"])
    return [*({**each, "error": errors.get(each["label"])} for each in plan["routes"]), total]


def _curves(runs: Sequence[Run], names: Sequence[str]) -> str | None:
    """Return what was logged under each name, and the relative error, as one SVG; None of nothing."""
    panels = list(_panels(runs, names))
    if not panels:
        return None
    rows = (len(panels) + 1) // 2
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the letters are the browser's
        # pyplot would keep it, and look for a display.
        figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * rows), layout="constrained")
        for place, (name, across, lines) in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, 2, place)
            for number, line in enumerate(lines):
                at, values = [point[0] for point in line], [point[1] for point in line]
                color = COLORS[number % len(COLORS)]
                if len(line) > 2 * SMOOTHED_PARTS:
                    # Smoothed lines hide how much single steps differ: these are faint.
                    axes.plot(at, values, color=color, alpha=0.2, linewidth=0.8)
                    axes.plot(at, _smoothed(values), color=color, linewidth=1.8)
                else:
                    axes.plot(at, values, "o-", color=color, markersize=4, linewidth=1.8)
            label = name.replace("_", " ")
            if len(label) > 2 * HALF_NAME_LENGTH:
                label = f"{label[:HALF_NAME_LENGTH]}…{label[-HALF_NAME_LENGTH:]}"
            axes.set(xlabel=across, ylabel=label)
        text = io.StringIO()
        # Without the date: the same runs make the same page.
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(text.getvalue())


def _panels(runs: Sequence[Run], names: Sequence[str]) -> Iterator[tuple[str, str, list[Line]]]:
    """Yield the name of each panel, what it is drawn against, and the points of each run."""
    for name in names:
        points = [run.points(name) for run in runs]
        # A single number is in the table; a curve needs two.
        if any(len(line) > 1 for line in points):
            yield name, "steps", [[(point.step, point.value) for point in line] for line in points]
            yield name, "seconds", [[(point.seconds, point.value) for point in line] for line in points]
    errors: list[Line] = []
    for run in runs:
        by_step = ((each["step"], each["relative_error"].values()) for each in run.norms)
        known = ((step, [error for error in found if error is not None]) for step, found in by_step)
        errors.append([(step, fmean(found)) for step, found in known if found])
    if any(errors):
        yield "relative error, mean of all layers", "steps", errors


def _for_a_page(svg: str) -> str:
    """Return an SVG without its own size and names, in the page's colours and letters."""
    # Within HTML there is no XML declaration, and names must be the page's only ones.
    svg = svg[svg.index("<svg") :]
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # Matplotlib has measured with that font; the reader's machine may lack it.
    svg = svg.replace("'DejaVu Sans', ", "")
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return means over the last values."""
    width = max(1, len(values) // SMOOTHED_PARTS)
    # Running sums: one pass, however many points are averaged.
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - width) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]
