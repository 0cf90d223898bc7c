"""No orphans: a process of a local job ends when the one that started it is gone, whatever it does just then.

A script that imports nothing of Thinwire: `python -I -S lifeline.py COMMAND…` becomes the command, and the
kernel (Linux's) kills it when the launcher ends. A thread of the command's own would come after its imports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

LAUNCHER_VARIABLE = "THINWIRE_LAUNCHER_PID"
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def following(command: Sequence[str]) -> list[str]:
    """Return a command that ends with the process in `LAUNCHER_VARIABLE`, which starts it."""
    return [sys.executable, "-I", "-S", __file__, *command]


def follow_launcher() -> None:
    """Let Linux kill this process when its launcher ends; that stays when it becomes another program."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The request first, then the look: a launcher that ends in between is not missed.
        if os.getppid() != int(os.environ[LAUNCHER_VARIABLE]):
            sys.exit(1)


if __name__ == "__main__":
    follow_launcher()
    os.execvp(sys.argv[1], sys.argv[1:])
