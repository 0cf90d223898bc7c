"""No orphans: a process of a local job ends when the one that started it is gone."""

from __future__ import annotations

import os
import threading
import time

__all__ = ["LAUNCHER_VARIABLE", "follow_launcher"]

LAUNCHER_VARIABLE = "THINWIRE_LAUNCHER_PID"
CHECK_EVERY_SECONDS = 0.5


def follow_launcher() -> None:
    """Watch the launcher from a background thread, if this process was started by one.

    The launcher ends its processes, but not if it is itself killed outright.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is not None:
        threading.Thread(target=_end_with, args=(int(launcher),), daemon=True).start()


def _end_with(launcher_pid: int) -> None:
    while os.getppid() == launcher_pid:  # who loses its parent gets another one
        time.sleep(CHECK_EVERY_SECONDS)
    os._exit(1)  # Not sys.exit: the main thread may be waiting for a message that never comes.
