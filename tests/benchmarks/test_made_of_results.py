"""docs/results.md is what `benchmarks/results_page.py` makes of the files of results."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"  # of modules, but no package


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_the_page_is_made_from_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: `python benchmarks/results_page.py`."""
    page = script("results_page", monkeypatch)
    text = page.text()
    assert page.PAGE.read_text(encoding="utf-8") == text
    assert text.count("### ") > 10
    linked = {line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")}
    assert len(linked) >= 3
    assert all((ROOT / "docs" / each).exists() for each in linked)
