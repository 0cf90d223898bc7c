"""How the tests run: what they ignore, what they say at their end, and that their processes end."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from commands import run_python, started_python
from processes import Spawn, WorkerFailed
from test_elastic import is_running

HERE = Path(__file__).parent
CTRL_C = """
import os, signal, pytest

def test_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
"""
# No signal ends the wait for a mutex.
HANGING = """
import ctypes

def test_that_hangs():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(pytest.main(sys.argv[3:]))
"""
# A process that waits for good, started by one that does too; or a server that imports for good.
WAITING = """
import multiprocessing, time
from processes import process

if __name__ == "__main__":
    multiprocessing.current_process()._config["daemon"] = False  # so it may have processes of its own
    waiting = process(time.sleep, 600)
    waiting.start()
    print(waiting.pid, flush=True)
    time.sleep(600)
"""
IMPORTING = """
import time, processes
from multiprocessing import forkserver

server = forkserver._forkserver
server._forkserver_alive_fd = None  # or this process would use the one that has forked it
processes.modules[1:] = ["slow"]
processes.context()
print(server._forkserver_pid, flush=True)
time.sleep(600)
"""


def run_test(folder: Path, text: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests as a shell runs it in the background: with Ctrl-C ignored."""
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "test_of_tests.py").write_text(text)
    settings = ("-q", "-p", "no:cacheprovider", "-c", str(HERE.parent / "pyproject.toml"), *settings)
    return run_python("-u", "-c", PYTEST, *settings, f"--rootdir={folder}", str(folder))


def test_ctrl_c_works_in_the_background(tmp_path: Path) -> None:
    done = run_test(tmp_path, CTRL_C)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_test_that_hangs_in_c_ends_within_its_timeout(tmp_path: Path) -> None:
    done = run_test(tmp_path, HANGING, "-o", "timeout=1")
    assert done.returncode != 0
    assert "in test_that_hangs" in done.stderr, done.stdout + done.stderr


def test_processes_that_hang_show_their_stacks() -> None:
    spawn = Spawn()
    try:
        with pytest.raises(WorkerFailed, match=r"process 0 hung for 0.2 s(.|\n)*in hang_here"):
            spawn(1, hang_here, timeout_seconds=0.2)
    finally:
        spawn.close()


def hang_here() -> None:
    time.sleep(100)


@pytest.mark.parametrize("text", [WAITING, IMPORTING], ids=["waiting", "importing"])
def test_processes_end_with_the_one_that_started_them(text: str, tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(text)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    with started_python(str(script)) as parent:
        started = int(parent.stdout.readline())
        assert is_running(started)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(started)
