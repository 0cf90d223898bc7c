"""A process that Thinwire starts ends when its launcher is gone, whatever it does just then.

This script imports nothing of Thinwire, so it starts at once. `python -I -S exit_with_launcher.py COMMAND…`
becomes the command, and the kernel (Linux's) kills it when the launcher ends. A thread of the command's own
would come after its imports.

With `--keep` before the command it stays instead. When the command ends, or the launcher, it ends all that
the command has started, and nothing else. All of that descends from this process, in other sessions and
process groups as well, because what loses its parent becomes its child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

LAUNCHER_VARIABLE = "THINWIRE_LAUNCHER_PID"
END_ALL = signal.SIGUSR1  # what a keeper is sent by its launcher, and by the kernel when that is gone
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's <sys/prctl.h>


class AllMustEndError(Exception):
    """The launcher wants everything here to end, or has itself ended."""


def exiting_with_this(command: Sequence[str], *, is_kept: bool = False) -> list[str]:
    """Return a command that ends with the process whose number is in `LAUNCHER_VARIABLE`, its parent."""
    return [sys.executable, "-I", "-S", __file__, *(["--keep"] if is_kept else []), *command]


def exit_with_launcher() -> None:
    """Let Linux kill this process when its launcher ends, even after it has called `exec`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The request first, then the look: a launcher that ends in between is not missed.
        if not _launcher_is_there():
            sys.exit(1)


def keep(command: Sequence[str]) -> int:
    """Run a command until nothing that it has started is left; return its exit code, as a shell tells it."""
    # The command is in the same process group and hears the same: it decides what it does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore)

    def end_all(number: int, frame: FrameType | None) -> None:
        # A second one must not break off the ending.
        signal.signal(number, _ignore)
        raise AllMustEndError

    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        # The handler comes first, then the request, then the look: one that ends in between is not missed.
        signal.signal(END_ALL, end_all)
        prctl(PR_SET_PDEATHSIG, END_ALL)
        if not _launcher_is_there():
            raise AllMustEndError
        # Should this process be killed outright, it can end no one.
        end_with_this = partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        process = subprocess.Popen(command, preexec_fn=end_with_this)  # noqa: PLW1509 - there is one thread
        # Whatever else ends on the way is waited for as well: it may have become a child of this process.
        ended = status = 0
        while ended != process.pid:
            ended, status = os.waitpid(-1, 0)
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code
        # What follows ends all anyway, and must not be cut short.
        signal.signal(END_ALL, _ignore)
    except AllMustEndError:
        code = 128 + signal.SIGKILL
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror}", file=sys.stderr)
        code = 127
    _end_descendants()
    return code


def _launcher_is_there() -> bool:
    return os.getppid() == int(os.environ[LAUNCHER_VARIABLE])


def _end_descendants() -> None:
    """Kill every descendant of this process, those that are born meanwhile as well."""
    # Repeat the look: a process may start a child between the look and the kill.
    while True:
        for process_id in _descendants():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants() -> list[int]:
    """Return the processes that this one has started, those that they have started, and so on."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
            # The name before it, in brackets, may hold anything, brackets and spaces too.
            parent = int(stat.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    # The list grows while it is gone through, generation by generation.
    found = [os.getpid()]
    for process_id in found:
        found.extend(children.get(process_id, []))
    return found[1:]


def _ignore(number: int, frame: FrameType | None) -> None:
    """Go on: a function, because SIG_IGN would be inherited, and the command would ignore the signal too."""


if __name__ == "__main__":
    if sys.argv[1] == "--keep":
        sys.exit(keep(sys.argv[2:]))
    exit_with_launcher()
    os.execvp(sys.argv[1], sys.argv[1:])
