"""No orphans: a training process ends when the command that started it is gone."""

from __future__ import annotations

import os
import threading
import time

LAUNCHER_VARIABLE = "THINWIRE_DEMO_LAUNCHER_PID"
CHECK_EVERY_SECONDS = 0.5


def follow_launcher() -> None:
    """Watch the launcher from a background thread, if this process was started by one.

    torchrun ends its processes when it is told to end, but not if that comes while it is starting them,
    and nobody tells it to end if the launcher is killed outright.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher and os.name == "posix":  # Elsewhere, os.kill(pid, 0) does not ask but kills.
        threading.Thread(target=_end_with, args=(int(launcher),), daemon=True).start()


def _end_with(launcher_pid: int) -> None:
    while _is_alive(launcher_pid):
        time.sleep(CHECK_EVERY_SECONDS)
    os._exit(1)  # Not sys.exit: the main thread may be waiting for a message that never comes.


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
