"""The cost model for more processes is fitted to runs that have all of its algorithms."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OF_SOME = BENCHMARKS / "results" / "2026-11-22-network-2-hosts.json"


def test_a_run_that_lacks_algorithms_is_not_fitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("scaling")
    measured = script.parsed_arguments([]).measured
    assert [path.name.partition("-network-")[2] for path in measured] == ["2-hosts.json", "4-hosts.json"]
    rows = script.measurements_of(measured)
    assert {(each.algorithm, each.processes) for each in rows} == {
        (name, hosts) for name in script.ALGORITHMS for hosts in (2, 4)
    }
    with pytest.raises(SystemExit):
        script.parsed_arguments(["--measured", str(OF_SOME)])
    assert "lacks some of AllReduce()" in capsys.readouterr().err
