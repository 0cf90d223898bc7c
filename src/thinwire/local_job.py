"""The view of a process that a `LocalJob` has started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

STORE_VARIABLE = "THINWIRE_STORE"  # in the environment of a job's processes: their rendezvous file
LAUNCHER = "THINWIRE_LAUNCHER_PID"  # there, too: the command that started this process or an ancestor


def is_in_local_job() -> bool:
    """Return whether this process was started by a `LocalJob`."""
    return STORE_VARIABLE in os.environ


def say_once(line: str) -> None:
    """Print a line on stderr, unless another process of this `LocalJob` has printed it."""
    if not is_in_local_job():
        print(line, file=sys.stderr)
        return
    from fcntl import LOCK_EX, flock  # noqa: PLC0415 - POSIX only

    with Path(os.environ[STORE_VARIABLE]).with_name("said").open("a+", errors="backslashreplace") as said:
        # Locked until it is printed: the first process that ends makes the job end the others.
        flock(said, LOCK_EX)
        said.seek(0)
        if f"{line}\n" not in said:
            print(line, file=sys.stderr, flush=True)
            print(line, file=said, flush=True)
