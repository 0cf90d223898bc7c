"""`thinwire arguments…`, whose local jobs fork their processes: they have imported what this one has."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, NoReturn

from commands import become
from thinwire import cli, launch
from thinwire.demo import model


class Forked:
    """What a local job needs of subprocess.Popen, for `python [-P] -m module arguments…`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: None,
        stderr: IO[bytes],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert (stdin, stdout) == (subprocess.DEVNULL, None)
        assert start_new_session
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._be(command[command.index("-m") + 1 :], env, f"/dev/fd/{stderr.fileno()}")

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def _be(self, command: Sequence[str], environment: Mapping[str, str], errors: str) -> NoReturn:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as launch.END_WITH_PARENT
        os.environ.clear()
        os._exit(become(list(command), dict(environment), "/dev/fd/1", errors, Path.cwd()))


def install() -> None:
    """For the rest of this process's life."""
    model.load_text = cache(model.load_text)
    model.load_text()  # all that is forked has it
    launch.subprocess.Popen = Forked  # type: ignore[attr-defined]


if __name__ == "__main__":
    install()
    cli.main()
