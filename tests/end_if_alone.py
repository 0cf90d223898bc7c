"""Imported first by the server of forked processes: it ends if its run is killed while it still imports."""

from __future__ import annotations

import gc
import os
import signal

STARTED_BY = "TESTS_STARTED_BY"  # the run's process; by now it may be gone already


def end_if_alone(*_: object) -> None:
    """End this process if the one that has started it is gone."""
    if os.getppid() != int(os.environ.get(STARTED_BY, os.getppid())):
        os._exit(1)


gc.disable()  # imports leave no garbage, only objects to look at; what is forked enables it

# Once it serves, it notices by itself. What it forks inherits no timer.
signal.signal(signal.SIGALRM, end_if_alone)
signal.setitimer(signal.ITIMER_REAL, 1, 1)
