"""How the tests run: what they ignore, and what is told at their end."""

from __future__ import annotations

import shutil
from pathlib import Path

from launcher import run_python

ROOT = Path(__file__).parents[1]
FAILING = """
import os, signal, pytest

@pytest.mark.alone
def test_rate():
    assert False

def test_other():
    assert False

def test_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
"""
IN_THE_BACKGROUND = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(pytest.main(sys.argv[3:]))
"""


def test_in_the_background_and_where_a_measurement_fails(tmp_path: Path) -> None:
    """As a shell starts it, with Ctrl-C ignored."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_failing.py").write_text(FAILING)
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}"]
    done = run_python("-u", "-c", IN_THE_BACKGROUND, *options, str(tmp_path))
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    told = done.stdout.partition("failed, but need a quiet machine")[2].splitlines()[1]
    assert "test_failing.py::test_rate" in told
    assert "test_other" not in told
