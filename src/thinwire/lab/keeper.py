"""Run a command on a host; when it ends, or the lab does, end all that it has started, and nothing else.

A script that imports nothing of Thinwire, so that it starts at once: `python -S keeper.py LAB_PID COMMAND…`.
Whatever the command starts is a descendant of this process, in other sessions and process groups as well, for
what loses its parent becomes a child of this one. So none has to be known by a number or a variable.
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

END_ALL = signal.SIGUSR1  # what the lab sends, and the kernel when the lab is gone
# Of Linux's <sys/prctl.h>.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class AllMustEndError(Exception):
    """The lab wants everything on this host to end, or has itself ended."""


def keep(lab_pid: int, command: Sequence[str]) -> int:
    """Run a command until nothing that it has started is left.

    Returns:
        The command's exit code, as a shell tells it.
    """
    # The command is in the same process group and hears the same: it decides what it does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore)
    # Whatever loses its parent below becomes this one's child, and can be found and waited for.
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        # The handler first, then the request, then the look: a lab that ends in between is not missed.
        signal.signal(END_ALL, _end_all)
        prctl(PR_SET_PDEATHSIG, END_ALL)
        if os.getppid() != lab_pid:
            _end_all(END_ALL, None)
        # Should this process be killed outright, it can end nobody.
        end_with_this = partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        process = subprocess.Popen(command, preexec_fn=end_with_this)  # noqa: PLW1509 - there is one thread
        code = wait_for(process.pid)
        # What follows ends all anyway, and must not be cut short.
        signal.signal(END_ALL, _ignore)
    except AllMustEndError:
        code = 128 + signal.SIGKILL
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror}", file=sys.stderr)
        code = 127
    end_descendants()
    return code


def wait_for(process_id: int) -> int:
    """Return a child's exit code; wait in passing for those that have lost their own parent."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == process_id:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def end_descendants() -> None:
    """Kill every descendant of this process, those that are born meanwhile as well."""
    # Again and again: a process may start another between the look and the kill.
    while True:
        for process_id in descendants():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def descendants() -> list[int]:
    """Return the processes that this one has started, those that they have started, and so on."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
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
    """Go on."""
    # A function, not SIG_IGN: that would be inherited, and the command would ignore the signal as well.


def _end_all(number: int, frame: FrameType | None) -> None:
    """Break off what `keep` does."""
    # A second one must not break off the ending.
    signal.signal(number, _ignore)
    raise AllMustEndError


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
