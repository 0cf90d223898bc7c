"""Runs a command; exits with code 1 if none of its processes has averaged a step: `attach --strict`.

`python -I -S strict.py COMMAND…`: a Python without torch, since it stays while the command trains.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

AVERAGED = "THINWIRE_ATTACH_AVERAGED"  # the file that a process makes in its first averaged step


def note_averaged() -> None:
    """Tell the process that runs the command, if there is one."""
    # On another machine, to which srun has copied the environment, there is no such folder.
    with suppress(KeyError, OSError):
        open(os.environ[AVERAGED], "w").close()


def main() -> None:
    """Run the command, and exit as it does."""
    with tempfile.TemporaryDirectory(prefix="thinwire-attach-") as folder:
        averaged = os.path.join(folder, "averaged")
        command = subprocess.Popen(sys.argv[1:], env=os.environ | {AVERAGED: averaged})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the command, too
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup relies on it
                signal.signal(number, lambda number, _: command.send_signal(number))
        code = command.wait()
        if code == 0 and not os.path.exists(averaged):
            code = 1
            print(
                "thinwire: --strict: the command has ended, but none of its processes on this machine has "
                "averaged a step: none built a DDP model, rank 0 says why, or their Python lacks Thinwire",
                file=sys.stderr,
            )
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
