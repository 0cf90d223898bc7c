"""What every result page has: tables, statistics, and how, when and on what machine it was measured."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import torch

RESULTS_FOLDER = Path(__file__).resolve().parent / "results"
ROOT = RESULTS_FOLDER.parents[1]
# By degrees of freedom: of a two-sided 95 % interval.
STUDENT_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def spread(values: Sequence[float], form: str) -> str:
    """The mean, ± the standard deviation of several."""
    deviation = f" ± {stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{deviation}"


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of several (Student's t)."""
    return STUDENT_T[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def with_interval(values: Sequence[float], unit: str = "%") -> str:
    """The mean, and the 95 % interval of several."""
    if len(values) < 2:
        return "".join(f"{value:+.2f} {unit}" for value in values) or "not measured"
    mean, half = fmean(values), half_interval(values)
    return f"{mean:+.2f} {unit} ({mean - half:+.2f} to {mean + half:+.2f})"


def page(title: str, *sections: str) -> str:
    """A markdown page that says how it came about."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix()
    origin = [
        f"- command: `python {shlex.join([script, *sys.argv[1:]])}`",
        f"- date: {datetime.date.today()}",
        f"- machine: {cpu_model()}, {os.cpu_count()} cores; {platform.system()}",
        f"- Python {platform.python_version()}, PyTorch {torch.__version__}",
    ]
    return "\n\n".join([f"# {title}", "\n".join(origin), *sections]) + "\n"


def save(text: str, *name_parts: str | None) -> Path:
    """Write a result page of this run, named by the parts that are not None; returns where."""
    path = result_path("md", *name_parts)
    path.write_text(text, encoding="utf-8")
    return path.relative_to(ROOT)


def save_json(value: object, *name_parts: str | None) -> None:
    """Write this run's single measurements, for other scripts to read."""
    result_path("json", *name_parts).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def result_path(suffix: str, *name_parts: str | None) -> Path:
    """Where a result of this run goes."""
    return RESULTS_FOLDER / f"{_new_stem(*name_parts)}.{suffix}"


@cache
def _new_stem(*name_parts: str | None) -> str:
    """Today's first name that no other run's results have, the same for all files of this run."""
    parts = [str(datetime.date.today()), *(part for part in name_parts if part is not None)]
    stem = "-".join(parts)
    names = (stem, *(f"{stem}-run-{number}" for number in range(2, 100)))
    return next(name for name in names if not any(RESULTS_FOLDER.glob(f"{name}.*")))


def cpu_model() -> str:
    """The processor's name for itself, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
