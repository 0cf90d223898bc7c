"""Tests that hang end by themselves and show where; processes end with those that started them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from commands import run_python, started_python
from processes import Spawn, WorkerFailed, wait_for
from test_elastic import is_running

HERE = Path(__file__).parent
# No signal ends the wait for a mutex.
HANGING = """
import ctypes

def test_that_hangs():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
# A process that waits for good, started by one that does too.
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


def test_a_test_that_hangs_in_c_ends_within_its_timeout(tmp_path: Path) -> None:
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "test_of_tests.py").write_text(HANGING)
    settings = ("-p", "no:cacheprovider", "-c", str(HERE.parent / "pyproject.toml"), "-o", "timeout=1")
    done = run_python("pytest", *settings, f"--rootdir={tmp_path}", str(tmp_path))
    assert done.returncode != 0
    assert "in test_that_hangs" in done.stderr, done.stdout + done.stderr


def test_processes_that_hang_show_their_stacks() -> None:
    spawn = Spawn()
    try:
        spawn(1, hang_here, 0)  # it has imported this module
        with pytest.raises(WorkerFailed, match=r"process 0 hung for 0.2 s(.|\n)*in hang_here"):
            spawn(1, hang_here, 100, timeout_seconds=0.2)
    finally:
        spawn.close()


def hang_here(seconds: int) -> None:
    time.sleep(seconds)


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    (script := tmp_path / "waiting.py").write_text(WAITING)
    with started_python(str(script)) as parent:
        started = int(parent.stdout.readline())
        assert is_running(started)
        parent.kill()
    wait_for(lambda: not is_running(started))
