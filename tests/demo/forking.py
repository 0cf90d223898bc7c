"""`thinwire arguments…`, whose local jobs fork their processes: they have imported what this one has."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO

from commands import become
from thinwire import cli, launch
from thinwire.demo import gpt


class Forked:
    """What a local job needs of subprocess.Popen, for `python [-P] -m module arguments…`."""

    def __init__(
        self, command: Sequence[str], *, stderr: IO[bytes], env: Mapping[str, str], **others: object
    ) -> None:
        assert others == {"stdin": subprocess.DEVNULL, "stdout": None, "start_new_session": True}
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as launch.END_WITH_PARENT
        os.environ.clear()
        module = list(command[command.index("-m") + 1 :])
        os._exit(become(module, dict(env), "/dev/fd/1", f"/dev/fd/{stderr.fileno()}", Path.cwd()))

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def install() -> None:
    """For the rest of this process's life."""
    # Of one package: to find and measure on the whole standard library takes longer than a few steps.
    gpt.load_text = cache(partial(gpt.load_text, Path(asyncio.__file__).parent))
    gpt.load_text()  # all that is forked has it
    launch.subprocess.Popen = Forked  # type: ignore[attr-defined]


if __name__ == "__main__":
    install()
    cli.main()
