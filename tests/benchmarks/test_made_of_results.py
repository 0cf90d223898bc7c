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


def test_a_second_run_on_a_day_overwrites_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pages, results_page = import_module("pages"), import_module("results_page")
    for module in (pages, results_page):
        monkeypatch.setattr(module, "RESULTS_FOLDER", tmp_path)
    for _ in range(3):
        pages._new_stem.cache_clear()  # another process
        for suffix in ("json", "md"):
            path = pages.result_path(suffix, "network", None)
            assert not path.exists()
            path.touch()
            assert pages.result_path(suffix, "network", None) == path
    stems = {path.stem[11:] for path in tmp_path.iterdir()}
    assert stems == {"network", "network-run-2", "network-run-3"}
    (latest,) = results_page.latest("network*")
    assert (latest.name, latest.path.stem[11:]) == ("network", "network-run-3")
    pages._new_stem.cache_clear()
