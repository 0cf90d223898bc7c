"""Processes of the tests: whatever becomes of the one that started them, they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from pool import Pools
from test_elastic import is_running

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


def test_they_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path}
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
    pools = Pools()
    try:
        pool = pools.of(1)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(connection, "wait", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.run(os.getpid)
        assert not pool.alive
        assert pools.of(1).run(dist.get_world_size) == [1]
    finally:
        pools.close()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
