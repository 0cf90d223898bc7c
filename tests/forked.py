"""Fresh processes at the price of a fork: the server that forks them has imported what takes seconds.

How tests start processes, from the most used on:

    pool.in_each_process(n)   runs a test's body in n processes that stay, joined by Gloo
    forked.process(body, …)   one process, which ends with the test
    launcher.run_python(…)    `python script …` or `thinwire …`, and how it ended; `started_python`: while it
                              still runs; `run_job`: the ranks of a job
    stand_ins.stand_ins()     what a launcher of others starts (torchrun, xdist, the lab): a small stand-in
                              asks a server to fork what is to run

To debug a process that hangs, run its test alone with `-n 0 -s`, and put
`faulthandler.dump_traceback_later(20)` into the body. A pool says itself where its processes hang.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any, TypeAlias
from unittest.mock import patch

Process: TypeAlias = Any
"""Of multiprocessing; what each start method has of its own is not known to type checkers alike."""

# What the server imports; conftest.py adds what this run needs.
modules = ["preloaded"]


def context() -> Any:
    """Of multiprocessing, with a server that has imported; it starts when it is needed first.

    A process that was itself forked by a server uses that one.
    """
    found = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._forkserver_alive_fd is not None:
        server.ensure_running = resource_tracker.ensure_running  # its own would start another
        return found
    found.set_forkserver_preload(modules)
    # The server imports by itself: it must find what this process finds, and must not start CUDA by looking.
    path = os.pathsep.join(each for each in sys.path if each)
    settings = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return found


def process(body: Callable[..., None], *args: Any, namespaces: Sequence[str] = ()) -> Process:
    """A process that will run `body(*args)`, and ends when this one does; it is not started.

    It enters Linux's namespaces of these files first.
    """
    return context().Process(target=_begin, args=(dict(os.environ), namespaces, body, args), daemon=True)


def enter(path: str) -> None:
    """Enter Linux's namespace of a file; one of users only before there is a second thread."""
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _begin(
    environment: dict[str, str], namespaces: Sequence[str], body: Callable[..., None], args: tuple[Any, ...]
) -> None:
    # What the server has imported is not garbage: to look at a million objects would copy their pages.
    gc.freeze()
    for path in namespaces:
        enter(path)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    body(*args)


def _end_with_parent() -> None:
    """Whatever this process waits for: its parent has ended, and nobody will ask for it again."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
