"""How the tests run: what they ignore, what they say at their end, and that their processes end."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from commands import become, run_python, stand_ins, started_python
from processes import Spawn, WorkerFailed, end, print_stacks, process, processes_of, wait_for
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
        spawn(1, hang_here, 0)  # it has imported this module
        with pytest.raises(WorkerFailed, match=r"process 0 hung for 0.2 s(.|\n)*in hang_here"):
            spawn(1, hang_here, 100, timeout_seconds=0.2)
    finally:
        spawn.close()


def hang_here(seconds: int) -> None:
    time.sleep(seconds)


def test_the_first_failure_is_shown_at_once_though_others_wait_for_that_process() -> None:
    spawn = Spawn()
    try:
        with pytest.raises(WorkerFailed, match=r"process 1 of 2 failed(.|\n)*ZeroDivisionError"):
            spawn(2, fail_on_the_second)
    finally:
        spawn.close()


def fail_on_the_second() -> None:
    dist.get_rank() != 1 or 1 // 0
    dist.new_group()  # in which the first waits in C++, for half an hour


def test_what_a_launcher_has_started_shows_its_stacks_and_ends(tmp_path: Path) -> None:
    script, begun = tmp_path / "script.py", tmp_path / "begun"
    script.write_text(f"import os, time\nos.symlink(str(os.getpid()), {str(begun)!r})\ntime.sleep(600)\n")
    errors = tmp_path / "errors"
    with stand_ins() as stand_in:
        launch = f"import subprocess, sys\nsubprocess.run([sys.executable, *{[*stand_in, str(script)]}])"
        started = process(become, ["-u", "-c", launch], {}, str(errors), str(errors), tmp_path)
        started.start()
        try:
            wait_for(begun.is_symlink)
            running = [*processes_of(started.pid), int(os.readlink(begun))]
            print_stacks([started])
            wait_for(lambda: "subprocess.py" in errors.read_text() and str(script) in errors.read_text())
        finally:
            end([started])
    assert len(running) == 3
    wait_for(lambda: not any(map(is_running, running)))


@pytest.mark.parametrize("text", [WAITING, IMPORTING], ids=["waiting", "importing"])
def test_processes_end_with_the_one_that_started_them(text: str, tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(text)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    with started_python(str(script)) as parent:
        started = int(parent.stdout.readline())
        assert is_running(started)
        parent.kill()
    wait_for(lambda: not is_running(started))


def test_a_pool_that_was_interrupted_gives_no_late_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a test's timeout interrupts it, while its processes are still at work."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    spawn = Spawn()
    try:
        pool = spawn.of(1)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(connection, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.run(os.getpid)
        assert not pool.alive
        assert spawn(1, dist.get_world_size) == [1]
    finally:
        spawn.close()
