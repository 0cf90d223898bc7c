"""What README, CITATION and CHANGELOG say is so; the quickstart runs as it stands on its page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import thinwire
from pool import Pool

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def quickstart() -> str:
    """The script that the page tells to save, less making and ending the group: the pool has one."""
    code = QUICKSTART.partition("```python\n")[2].partition("```")[0]
    group = re.compile(r"^(dist\.(init|destroy)_process_group\(.*\)|del model, sync .*)\n", re.MULTILINE)
    without, removed = group.subn("", code)
    assert removed == 3
    return without


def paste(code: str) -> tuple[int, float, float]:
    """Run it; the processes in the group, the compression ratio, and the sum of the trained parameters."""
    names: dict[str, Any] = {}
    exec(compile(code, "quickstart.py", "exec"), names)
    total = sum(float(parameter.detach().double().sum()) for parameter in names["model"].parameters())
    return names["dist"].get_world_size(), names["sync"].stats().compression_ratio, total


def test_the_quickstart_compresses_and_leaves_one_model(pool2: Pool) -> None:
    answers = pool2.run(paste, quickstart())
    assert [processes for processes, _, _ in answers] == [2, 2]
    assert all(ratio > 7 for _, ratio, _ in answers)
    assert answers[0][2] == answers[1][2]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 500


def test_the_line_that_the_readme_adds_is_that_of_the_quickstart() -> None:
    (line,) = re.findall(r"^\+(.*)", README, re.MULTILINE)
    assert line in quickstart()


def test_one_version_everywhere() -> None:
    assert f"\nversion: {thinwire.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {thinwire.__version__} " in (ROOT / "CHANGELOG.md").read_text()
