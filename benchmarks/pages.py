"""What every result page has: tables, and by what command, when and on what machine it was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

RESULTS_FOLDER = Path(__file__).resolve().parent / "results"
ROOT = RESULTS_FOLDER.parents[1]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def page(title: str, *sections: str) -> str:
    """A markdown page that says how it came about."""
    origin = [
        f"- command: `python {shlex.join([_relative(sys.argv[0]), *sys.argv[1:]])}`",
        f"- date: {datetime.date.today()}",
        f"- machine: {cpu_model()}, {os.cpu_count()} cores; {platform.system()}",
        f"- Python {platform.python_version()}, PyTorch {torch.__version__}",
    ]
    return "\n\n".join([f"# {title}", "\n".join(origin), *sections]) + "\n"


def save(text: str, *name_parts: str | None) -> Path:
    """Write a result page of today, named by the parts that are not None; returns where."""
    path = result_path("md", *name_parts)
    path.write_text(text, encoding="utf-8")
    return path.relative_to(ROOT)


def save_json(value: object, *name_parts: str | None) -> None:
    """Write today's single measurements, for other scripts to read."""
    result_path("json", *name_parts).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def result_path(suffix: str, *name_parts: str | None) -> Path:
    """Where a result of today goes."""
    RESULTS_FOLDER.mkdir(exist_ok=True)
    parts = [str(datetime.date.today()), *(part for part in name_parts if part is not None)]
    return RESULTS_FOLDER / f"{'-'.join(parts)}.{suffix}"


def cpu_model() -> str:
    """The processor's name for itself, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _relative(script: str) -> str:
    """The script as called from the root of the repository."""
    return Path(script).resolve().relative_to(ROOT).as_posix()
