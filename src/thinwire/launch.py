"""Jobs of processes on this machine: their output, signals and end."""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from unittest.mock import patch

from thinwire.errors import ConfigError
from thinwire.local_job import LAUNCHER, STORE_VARIABLE, is_in_local_job

LOOK_EVERY_SECONDS = 0.05
END_WITHIN_SECONDS = 10.0
LAST_WORDS_SECONDS = 5.0  # wait for the output of an ended process: its children may still have it open
# Runs a command that Linux kills when its parent ends: by PR_SET_PDEATHSIG, 1 in <sys/prctl.h>.
END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): sys.exit(1)  # it ended before the request
os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_this(command: Sequence[str]) -> list[str]:
    """Return a command that ends with this process; on macOS, only when its messages fail."""
    first = [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid())]
    return [*(first if sys.platform == "linux" else []), *command]


@contextmanager
def end_signals() -> Iterator[list[int]]:
    """Yield a list; signals that would end this process are appended to it instead."""
    received: list[int] = []
    previous: dict[int, Any] = {}
    for signum in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        # An ignored signal stays ignored: nohup relies on it.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class Output:
    """Writes lines of several processes, one at a time; `error` is why no more can be written."""

    def __init__(self, out: IO[bytes]) -> None:
        self.error: OSError | None = None  # kept, not raised: threads write, and the job handles it
        self._out, self._lock = out, threading.Lock()

    def copy(self, lines: IO[bytes], prefix: bytes) -> None:
        """Write all lines, each after a prefix."""
        with lines:
            for line in lines:
                with self._lock:
                    if self.error is not None:
                        continue  # keep reading: a process with a full pipe would never end
                    try:
                        self._out.write(prefix + line.removesuffix(b"\n") + b"\n")
                        self._out.flush()
                    except OSError as error:
                        self.error = error


class Process:
    """A process that ends with this one; its output goes to `out`, or where this one's goes.

    With `as_group`, signals go to its whole process group, as on a terminal.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        out: Output | None = None,
        prefix: str = "",
        *,
        errors: IO[bytes] | None = None,
        as_group: bool = False,
    ) -> None:
        self.seconds: float | None = None  # how long it ran, once it has ended
        self._start, self._as_group = time.monotonic(), as_group
        self._process = subprocess.Popen(
            ending_with_this(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if out is not None else None,
            stderr=subprocess.STDOUT if out is not None else errors,
            # One thread each, unless the user sets more: they share one machine's cores.
            env={"OMP_NUM_THREADS": "1", **os.environ, LAUNCHER: str(os.getpid()), **variables},
            # Ctrl-C on a terminal reaches a whole session: so only this process, which ends the others.
            start_new_session=True,
        )
        self._reader: threading.Thread | None = None
        if out is not None:
            arguments = self._process.stdout, prefix.encode()
            self._reader = threading.Thread(target=out.copy, args=arguments, daemon=True)
            self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code as in a shell: 128 + the signal that ended it; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self.seconds = self.seconds or time.monotonic() - self._start
        return code if code >= 0 else 128 - code

    def read_to_the_end(self) -> None:
        """Wait for the last output of a process that has ended."""
        if self._reader is not None:
            self._reader.join(LAST_WORDS_SECONDS)

    def send(self, number: int) -> None:
        """Send a signal, if it still runs: later its id may belong to another process."""
        if self.exit_code is None:
            (os.killpg if self._as_group else os.kill)(self._process.pid, number)


def ending(code: int) -> str:
    """Return how a process with this exit code has ended, for a message."""
    return f"was ended by signal {code - 128}" if code > 128 else f"ended with exit code {code}"


def ranks_of(rank: int, size: int) -> dict[str, str]:
    """Return torchrun's variables for a process's rank, if all are on one machine."""
    ranks, sizes = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {**dict.fromkeys(ranks, f"{rank}"), **dict.fromkeys(sizes, f"{size}")}


class Job:
    """Processes on this machine; the first that fails ends the others.

    The others get SIGTERM after `grace_seconds`, and are killed `end_within_seconds` later. A signal to this
    process, or output that can't be written, skips the grace time; a second signal kills them.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        size: int,
        *,
        output: Output | None = None,
        grace_seconds: float = 0.0,
        end_within_seconds: float = END_WITHIN_SECONDS,
        passes_signals_on: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not hasattr(signal, "SIGHUP"):
            raise ConfigError(
                "Windows lacks the signals that end processes of a job; use WSL, or start each yourself"
            )
        self.processes: list[Any] = []  # each a Process, or several as one
        self.failure: str | None = None  # how the first failed process ended
        self.received: int | None = None  # the signal that has asked the job to end
        self.exit_code = 0  # follows the shell's rule: 128 + the signal if one has ended the job
        self.output = output or Output(sys.stdout.buffer)  # unless processes print where this one does
        self._start, self._size, self._say = start, size, say
        self._grace_seconds, self._end_within_seconds = grace_seconds, end_within_seconds
        self._passes_signals_on = passes_signals_on
        self._deadline = math.inf  # set when the job is over, for processes that still run

    @property
    def is_running(self) -> bool:
        """Whether some processes still run."""
        return any(process.exit_code is None for process in self.processes)

    def run(self) -> int | None:
        """Run until all processes have ended; return the signal that ended the job, if one did."""
        with ExitStack() as opened:
            # Before any process starts: a signal during the start must end them, too.
            signals = opened.enter_context(end_signals())
            self._prepare(opened)
            # If one can't be started, leaving this context ends those before it.
            opened.callback(self._end, signals)
            for index in range(self._size):
                self.processes.append(self._start(index))
            while self._continues() and not signals:
                time.sleep(LOOK_EVERY_SECONDS)
            if signals:
                self.received = signals[-1]
                name = signal.Signals(self.received).name
                self._say(f"{name}: asking all processes to end; another signal kills them")
        if self.received is not None:
            self.exit_code = 128 + self.received
        elif self.output.error is not None:
            self.exit_code = 128 + signal.SIGPIPE if isinstance(self.output.error, BrokenPipeError) else 1
        return self.received

    def _prepare(self, opened: ExitStack) -> None:
        """Open what the processes need before they start; `opened` closes it after their end."""

    def _continues(self) -> bool:
        """Check the processes once; return whether the job continues."""
        codes = [process.exit_code for process in self.processes]
        failed = [index for index, code in enumerate(codes) if code]
        if failed and self.failure is None:
            # Prefer one that a signal has ended: the others failed because it was missing.
            first = max(failed, key=lambda index: codes[index] > 128)
            self.failure, self.exit_code = f"process {first} {ending(codes[first])}", codes[first]
            # Wait first: the others notice the failure, and their own errors say more than a signal's.
            self._deadline = time.monotonic() + self._grace_seconds
        return None in codes and self.output.error is None and time.monotonic() < self._deadline

    def _end(self, signals: Sequence[int]) -> None:
        """Ask running processes to end; kill them if they take too long, or at another signal."""
        num_received, asks = len(signals), [int(signal.SIGTERM)]
        if self.received is not None and self._passes_signals_on:
            asks.insert(0, self.received)
        for signum in asks:
            # Ask all first, with one deadline: they may be waiting for each other.
            for process in self.processes:
                process.send(signum)
            deadline = time.monotonic() + self._end_within_seconds
            while self.is_running and time.monotonic() < deadline and len(signals) == num_received:
                time.sleep(LOOK_EVERY_SECONDS)
        for process in self.processes:
            process.send(signal.SIGKILL)
        while self.is_running:
            time.sleep(LOOK_EVERY_SECONDS)
        for process in self.processes:
            process.read_to_the_end()


class LocalJob(Job):
    """A job whose processes get torchrun's variables; `join_group` makes their group.

    They find each other through a file that other users can't open, and listen only on the loopback
    interface. torchrun's rendezvous would listen on every address, and load pickles from anyone who connects.
    """

    def __init__(self, command: Sequence[str], processes: int, *, errors: IO[bytes] | None = None) -> None:
        super().__init__(self._started, processes)
        self._command, self._errors, self._interface = list(command), errors, loopback_interface()

    def _prepare(self, opened: ExitStack) -> None:
        # Its mode is 0700: whoever could write to the file could make the processes connect elsewhere.
        self._store = Path(opened.enter_context(TemporaryDirectory(prefix="thinwire-job-")), "store")

    def _started(self, rank: int) -> Process:
        interfaces = {"GLOO_SOCKET_IFNAME": self._interface, "NCCL_SOCKET_IFNAME": self._interface}
        variables = {**ranks_of(rank, self._size), **interfaces, STORE_VARIABLE: str(self._store)}
        return Process(self._command, variables, errors=self._errors)


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    if loopback := {"lo", "lo0"}.intersection(names):
        return loopback.pop()
    has = ", ".join(names) or "none"
    raise ConfigError(f"this machine has no loopback interface, lo or lo0, to join processes: it has {has}")


def join_group(backend: str, *, timeout_seconds: float) -> None:
    """Make the default process group: through a `LocalJob`'s file, or else from torchrun's variables."""
    import torch.distributed as dist  # noqa: PLC0415 - slow to import; a command may only start processes
    from torch._C._distributed_c10d import FileStore  # noqa: PLC0415

    where: dict[str, Any] = {}
    if is_in_local_job():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = {"store": FileStore(os.environ[STORE_VARIABLE], size), "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **where)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make a default process group of only this process, which listens only on the loopback interface."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch._C._distributed_c10d import HashStore  # noqa: PLC0415

    # Otherwise Gloo would listen on the address of this machine's name, which others may reach.
    with patch.dict(os.environ, GLOO_SOCKET_IFNAME=loopback_interface()):
        # A store in memory: there are no others to find, and no port is opened.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            leave_group()


def leave_group() -> None:
    """Destroy the default process group, after garbage that keeps it alive."""
    import torch.distributed as dist  # noqa: PLC0415

    # A DDP model in an uncollected cycle keeps the backend's threads, which sometimes abort Python's end.
    gc.collect()
    dist.destroy_process_group()


def python_module(name: str) -> list[str]:
    """Return the command that runs a module; the current folder is on its path only if it is on ours.

    From Python 3.11 on: in someone else's folder, `python -m` would run a `random.py` from there.
    """
    has_current = any(Path(folder or ".").resolve() == Path.cwd() for folder in sys.path)
    leave_out = [] if has_current or sys.version_info < (3, 11) else ["-P"]
    return [sys.executable, *leave_out, "-m", name]
