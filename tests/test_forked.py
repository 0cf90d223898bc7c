"""Processes of the tests: whatever becomes of the one that started them, they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

# A process that waits for good, started by one that does too.
WAITING = """
import os, time, forked

def wait():
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
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
            assert Path(f"/proc/{started}").exists()
        finally:
            parent.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{started}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{started}").exists()
