"""The curves of runs as SVG for a page: their colours are the page's, light or dark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from thinwire.watch.reading import Run

# Matplotlib writes these; the page's style sheet says what they are.
INK, RULE = "#010203", "#040506"
SERIES = 8
COLORS = [f"#07{number:02x}09" for number in range(SERIES)]
VARIABLES = {
    INK: "--ink",
    RULE: "--rule",
    **{color: f"--series-{number}" for number, color in enumerate(COLORS)},
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
WIDTH_INCHES, ROW_INCHES = 9.0, 2.9
SMOOTHED_PARTS = 40
MAX_NAME_LENGTH = 36


def curves(runs: Sequence[Run], names: Sequence[str]) -> str | None:
    """Return what was logged under each name, and the relative error, as one SVG; None if there is no curve.

    Many points are smoothed, and shown faintly as they are.
    """
    panels = list(_panels(runs, names))
    if not panels:
        return None
    rows = (len(panels) + 1) // 2
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the letters are the browser's
        # Not of pyplot, which would keep it, and look for a display.
        figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * rows), layout="constrained")
        for place, (name, across, lines) in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, 2, place)
            for number, line in enumerate(lines):
                at, values = [point[0] for point in line], [point[1] for point in line]
                color = COLORS[number % SERIES]
                if len(line) > 2 * SMOOTHED_PARTS:
                    # Smoothed lines hide how much single steps differ.
                    axes.plot(at, values, color=color, alpha=0.2, linewidth=0.8)
                    axes.plot(at, _smoothed(values), color=color, linewidth=1.8)
                else:
                    axes.plot(at, values, "o-", color=color, markersize=4, linewidth=1.8)
            axes.set(xlabel=across, ylabel=_shortened(name.replace("_", " ")))
        text = io.StringIO()
        # Without the date: the same runs make the same page.
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(text.getvalue())


def _panels(
    runs: Sequence[Run], names: Sequence[str]
) -> Iterator[tuple[str, str, Sequence[Sequence[tuple[float, float]]]]]:
    """Yield the name of each panel, what it is drawn against, and the points of each run."""
    for name in names:
        points = [run.points(name) for run in runs]
        # A single number is in the table; a curve needs two.
        if any(len(line) > 1 for line in points):
            yield name, "steps", [[(point.step, point.value) for point in line] for line in points]
            yield name, "seconds", [[(point.seconds, point.value) for point in line] for line in points]
    errors = [
        [
            (each["step"], fmean(known))
            for each in run.norms
            if (known := [error for error in each["relative_error"].values() if error is not None])
        ]
        for run in runs
    ]
    if any(errors):
        yield "relative error, mean of all layers", "steps", errors


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


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return means over the last values."""
    width = max(1, len(values) // SMOOTHED_PARTS)
    # Running sums: one pass, however many points are averaged.
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - width) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]
