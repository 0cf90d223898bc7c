"""An integration whose package is not installed says what to install."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

from commands import WITHOUT_PACKAGE, run_job, run_python

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning", "pytorch_lightning"],
    "transformers": ["transformers"],
}


@pytest.mark.parametrize("extra", list(PACKAGES))
def test_a_missing_package_is_named(extra: str) -> None:
    done = run_python(WITHOUT_PACKAGE, ",".join(PACKAGES[extra]), f"thinwire.integrations.{extra}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("thinwire.errors.MissingExtraError: ")
    assert last.endswith(f"pip install '.[{extra}]' in a clone of Thinwire")


def test_lightnings_way_to_register_a_hook_needs_no_lightning() -> None:
    done = run_python(WITHOUT_PACKAGE, ",".join(PACKAGES["lightning"]), "thinwire.integrations.ddp_hooks")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_computes_on_the_cpu_says_at_its_end_that_numba_is_missing() -> None:
    (done,) = run_job(WITHOUT_PACKAGE, "numba", "thinwire", "check", processes=1)
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("thinwire: Numba is not installed: few bits and low rank are slow on the CPU")
    assert last.endswith("pip install '.[numba]' in a clone of Thinwire")
    assert done.stderr.count("Numba") == 1


def test_what_is_told_to_install_can_be_installed_from_a_clone() -> None:
    """No index has Thinwire: `pip install 'thinwire[cli]'` would find nothing, or another package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    code = [path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    told = {path.relative_to(ROOT): path.read_text() for path in (*pages, *code)}
    assert [path for path, text in told.items() if "thinwire[" in text] == []
    named = {extra for text in told.values() for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert len(named) > 5
    assert named <= set(metadata("thinwire").get_all("Provides-Extra") or ())
