"""What is made of the files of results: docs/results.md, and a cost model for more processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"  # of modules, but no package
OF_SOME = BENCHMARKS / "results" / "2026-11-22-network-2-hosts.json"


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


def test_a_run_that_lacks_algorithms_is_not_fitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = script("scaling", monkeypatch)
    measured = scaling.parsed_arguments([]).measured
    assert [path.name.partition("-network-")[2] for path in measured] == ["2-hosts.json", "4-hosts.json"]
    rows = scaling.measurements_of(measured)
    assert {(each.algorithm, each.processes) for each in rows} == {
        (name, hosts) for name in scaling.ALGORITHMS for hosts in (2, 4)
    }
    with pytest.raises(SystemExit):
        scaling.parsed_arguments(["--measured", str(OF_SOME)])
    assert "lacks some of AllReduce()" in capsys.readouterr().err
