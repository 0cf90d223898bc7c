"""Processes that are started here: their output, the signals for them, their end; and jobs of them."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import IO, Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from thinwire.errors import ConfigError
from thinwire.lifeline import END_ALL, LAUNCHER_VARIABLE, following

STORE_VARIABLE = "THINWIRE_STORE"  # in the environment of a job's processes: the file by which they meet
LOOPBACKS = ("lo", "lo0")
LOOK_EVERY_SECONDS = 0.05
END_WITHIN_SECONDS = 10.0
LAST_WORDS_SECONDS = 5.0  # for the output of a process to end: what it has started may have that open still

Opened = TypeVar("Opened", bound="Job")


class EndSignals:
    """While open, remembers a signal that asks this process to end, instead of being ended by it.

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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

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

    def follow(self, lines: IO[bytes], prefix: bytes) -> None:
        """Write all lines, each with a prefix; go on reading when nothing can be written any more."""
        # A process whose pipe is full would never end.
        with lines:
            for line in lines:
                self._write(prefix + line.removesuffix(b"\n") + b"\n")

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self.error is None:
                try:
                    self._out.write(line)
                    # At once: a pipe's buffer would hold back the last words of a process that fails.
                    self._out.flush()
                except OSError as error:
                    self.error = error


class Process:
    """A process that is started here, and ends with this one.

    With `enter`, which enters a machine of the lab, it also ends with all that it has started, and its
    signals are for its process group, as on a terminal.

    Attributes:
        seconds: How long it ran, by the look that found its end; None before.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        out: Output | IO[bytes] | None,
        prefix: str = "",
        *,
        enter: Sequence[str] | None = None,
    ) -> None:
        self.seconds: float | None = None
        self._start, self._is_kept = time.monotonic(), enter is not None
        self._process = subprocess.Popen(
            [*(enter or []), *following(command, is_kept=self._is_kept)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if isinstance(out, Output) else out,
            stderr=None if out is None else subprocess.STDOUT,
            # One thread each, unless the user says otherwise: they share the cores of one machine.
            env={"OMP_NUM_THREADS": "1", **os.environ, LAUNCHER_VARIABLE: str(os.getpid()), **variables},
            # Ctrl-C on a terminal reaches every process of its session at once; here, this process alone
            # hears it, and ends the others in order.
            start_new_session=True,
        )
        self._reader: threading.Thread | None = None
        if isinstance(out, Output):
            given = self._process.stdout, prefix.encode()
            self._reader = threading.Thread(target=out.follow, args=given, daemon=True)
            self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """As a shell tells it, 128 + the signal that ended it; None while it runs."""
        code = self._process.poll()
        if code is not None and self.seconds is None:
            self.seconds = time.monotonic() - self._start
        return code if code is None or code >= 0 else 128 - code

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        assert code is not None
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def read_to_the_end(self) -> None:
        """Wait for the last lines of a process that has ended."""
        if self._reader is not None:
            self._reader.join(None if self._is_kept else LAST_WORDS_SECONDS)

    def send(self, number: int) -> None:
        """Send a signal, if it still runs; SIGKILL ends it for certain."""
        # Once it has ended, its number may be another process's.
        if self.exit_code is not None:
            return
        if not self._is_kept:
            os.kill(self._process.pid, number)
        elif number == signal.SIGKILL:
            # At SIGKILL its keeper could end nobody.
            os.kill(self._process.pid, END_ALL)
        else:
            os.killpg(self._process.pid, number)


class Job:
    """While open, processes run here; all of them have ended afterwards.

    The first that fails ends the others: they are asked to after `grace_seconds`, and killed
    `end_within_seconds` later. A signal asks them at once, a further one kills them. If their output can't be
    written, they are asked at once, too.

    Attributes:
        processes: By place, from 0.
        failure: What the first that failed died of, in one line; None if none has.
        received: The signal that has asked the job to end; None if none has.
    """

    def __init__(
        self,
        start: Callable[[int], Process],
        size: int,
        *,
        out: Output | IO[bytes] | None = None,
        grace_seconds: float = 0.0,
        end_within_seconds: float = END_WITHIN_SECONDS,
        passes_signals_on: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.processes: list[Process] = []
        self.failure: str | None = None
        self.received: int | None = None
        self._start, self._size, self._out, self._say = start, size, out, say
        self._grace_seconds, self._end_within_seconds = grace_seconds, end_within_seconds
        self._passes_signals_on = passes_signals_on
        self._signals, self._opened = EndSignals(), ExitStack()
        self._failed_code = 0
        self._over_since: float | None = None

    def __enter__(self: Opened) -> Opened:
        with ExitStack() as opened:
            # Before any process: a signal while they start must end them, too.
            opened.enter_context(self._signals)
            self._prepare(opened)
            opened.callback(self.end)
            for place in range(self._size):
                self.processes.append(self._start(place))
            # Only now: if one can't be started, those before it are ended on the way out.
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def exit_code(self) -> int:
        """0 if all ended well, else as a shell tells it; 128 + the signal if one has ended the job."""
        if self.received is not None:
            return 128 + self.received
        error = self.output_error
        if error is not None:
            return 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else 1
        return self._code_of_failure()

    @property
    def output_error(self) -> OSError | None:
        """Why what the processes print can't be written; None as long as it can."""
        return self._out.error if isinstance(self._out, Output) else None

    def run(self, each_look: Callable[[], None] = lambda: None) -> int | None:
        """Stay until the job has ended; return the signal that asked it to, if one did."""
        while self.look() and self._signals.received is None:
            each_look()
            time.sleep(LOOK_EVERY_SECONDS)
        self.received = self._signals.received
        if self.received is not None:
            name = signal.Signals(self.received).name
            self._say(f"{name}: all are asked to end; a further signal kills them")
        self.end()
        each_look()
        return self.received

    def look(self) -> bool:
        """Look after the processes once; return whether the job goes on."""
        codes = [process.exit_code for process in self.processes]
        failed = [place for place, code in enumerate(codes) if code]
        if failed and self._over_since is None:
            first = min(failed, key=self._failed_at)
            self.failure, self._failed_code = self._cause(first), codes[first] or 0
            self._over_since = time.monotonic()
        # Not ended at once: the others find out by themselves, and their own words tell more than a signal's.
        return None in codes and self.output_error is None and self._is_within(self._grace_seconds)

    def end(self) -> None:
        """Ask all that still run to end, and kill those that take too long, or all at a further signal."""
        numbers, num_received = [int(signal.SIGTERM)], self._signals.num_received
        if self.received is not None and self._passes_signals_on:
            numbers.insert(0, self.received)
        for number in numbers:
            # All are asked first, and share one deadline: they may be waiting for each other.
            self._send(number)
            deadline = time.monotonic() + self._end_within_seconds
            while (
                self.is_running and time.monotonic() < deadline and self._signals.num_received == num_received
            ):
                time.sleep(LOOK_EVERY_SECONDS)
        self._send(signal.SIGKILL)
        while self.is_running:
            time.sleep(LOOK_EVERY_SECONDS)
        for process in self.processes:
            process.read_to_the_end()

    def _prepare(self, opened: ExitStack) -> None:
        """Open what the processes need, before they start; it closes after their end."""

    def _code_of_failure(self) -> int:
        return self._failed_code

    def _failed_at(self, place: int) -> int:
        """Return a time that tells the order of failures found at one look."""
        return 0

    def _cause(self, place: int) -> str:
        return f"process {place} {self.processes[place].ending}"

    def _is_within(self, seconds: float) -> bool:
        """Return whether the job is not over, or was found to be for no longer than this."""
        return self._over_since is None or time.monotonic() < self._over_since + seconds

    @property
    def is_running(self) -> bool:
        """Whether some processes still run."""
        return any(process.exit_code is None for process in self.processes)

    def _send(self, number: int) -> None:
        for process in self.processes:
            process.send(number)


class LocalJob(Job):
    """A job whose processes are told what torchrun would tell them; `join_local_job` makes their group.

    They find each other by a file that other users can't open, and listen on the loopback interface only.
    torchrun's rendezvous would listen on every address, and load pickles from whoever reaches it.
    """

    def __init__(self, command: Sequence[str], processes: int, *, out: IO[bytes] | None = None) -> None:
        super().__init__(self._started, processes, out=out)
        self._command, self._interface = list(command), loopback_interface()

    def _prepare(self, opened: ExitStack) -> None:
        # Of mode 0700: whoever could write to the file could tell the processes to connect elsewhere.
        self._folder = Path(opened.enter_context(TemporaryDirectory(prefix="thinwire-job-")))

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
        # By the age of what it wrote on its way out. A process that wrote nothing was killed, and is first:
        # the others' errors are for want of it.
        path = self._error_path(process_rank)
        return path.stat().st_mtime_ns if path.exists() else 0

    def _cause(self, process_rank: int) -> str:
        try:
            cause = json.loads(self._error_path(process_rank).read_text())["message"]
        except (OSError, ValueError, KeyError):
            return super()._cause(process_rank)
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


def leave_group() -> None:
    """Destroy the default process group, and before that what keeps it."""
    # A DDP model that is still there, in a cycle, keeps the backend's threads running into the interpreter's
    # end, where they now and then abort.
    gc.collect()
    dist.destroy_process_group()


def python_module(name: str) -> list[str]:
    """Return the command that runs a module, with the current folder on its path only if this process has it.

    `python -m` puts that folder first, so in a stranger's folder a `random.py` would run. (Python 3.10 can't
    be kept from it.)
    """
    has_current = any(Path(each or ".").resolve() == Path.cwd() for each in sys.path)
    leave_out = [] if has_current or sys.version_info < (3, 11) else ["-P"]
    return [sys.executable, *leave_out, "-m", name]
