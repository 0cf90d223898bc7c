"""Processes that are started here: their output, the signals for them, their end; and a job of them.

The processes of a `LocalJob` find each other by a file that other users can't open, and listen on the
loopback interface only. The other way would be torchrun; but its rendezvous listens on every address, and
loads pickles from whoever reaches it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, TracebackType
from typing import IO, Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from thinwire.checks import processes_here
from thinwire.errors import ConfigError
from thinwire.lifeline import LAUNCHER_VARIABLE, following

STORE_VARIABLE = "THINWIRE_STORE"  # in the environment of a job's processes: the file by which they meet
LOOPBACKS = ("lo", "lo0")
LOOK_EVERY_SECONDS = 0.1
END_LOOK_EVERY_SECONDS = 0.02
END_WITHIN_SECONDS = 10.0


class Terminated(KeyboardInterrupt):
    """SIGTERM has come; as `KeyboardInterrupt`, so that what cleans up after Ctrl-C does so here."""


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """While open, end by an exception at SIGTERM; but a process of a job its launcher may end at once."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or "RANK" in os.environ or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class EndSignals:
    """While open, remembers a signal that asks this process to end, instead of being ended by it.

    Signals that this process ignores, as under nohup, stay ignored.

    Attributes:
        received: The last one; None if there was none.
        num_received: How many there were.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.num_received = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> EndSignals:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # An ignored signal stays ignored: nohup asks for that.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stand_by(self, goes_on: Callable[[], bool]) -> int | None:
        """Look again and again whether something goes on; return the signal that came meanwhile, if any."""
        while goes_on() and self.received is None:
            time.sleep(LOOK_EVERY_SECONDS)
        return self.received

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.num_received += 1


class Output:
    """Where the lines of several processes go, one at a time.

    Attributes:
        error: Why no more can be written there; None as long as it can.
    """

    def __init__(self, out: IO[bytes]) -> None:
        # Kept, not raised: threads write, and the loop that looks after the processes decides what follows.
        self.error: OSError | None = None
        # One thread per process writes: without the lock, lines would be torn.
        self._out, self._lock = out, threading.Lock()

    def write(self, line: bytes) -> None:
        """Write a line; drop it if that failed before."""
        with self._lock:
            if self.error is None:
                try:
                    self._out.write(line)
                    # At once: a pipe's buffer would hold back the last words of a process that fails.
                    self._out.flush()
                except OSError as error:
                    self.error = error

    def follow(self, process: subprocess.Popen[bytes], prefix: str) -> threading.Thread:
        """Write what a process prints.

        Returns:
            The thread that does so, until the process has closed its output.
        """
        assert process.stdout is not None
        thread = threading.Thread(target=self._follow, args=(process.stdout, prefix.encode()), daemon=True)
        thread.start()
        return thread

    def _follow(self, lines: IO[bytes], prefix: bytes) -> None:
        # Also when nothing can be written any more: a process whose pipe is full would never end.
        with lines:
            for line in lines:
                self.write(prefix + line.removesuffix(b"\n") + b"\n")

    @property
    def exit_code(self) -> int:
        """The code to end with where output can't be written: as a shell tells SIGPIPE if nobody reads it."""
        return 128 + signal.SIGPIPE if isinstance(self.error, BrokenPipeError) else 1


class Process:
    """A process that is started here, and ends with this one.

    Attributes:
        pid: Of the process, and of its session and process group.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        out: Output | IO[bytes] | None,
        prefix: str = "",
    ) -> None:
        self._process = subprocess.Popen(
            following(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if isinstance(out, Output) else out,
            stderr=None if out is None else subprocess.STDOUT,
            # One thread each, unless the user says otherwise: they share the cores of one machine.
            env={"OMP_NUM_THREADS": "1", **os.environ, LAUNCHER_VARIABLE: str(os.getpid()), **variables},
            # Ctrl-C on a terminal reaches every process of its session at once; here, this process alone
            # hears it, and ends the others in order.
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._reader = out.follow(self._process, prefix) if isinstance(out, Output) else None

    @property
    def exit_code(self) -> int | None:
        """As a shell tells it, 128 + the signal that ended it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        assert code is not None
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def read_to_the_end(self, within_seconds: float | None = None) -> None:
        """Wait for its last lines; what it has started may keep its output open."""
        if self._reader is not None:
            self._reader.join(within_seconds)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()

    @staticmethod
    def end(
        processes: Iterable[Process], within_seconds: float, is_urgent: Callable[[], bool] = lambda: False
    ) -> None:
        """Ask all that run to end, and kill those that have not within the time, or if it becomes urgent."""
        # All are asked first, and share one deadline: they may be waiting for each other.
        running = [each._process for each in processes if each._process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + within_seconds
        while any(process.poll() is None for process in running):
            if time.monotonic() >= deadline or is_urgent():
                for process in running:
                    process.kill()
                    process.wait()
            time.sleep(END_LOOK_EVERY_SECONDS)


class LocalJob:
    """While open, the processes of a job run; all of them have ended afterwards.

    The first that fails ends the others, at the next look.

    Attributes:
        failure: What the first that failed died of, in one line; None if none has.
        exit_code: Of that one, as a shell tells it (128 + the signal that ended it); 0 if none has failed.
    """

    def __init__(self, command: Sequence[str], processes: int, *, out: IO[bytes] | None = None) -> None:
        self.failure: str | None = None
        self.exit_code = 0
        self._command, self._size, self._out = list(command), processes, out
        self._interface = loopback_interface()
        self._processes: list[Process] = []
        self._open = ExitStack()

    def __enter__(self) -> LocalJob:
        with ExitStack() as opened:
            # Of mode 0700: whoever could write to the file could tell the processes to connect elsewhere.
            self._folder = Path(opened.enter_context(TemporaryDirectory(prefix="thinwire-job-")))
            opened.callback(lambda: Process.end(self._processes, END_WITHIN_SECONDS))
            for process_rank in range(self._size):
                self._processes.append(self._started(process_rank))
            # Only now: where one can't be started, those before it are ended on the way out.
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def is_running(self) -> bool:
        """Return whether some still run, and none has failed."""
        codes = [process.exit_code for process in self._processes]
        failed = [process_rank for process_rank, code in enumerate(codes) if code]
        if failed and self.failure is None:
            # Of several at one look: who said nothing was killed, and the others' errors are for want of it.
            first = min(failed, key=self._failed_at)
            self.failure, self.exit_code = self._cause(first), codes[first] or 0
        return None in codes and not failed

    def _started(self, process_rank: int) -> Process:
        variables = {
            "RANK": str(process_rank),
            "LOCAL_RANK": str(process_rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "GLOO_SOCKET_IFNAME": self._interface,
            "NCCL_SOCKET_IFNAME": self._interface,
            "TORCHELASTIC_ERROR_FILE": str(self._error_path(process_rank)),
            STORE_VARIABLE: str(self._folder / "store"),
        }
        return Process(self._command, variables, self._out)

    def _error_path(self, process_rank: int) -> Path:
        """Return where `torch.distributed.elastic`'s decorator `record` writes what a process died of."""
        return self._folder / f"error-{process_rank}.json"

    def _failed_at(self, process_rank: int) -> int:
        # By the age of what it wrote on its way out: exit codes that are found at one look have no order.
        path = self._error_path(process_rank)
        return path.stat().st_mtime_ns if path.exists() else 0

    def _cause(self, process_rank: int) -> str:
        try:
            cause = json.loads(self._error_path(process_rank).read_text())["message"]
        except (OSError, ValueError, KeyError):
            return f"process {process_rank} {self._processes[process_rank].ending}"
        message = str(cause["message"] if isinstance(cause, dict) else cause)
        return f"process {process_rank}: {message.strip().partition(chr(10))[0]}"


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    for name in LOOPBACKS:
        if name in names:
            return name
    raise ConfigError(
        f"processes on one machine are joined over its loopback interface, {' or '.join(LOOPBACKS)}; this "
        f"one has {', '.join(names) or 'no interface'}"
    )


def is_in_local_job() -> bool:
    """Return whether this process was started by a `LocalJob`."""
    return STORE_VARIABLE in os.environ


def join_local_job(backend: str, *, timeout_seconds: float) -> None:
    """Make the default process group of a `LocalJob`'s processes."""
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend,
        store=FileStore(os.environ[STORE_VARIABLE], size),
        rank=int(os.environ["RANK"]),
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def run_here(processes: int | None, option: str = "--processes") -> None:
    """Run this very command in so many processes of this machine.

    Exits as they do. Returns at once in one of them, and where None is asked for.
    """
    if processes is None or is_in_local_job():
        return
    processes_here(option.removeprefix("--"), processes, minimum=1)
    if "RANK" in os.environ:
        raise ConfigError(
            f"{option} starts a job on this machine, but this is a process of one (RANK is set): leave it out"
        )
    command = [*python_module("thinwire"), *sys.argv[1:]]
    with EndSignals() as end_signals, LocalJob(command, processes) as job:
        received = end_signals.stand_by(job.is_running)
    if received is not None:
        name = signal.Signals(received).name
        print(
            f"thinwire: stopped by {name}; every process has ended, the same command begins anew",
            file=sys.stderr,
        )
        sys.exit(128 + received)
    sys.exit(job.exit_code)


def python_module(name: str) -> list[str]:
    """Return the command that runs a module, with the current folder on its path only if this process has it.

    `python -m` puts that folder first, so in a stranger's folder a `random.py` would run. (Python 3.10 can't
    be kept from it.)
    """
    has_current = any(Path(each or ".").resolve() == Path.cwd() for each in sys.path)
    leave_out = [] if has_current or sys.version_info < (3, 11) else ["-P"]
    return [sys.executable, *leave_out, "-m", name]
