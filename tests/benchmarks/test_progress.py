"""Long benchmarks: what they tell while they run, and what they keep."""

from __future__ import annotations

import importlib
import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, of a folder that is no package; what it does to signals is undone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = signal.getsignal(signal.SIGTERM)
    yield importlib.import_module("progress")
    signal.signal(signal.SIGTERM, before)
    sys.modules.pop("progress")


def test_a_log_gets_a_line_every_half_minute(progress: Any) -> None:
    now, out = [0.0], io.StringIO()
    with progress.Progress(100, out=out, clock=lambda: now[0]) as shown:
        for done in range(100):
            now[0] = 2.0 * done
            shown.show(done, f"step {done}")
    lines = out.getvalue().splitlines()
    assert lines[0] == " 15 %, 30 s gone, 3 min left: step 15"
    assert len(lines) == 6


@pytest.mark.parametrize("kept", [None, Path("runs.jsonl")])
def test_an_interrupted_run_says_whether_it_can_be_resumed(progress: Any, kept: Path | None) -> None:
    out = io.StringIO()
    with pytest.raises(SystemExit) as stopped, progress.Progress(4, kept=kept, out=out):
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.code == 130
    assert ("can't be resumed" if kept is None else "goes on from there") in out.getvalue()


def test_the_next_start_has_what_was_found_on_the_same_processor(
    progress: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, out = progress.Kept("runs", tmp_path / "new"), io.StringIO()
    assert kept.find(name="a", number=1) is None
    kept.add([1.5], name="a", number=1)
    kept.add([2.5], name="a", number=2)
    again = progress.Kept("runs", tmp_path / "new")
    assert again.find(name="a", number=2) == [2.5]
    with progress.Progress(0, kept=kept.path, out=out):
        assert out.getvalue() == f"nothing left to measure: all of it is in {kept.path}\n"
    monkeypatch.setattr(progress, "cpu_model", lambda: "a different one")
    assert progress.Kept("runs", tmp_path / "new").all() == []
    again.finish()
    assert kept.all() == []
