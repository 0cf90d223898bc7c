"""`thinwire arguments…`, whose local jobs fork their processes: they have imported what this one has."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO, NoReturn

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
            try:
                _be(command[command.index("-m") + 1 :], stderr.fileno(), env)
            except BaseException:
                traceback.print_exc()
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _be(command: Sequence[str], errors: int, environment: Mapping[str, str]) -> NoReturn:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as launch.END_WITH_PARENT
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    os._exit(0)


def install() -> None:
    """For the rest of this process's life."""
    model.load_text = cache(model.load_text)
    model.load_text()  # all that is forked has it
    launch.subprocess.Popen = Forked  # type: ignore[attr-defined]


if __name__ == "__main__":
    install()
    cli.main()
