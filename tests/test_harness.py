"""How the tests run: what they ignore, what they say at their end, and that their processes end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from launcher import run_python
from pool import Pools
from test_elastic import is_running

HERE = Path(__file__).parent
CTRL_C = """
import os, signal, pytest

def test_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
"""
IN_THE_BACKGROUND = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(pytest.main(sys.argv[3:]))
"""
# A process that waits for good, started by one that does too.
WAITING = """
import os, time, forked

def wait():
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    forked.modules.clear()
    forked.process(wait).start()
    time.sleep(600)
"""


def test_ctrl_c_works_in_the_background(tmp_path: Path) -> None:
    """A shell starts it with Ctrl-C ignored."""
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "test_interrupted.py").write_text(CTRL_C)
    settings = ["-q", "-p", "no:cacheprovider", "-c", str(HERE.parent / "pyproject.toml")]
    done = run_python("-u", "-c", IN_THE_BACKGROUND, *settings, f"--rootdir={tmp_path}", str(tmp_path))
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        try:
            assert parent.stdout is not None
            started = int(parent.stdout.readline())
            assert is_running(started)
        finally:
            parent.kill()
    deadline = time.monotonic() + 60
    while is_running(started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(started)


def test_a_pool_that_was_interrupted_gives_no_late_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a test's timeout interrupts it, while its processes are still at work."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    pools = Pools()
    try:
        pool = pools.of(1)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(connection, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.run(os.getpid)
        assert not pool.alive
        assert pools.of(1).run(dist.get_world_size) == [1]
    finally:
        pools.close()
