"""What is forked in place of a process that a launcher starts; see stand_in.py.

It imports little: pytest's own process forks the workers of xdist so, before anything else is imported.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import forked


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """What a launcher is to start, before the script and its arguments: see stand_in.py."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen()
            server = forked.process(_fork_when_asked, listener)
            server.daemon = False  # or what it forks would be refused processes of its own
            server.start()
        try:
            yield [str(Path(__file__).with_name("stand_in.py")), f"{folder}/socket"]
        finally:
            server.kill()
            server.join()


def _fork_when_asked(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _stand_for(connection)
        connection.close()


def _stand_for(connection: socket.socket) -> None:
    """Run what stand_in.py asks for at the other end, as long as that lives, and tell it how that ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, ends, _, _ = socket.recv_fds(connection, 4, 3)
    told = connection.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
    command, environment, cwd = json.loads(told)
    # Its number here: it may be in a PID namespace.
    pid, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    for kind in ("user", "net"):
        own, its = f"/proc/self/ns/{kind}", f"/proc/{pid}/ns/{kind}"
        if os.path.exists(its) and os.readlink(its) != os.readlink(own):
            forked.enter(its)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    os.environ.clear()
    given, out, err = ends
    os.dup2(given, 0)
    os.close(given)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    code = become(command, environment, Connection(out), Connection(err), cwd)
    connection.sendall(bytes([code]))
    os._exit(code)


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)  # nothing is sent: it is closed
    os._exit(1)


def become(
    command: list[str], environment: dict[str, str], out: str | Connection, err: str | Connection, cwd: str
) -> int:
    """Be `python script …`, `python -m package …` or `python -u -c code`; the exit status."""
    os.environ.update(environment)
    os.chdir(cwd)
    for number, to in ((1, out), (2, err)):
        opened = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if isinstance(to, str) else to.fileno()
        os.dup2(opened, number)
        os.close(opened) if isinstance(to, str) else to.close()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    name, sys.argv, code = command[0], command, 0
    try:
        if name == "-u":
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(command[2], main.__dict__)
        elif os.path.isabs(name):
            sys.path[0] = os.path.dirname(name)
            runpy.run_path(name, run_name="__main__")
        else:
            sys.path[0] = cwd
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
