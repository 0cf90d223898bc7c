"""docs/results.md is what the files of results say."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: `python benchmarks/results_page.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results_page as script  # noqa: PLC0415 - of a folder that is no package

    text = script.text()
    assert script.PAGE.read_text(encoding="utf-8") == text
    assert text.count("### ") > 10
    linked = {line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")}
    assert len(linked) >= 3
    assert all((ROOT / "docs" / each).exists() for each in linked)
