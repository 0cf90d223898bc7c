"""Figures of runs as SVG for a page: their colours are the page's, light or dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.watch.reading import Point, Run
from thinwire.watch.records import NormsRecord, StepRecord

# Matplotlib writes these; the page's style sheet says what they are.
INK, RULE = "#010203", "#040506"
SERIES = 8
COLORS = [f"#07{number:02x}09" for number in range(SERIES)]
PARTS = ("#0a0b00", "#0a0b01", "#0a0b02")
VARIABLES = {
    INK: "--ink",
    RULE: "--rule",
    **{color: f"--series-{number}" for number, color in enumerate(COLORS)},
    **{color: f"--part-{number}" for number, color in enumerate(PARTS)},
}
STYLE: dict[Any, Any] = {
    # Letters stay letters: the page's font draws them, and they can be found and selected.
    "svg.fonttype": "none",
    "font.size": 10,
    # Names are the user's; two dollars in one are no formula.
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": RULE,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "none",
}
SIZE_INCHES = (5.2, 3.1)
SMOOTHED_PARTS = 40
MAP_COLUMNS = 80
MAX_NAME_LENGTH = 36
MAX_LABELS = 600


def logged(runs: Sequence[Run], name: str, across: str) -> str:
    """Draw what was logged under a name; many points are smoothed, and shown faintly as they are.

    Args:
        runs: One line each.
        name: Of the number.
        across: "step" or "seconds".
    """

    def draw(axes: Axes) -> None:
        for number, run in enumerate(runs):
            points = run.points(name)
            at, values = [getattr(point, across) for point in points], [point.value for point in points]
            color = COLORS[number % SERIES]
            if len(points) > 2 * SMOOTHED_PARTS:
                # Smoothed lines hide how much single steps differ.
                axes.plot(at, values, color=color, alpha=0.2, linewidth=0.8)
                axes.plot(at, _smoothed(points), color=color, linewidth=1.8)
            else:
                axes.plot(at, values, "o-", color=color, markersize=4, linewidth=1.8)
        axes.set(xlabel="steps" if across == "step" else "seconds", ylabel=_shortened(name.replace("_", " ")))

    return _svg(draw)


def bytes_against_steps(runs: Sequence[Run]) -> str:
    """Draw what a process has sent so far."""

    def draw(axes: Axes) -> None:
        for number, run in enumerate(runs):
            total, totals = 0.0, []
            for each in run.steps:
                total += each["message_bytes"]
                totals.append(total / 1e6)
            steps = [each["step"] for each in run.steps]
            axes.plot(steps, totals, color=COLORS[number % SERIES], linewidth=1.8)
        # A logarithm has no zero: in its first steps, a local SGD may have sent nothing.
        is_sent = all(each["message_bytes"] > 0 for run in runs for each in run.steps[:1])
        axes.set(xlabel="steps", ylabel="MB sent", yscale="log" if is_sent else "linear")
        axes.yaxis.set_major_formatter("{x:g}")

    return _svg(draw)


def time_bars(runs: Sequence[Run]) -> str:
    """Draw where a step's time goes, medians: waiting for messages, Thinwire's arithmetic, all else."""

    def draw(axes: Axes) -> None:
        left = [0.0] * len(runs)
        for color, name in zip(PARTS, ("waiting", "arithmetic", "all else"), strict=True):
            widths = [1e3 * median(_parts(step)[name] for step in run.steps) for run in runs]
            axes.barh(range(len(runs)), widths, left=left, color=color, height=0.6, label=name)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        # Names at the bars: a legend of many runs would be longer than the picture.
        axes.set_yticks(range(len(runs)), [_shortened(run.name) for run in runs])
        # The first run on top, as in the table.
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.legend(ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        axes.set(xlabel="ms per step, median")

    return _svg(draw, height_inches=1.4 + 0.4 * len(runs))


def error_map(run: Run) -> str:
    """Draw the relative error of each compressed parameter, steps from left to right."""
    labels = labels_of(run)[:MAX_LABELS]
    # Pieces of about equal length, one per column: a long run's records would be finer than pixels.
    count, total = min(MAP_COLUMNS, len(run.norms)), len(run.norms)
    columns = [run.norms[n * total // count : (n + 1) * total // count] for n in range(count)]
    values = [[_mean_error(column, label) for column in columns] for label in labels]

    def draw(axes: Axes) -> None:
        axes.grid(visible=False)
        first, last = run.norms[0]["step"], run.norms[-1]["step"]
        # From 0 to 1 for all runs, so that maps compare.
        image = axes.imshow(
            values,
            aspect="auto",
            interpolation="nearest",
            vmin=0,
            vmax=1,
            # A single record would be a picture without width.
            extent=(first, max(last, first + 1), len(labels), 0),
        )
        axes.set_yticks([0.5 + row for row in range(len(labels))], map(_shortened, labels), fontsize=8)
        axes.set(xlabel="steps")
        bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
        bar.outline.set_visible(False)

    return _svg(draw, height_inches=1.0 + 0.2 * len(labels))


def labels_of(run: Run) -> list[str]:
    """Return the parameters that errors were recorded of."""
    return list(dict.fromkeys(label for each in run.norms for label in each["relative_error"]))


def _svg(draw: Callable[[Axes], None], height_inches: float = SIZE_INCHES[1]) -> str:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the letters are the browser's
        # Not of pyplot, which would keep it, and look for a display.
        figure = Figure(figsize=(SIZE_INCHES[0], height_inches), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        # Without the date: the same runs make the same page.
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(text.getvalue())


def _for_a_page(svg: str) -> str:
    """Return an SVG without a size and names of its own, in the page's colours and letters."""
    # Within HTML there is no XML declaration, and names must be the page's only ones.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # Matplotlib has measured with that font; the reader's machine may lack it.
    svg = svg.replace("'DejaVu Sans', ", "")
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def _shortened(name: str) -> str:
    if len(name) <= MAX_NAME_LENGTH:
        return name
    half = MAX_NAME_LENGTH // 2
    return f"{name[:half]}…{name[-half:]}"


def _smoothed(points: Sequence[Point]) -> list[float]:
    """Return means over the last points."""
    width = max(1, len(points) // SMOOTHED_PARTS)
    # Running sums: one pass, however many points are averaged.
    sums = [0.0, *accumulate(point.value for point in points)]
    starts = [max(0, end - width) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


def _parts(step: StepRecord) -> dict[str, float]:
    """Return the seconds of a step by part; a record may stand for several steps."""
    waiting, arithmetic = step["waiting_seconds"] / step["steps"], step["arithmetic_seconds"] / step["steps"]
    all_else = max(0.0, step["step_seconds"] - waiting - arithmetic)
    return {"waiting": waiting, "arithmetic": arithmetic, "all else": all_else}


def _mean_error(column: Sequence[NormsRecord], label: str) -> float:
    errors = [each["relative_error"].get(label) for each in column]
    known = [error for error in errors if error is not None]
    return fmean(known) if known else math.nan
