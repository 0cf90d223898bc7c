"""docs/results.md is what `benchmarks/results_page.py` makes of the files of results."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: `python benchmarks/results_page.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # of modules, but no package
    page = import_module("results_page")
    text = page.text()
    assert page.PAGE.read_text(encoding="utf-8") == text
    assert text.count("### ") > 10
    pictures = [line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) >= 3
    assert all((ROOT / "docs" / picture).exists() for picture in pictures)
