"""An integration whose package is not installed says what to install."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

from launcher import WITHOUT_PACKAGE, run_job, run_python
from thinwire.probe import Probe, Timing

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
    cause, _, told = done.stderr.partition(
        "The above exception was the direct cause of the following exception"
    )
    assert cause.strip().splitlines()[-1].startswith("ModuleNotFoundError: ")
    last = told.splitlines()[-1]
    assert last.startswith("thinwire.errors.MissingExtraError: ")
    assert last.endswith(f"pip install '.[{extra}]' in a clone of Thinwire")


def test_lightnings_way_to_register_a_hook_needs_no_lightning() -> None:
    done = run_python(WITHOUT_PACKAGE, ",".join(PACKAGES["lightning"]), "thinwire.integrations.ddp_hooks")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["demo", "check", "advise"])
def test_what_computes_on_the_cpu_says_at_its_end_that_numba_is_missing(command: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(8, 8)\n"
        "def step(model): model(torch.ones(1, 8)).sum().backward()"
    )
    timings = [Timing(1 << 10, [0.002, 0.002]), Timing(1 << 20, [0.1, 0.1])]
    Probe(2, "gloo", "cpu", timings, [], [[0, 1]]).save(tmp_path / "probe.json")
    options = {
        "demo": ["--model-size=tiny", "--steps=1", "--algorithm=exact", f"--output={tmp_path}"],
        "check": [],
        "advise": ["--probe=probe.json", "--model=mine:build", "--step=mine:step", "--budget-seconds=0.1"],
    }
    module = "forking" if command == "demo" else "thinwire"
    start = (WITHOUT_PACKAGE, "numba", module, command, *options[command])
    if command == "check":
        (done,) = run_job(*start, processes=1)
    else:
        done = run_python(*start, cwd=tmp_path)
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
