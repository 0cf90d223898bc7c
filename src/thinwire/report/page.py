"""The page: a summary, curves and plans, filled into a template."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from statistics import fmean, median
from typing import Any, cast

import jinja2

from thinwire.errors import ConfigError
from thinwire.plan import compression_ratio
from thinwire.report import figures
from thinwire.version import __version__
from thinwire.watch.reading import Run, printable
from thinwire.watch.records import RESERVED, PlanRecord

# A page is to be read, and drawing takes time.
MAX_NAMES = 12
MAX_PLANS = 20


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
    template = files("thinwire.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    # Escaped: names come from files, and a file may come from anywhere. Strict: what is missing is an error,
    # not a blank.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(
        runs=[_summary(run, number, names) for number, run in enumerate(runs)],
        names=names,
        left_out=left_out(runs),
        curves=figures.curves(runs, names),
        # The last ones, by which the run ended.
        plans=[
            (run.name, plan["step"], plan["algorithm"], _routes(run, plan))
            for run in runs
            for plan in run.plans[-MAX_PLANS:]
        ],
        series=figures.SERIES,
        version=__version__,
    )


def left_out(runs: Sequence[Run]) -> list[str]:
    """Return what the page of these runs does not show, in words."""
    sentences = []
    num_names = len(_logged_names(runs))
    if num_names > MAX_NAMES:
        sentences.append(f"of {num_names} names that were logged, the first {MAX_NAMES} are shown")
    for run in runs:
        if len(run.plans) > MAX_PLANS:
            sentences.append(
                f"of {len(run.plans)} plans of {reprlib.repr(run.name)}, the last {MAX_PLANS} are shown"
            )
    return sentences


def _logged_names(runs: Sequence[Run]) -> list[str]:
    """Return the names with a number, in one pass."""
    # In the order in which they were first logged, which is the order the user thinks in.
    found = (name for run in runs for each in run.logs for name, value in each.items() if value is not None)
    return [name for name in dict.fromkeys(found) if name not in RESERVED]


def _summary(run: Run, number: int, names: Sequence[str]) -> dict[str, Any]:
    steps = sum(each["steps"] for each in run.steps)
    sent = sum(each["message_bytes"] for each in run.steps)
    uncompressed = sum(each["gradient_bytes"] for each in run.steps)
    # With `host_check=False` the host does not learn of them; a sum of some would pass for all.
    known = [count for each in run.steps if (count := each["nonfinite_steps"]) is not None]
    return {
        "color": number % figures.SERIES,
        "name": run.name,
        "algorithm": run.plans[-1]["algorithm"] if run.plans else "",
        "processes": str(run.processes)
        + (f" on {run.machines} machines" if run.machines < run.processes else ""),
        "steps": run.steps[-1]["step"],
        "nonfinite": sum(known) if len(known) == len(run.steps) else "not known",
        "resumed": run.resumed,
        "damage": run.damage,
        "step_ms": 1e3 * median(each["step_seconds"] for each in run.steps),
        # A record may stand for several steps.
        "parts_ms": [
            1e3 * median(seconds)
            for seconds in (
                [each["exposed_seconds"] / each["steps"] for each in run.steps],
                [each["waiting_seconds"] / each["steps"] for each in run.steps],
                [each["arithmetic_seconds"] / each["steps"] for each in run.steps],
            )
        ],
        "step_megabytes": sent / steps / 1e6,
        "inside_megabytes": sum(each["inside_bytes"] for each in run.steps) / steps / 1e6,
        "compression_ratio": compression_ratio(uncompressed, sent),
        "last": {name: _last(run, name) for name in names},
    }


def _last(run: Run, name: str) -> float | None:
    """Return the mean of the last twentieth."""
    values = [point.value for point in run.points(name)]
    return fmean(values[-max(1, len(values) // 20) :]) if values else None


def _routes(run: Run, plan: PlanRecord) -> list[dict[str, Any]]:
    shown = ("label", "detail", "gradient_bytes", "message_bytes")
    errors = run.norms[-1]["relative_error"] if run.norms else {}
    routes = [
        {**{name: each.get(name) for name in shown}, "error": errors.get(each["label"])}
        for each in plan["routes"]
    ]
    # The last line is the sum, as where a plan is printed.
    total = {name: sum(cast("int", each[name]) for each in routes) for name in shown[2:]}
    return [*routes, {"label": "total", "detail": "", **total, "error": None}]
