"""How tests start processes, and how to look into one that fails or hangs.

    spawn(2, body, *args)            fixture: run a function in two processes that stay, joined by Gloo
    @in_each_process(2)              run a test's own body there
    run_fresh(body, *args)           run a function in new processes, which may die: how each ended
    process(body, *args)             one process, to start, kill and join

and in commands.py:

    run_python("script.py", …)       run `python script.py …`, `python -m package …` or `python -u -c code`
    run_job("script.py", …)          the same as the ranks of a job; `started_python`: while it runs
    stand_ins()                      what a launcher is to start (torchrun, `thinwire run`, the lab, xdist)
    typed("report", …)               fixture: `thinwire report …` in the test's own process

Nothing here starts Python: one server has imported torch, the frameworks and the compiled kernels, and forks
every process in milliseconds. Each ends when the process that asked for it ends, however that happens; one of
a pool, which is stopped between tests, at the latest with the server.

When a test fails:

- What processes print is shown with the test that has started them.
- The first failure in a process of `spawn` shows its rank and traceback; if one hangs, all show their stacks.
- A script that hangs is ended; its `stderr` has the stacks of all its threads, and of what a launcher has
  started. `kill -USR1 PID` prints them at any time, of every process that this file starts and runs.
- A test whose timeout strikes ends with its name and stacks, those of its pool included.
- Run it alone with `-n 0 -s`: what its processes print is then on the terminal. `breakpoint()` works in the
  test, not in its processes: there, write `faulthandler.dump_traceback_later(20)`.
- An elastic test writes what its members say to files under `tmp_path`: run it with `--basetemp=/tmp/look`
  and read `told` (a line of JSON for each event) and `output`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import update_wrapper
from importlib import import_module
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

Process: TypeAlias = Any
"""Of multiprocessing; what each start method has of its own is not known to type checkers alike."""

Typed: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
"""Of the fixture `typed`."""

# The server imports these; conftest.py adds what this run needs.
modules = ["end_if_alone", "preloaded"]


def context() -> Any:
    """Return multiprocessing's context with a server that has imported; it starts when it is needed first."""
    # A process that was itself forked by a server uses that one.
    found = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._forkserver_alive_fd is not None:
        server.ensure_running = resource_tracker.ensure_running  # its own would start another
        return found
    found.set_forkserver_preload(modules)
    # The server imports by itself: it must find what this process finds, and must not start CUDA by looking.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    settings = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    settings |= {"RUST_LOG": "error", "TESTS_STARTED_BY": str(os.getpid())}  # torchft reads the former
    with patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return found


def process(body: Callable[..., object], *args: Any, namespaces: Sequence[str] = ()) -> Process:
    """Return a process, not started, that runs `body(*args)` within Linux's namespaces of these files."""
    # Its output is this process's: pytest shows both with the test.
    outputs = [Connection(os.dup(number)) for number in (1, 2)]
    started_with = (outputs, dict(os.environ), namespaces, body, args)
    return context().Process(target=_begin, args=started_with, daemon=True)


def redirect(number: int, to: Connection | str | Path) -> None:
    """Let a file descriptor, such as 1 for the output, be that of a connection or of a file."""
    if isinstance(to, Connection):
        os.dup2(to.fileno(), number)
        to.close()
    else:
        opened = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)


def enter(path: str) -> None:
    """Enter Linux's namespace of a file; one of users only before there is a second thread."""
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _begin(
    outputs: list[Connection],
    environment: dict[str, str],
    namespaces: Sequence[str],
    body: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    # The server's modules are no garbage: to look at a million objects would copy their pages.
    gc.freeze()
    gc.enable()
    for number, output in enumerate(outputs, 1):
        redirect(number, output)
    for path in namespaces:
        enter(path)
    os.environ.clear()
    os.environ.update(environment)
    # As launch.END_WITH_PARENT, if it is stopped when the server ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, file=2)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=end_with, args=(parent.sentinel,), daemon=True).start()
    body(*args)


def end_with(other: Any) -> None:
    """End this process, whatever it waits for, when the other end is closed: nobody will ask for it again."""
    connection.wait([other])
    os._exit(1)


def print_stacks(processes: Sequence[Process]) -> None:
    """Let processes, and those that they have started, print the stacks of all their threads."""
    started = [pid for process in processes if process.is_alive() for pid in processes_of(process.pid)]
    asked = [pid for pid in started if _catches(pid, signal.SIGUSR1)]  # others it would end
    for pid in asked:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5 if asked else 0)


def processes_of(parent: int) -> list[int]:
    """Return a process and those that it has started, and these, as Linux tells."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    return [parent, *[pid for child in children for pid in processes_of(int(child))]]


def _catches(pid: int, number: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


class WorkerFailed(Exception):  # noqa: N818 (it reports a failure, it is not one of ours)
    """A process of a pool raised, died or hung; the message holds its traceback or its stacks."""


class Pool:
    """`world_size` processes in one Gloo group, each waiting for a function to run."""

    # Tests' groups are not ended, since torch's caches know their names. With a thousand of their threads a
    # test takes ten times as long, and some hang.
    MAX_THREADS = 200

    def __init__(self, world_size: int) -> None:
        self.world_size, self.alive = world_size, True
        self._folder = Path(tempfile.mkdtemp(prefix="thinwire-pool-"))
        self._ends, theirs = zip(*(context().Pipe() for _ in range(world_size)), strict=True)
        self._processes = [
            process(_serve, rank, world_size, str(self._folder), end) for rank, end in enumerate(theirs)
        ]
        # multiprocessing would ask them to end, and wait for ever for one that is stopped.
        Finalize(self, end, (self._processes,), exitpriority=0)
        for process_, their_end in zip(self._processes, theirs, strict=True):
            process_.start()
            their_end.close()  # so that it ends for us with the process
        self.collect(60.0)

    def run(self, body: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """Run `body(*args)` on every process; return the results by rank."""
        task = pickle.dumps((body, args))
        self._send(signal.SIGCONT)
        for end in self._ends:
            end.send_bytes(task)
        results = self.collect(timeout_seconds)
        self._send(signal.SIGSTOP)
        return results

    def _send(self, number: int) -> None:
        # A pool is stopped between its tests: each Gloo group has a thread that wakes up 100 times a second.
        for process in self._processes:
            os.kill(process.pid, number)

    def is_usable(self) -> bool:
        """Return whether no test has failed here, and the tests so far have not left too many threads."""
        return self.alive and len(os.listdir(f"/proc/{self._processes[0].pid}/task")) <= self.MAX_THREADS

    def close(self) -> None:
        """End all processes."""
        self.alive = False
        end(self._processes)
        shutil.rmtree(self._folder, ignore_errors=True)

    def collect(self, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        results: list[Any] = [None] * self.world_size
        waited_for = {end: rank for rank, end in enumerate(self._ends)}
        try:
            while waited_for:
                ready: list[Any] = connection.wait(list(waited_for), max(0.0, deadline - time.monotonic()))
                if not ready:
                    ranks = ", ".join(map(str, waited_for.values()))
                    raise WorkerFailed(f"process {ranks} hung for {timeout_seconds} s\n{self._stacks()}")
                for end in [end for end in waited_for if end in ready]:
                    rank = waited_for.pop(end)
                    try:
                        ok, results[rank] = pickle.loads(end.recv_bytes())
                    except EOFError:
                        raise WorkerFailed(f"process {rank} ended\n{self._stacks()}") from None
                    if not ok:  # the first one: for it others may wait in vain
                        raise WorkerFailed(f"process {rank} of {self.world_size} failed\n{results[rank]}")
        except BaseException as error:
            # A test's own timeout strikes here as well: answers that come later would be the next test's.
            try:
                if not isinstance(error, WorkerFailed):
                    sys.stderr.write(self._stacks())
            finally:
                self.close()
            raise
        return results

    def _stacks(self) -> str:
        print_stacks(self._processes)
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("stacks-*")))


def _serve(rank: int, world_size: int, folder: str, end: Connection) -> None:
    """Join the pool's group, then run what comes."""
    warnings.simplefilter("error")
    # The compiler warns of its own accesses, and of the version of Python.
    warnings.filterwarnings("ignore", module=r"torch\._dynamo")
    # torch.distributed.checkpoint of torch 2.6 calls what torch 2.6 warns of. Models still are scripted.
    warnings.filterwarnings("ignore", message=r"TypedStorage is deprecated|`torch\.jit\.script")
    with Path(folder, f"stacks-{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        join_group(rank, world_size, f"{folder}/rendezvous", 30.0)
        end.send_bytes(pickle.dumps((True, None)))
        while True:
            body, args = pickle.loads(end.recv_bytes())
            try:
                answer = (True, body(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            end.send_bytes(pickle.dumps(answer))


def join_group(rank: int, world_size: int, store: str, timeout_seconds: float) -> None:
    """Join the others in a Gloo group that meets by a file."""
    import torch.distributed as dist  # noqa: PLC0415 - as in conftest.py

    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout
    )
    assert dist.get_world_size() == world_size


class Spawn:
    """The fixture `spawn`: a pool for each world size, started when first asked for, and after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(
        self, world_size: int, body: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0
    ) -> list[Any]:
        """Run `body(*args)` in `world_size` processes; return the results by rank."""
        return self.of(world_size).run(body, *args, timeout_seconds=timeout_seconds)

    def of(self, world_size: int) -> Pool:
        """Return the pool of this size."""
        pool = self._pools.get(world_size)
        if pool is None or not pool.is_usable():
            if pool is not None:
                pool.close()
            pool = self._pools[world_size] = Pool(world_size)
        return pool

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()


def in_each_process(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let every process of a pool run a test's body, with its parameters and fixtures."""
    # In the processes assertions are plain ones: a failure shows the line, but no values.

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        def test(spawn: Spawn, **fixtures: Any) -> None:
            spawn(world_size, _run_body, body.__module__, body.__name__, fixtures)

        update_wrapper(test, body)
        parameters = [inspect.Parameter("spawn", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorated


def _run_body(module: str, name: str, fixtures: dict[str, Any]) -> None:
    inspect.unwrap(getattr(import_module(module), name))(**fixtures)


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something has happened, for three minutes at most."""
    deadline = time.monotonic() + 180
    while not happened():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.02)


def end(running: Sequence[Process]) -> None:
    for each in running:
        each.kill()
    for each in running:
        each.join()


def finish(running: Sequence[Process], limit_seconds: float) -> list[int]:
    """Run processes; those that have not ended in time print their stacks, and are killed. Return which."""
    for each in running:
        each.start()  # the first waits for the server, which imports
    deadline = time.monotonic() + limit_seconds
    try:
        for each in running:
            each.join(max(0.0, deadline - time.monotonic()))
        hung = [number for number, each in enumerate(running) if each.is_alive()]
    finally:
        print_stacks(running)
        end(running)
    return hung


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        told: What its body returned, None if it died.
        exit_code: Of the process; negative if a signal ended it.
    """

    told: Any
    exit_code: int | None


@dataclass(frozen=True)
class Setting:
    """What a body is told of its process."""

    process_rank: int
    processes: int
    timeout_seconds: float
    store: str

    def join_group(self) -> None:
        """Join the others in a Gloo group, over a file that is gone with the run."""
        join_group(self.process_rank, self.processes, self.store, self.timeout_seconds)


def run_fresh(
    body: Callable[..., Any],
    *args: Any,
    processes: int = 3,
    timeout_seconds: float = 30.0,
    limit_seconds: float = 100.0,
) -> list[Ended]:
    """Run `body(setting, *args)` in new processes, which may die; all have ended when this returns."""
    # A process that has not ended by itself after `limit_seconds` is killed, and the test fails.
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"result-{rank}") for rank in range(processes)]
        settings = [Setting(rank, processes, timeout_seconds, f"{folder}/store") for rank in range(processes)]
        running = [process(_answer, body, *given, args) for given in zip(settings, results, strict=True)]
        hung = finish(running, limit_seconds)
        returned = [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]
    assert not hung, f"processes {hung} did not end; returned: {returned}"
    return [Ended(value, each.exitcode) for value, each in zip(returned, running, strict=True)]


def _answer(body: Callable[..., Any], setting: Setting, result: Path, args: tuple[Any, ...]) -> None:
    os.chdir(tempfile.gettempdir())
    returned = None
    try:
        returned = body(setting, *args)
    except BaseException:
        returned = f"the body failed: {traceback.format_exc()}"
        raise
    finally:
        result.with_suffix(".part").write_bytes(pickle.dumps(returned))
        result.with_suffix(".part").rename(result)
