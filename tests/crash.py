"""Moved, mostly."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from commands import listening_on
from processes import Ended, Setting
from processes import run_fresh as run


def threads() -> int:
    """Threads of this process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def children() -> list[str]:
    """Processes that this one has started and not waited for."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


__all__ = ["Ended", "Setting", "children", "listening_on", "run", "threads"]
