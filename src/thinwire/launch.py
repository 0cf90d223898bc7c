"""Processes that are started here: their output, the signals for them, their end; and jobs of them."""

from __future__ import annotations

import gc
import json
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

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from thinwire.checks import number, whole_count
from thinwire.errors import ConfigError
from thinwire.exit_with_launcher import END_ALL, LAUNCHER_VARIABLE, exiting_with_this
from thinwire.local_sgd.groups.torchft_client import torchft_module
from thinwire.local_sgd.groups.torchft_group import HOSTNAME, LIGHTHOUSE, MEMBER, MIN_MEMBERS

STORE_VARIABLE = "THINWIRE_STORE"  # in the environment of a job's processes: the file by which they meet
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACES = ("lo", "lo0")
LOOK_EVERY_SECONDS = 0.05
END_WITHIN_SECONDS = 10.0
LAST_WORDS_SECONDS = 5.0  # for the output of a process to end: what it has started may have that open still
JOIN_TIMEOUT_MS = 60_000


@contextmanager
def end_signals() -> Iterator[list[int]]:
    """Yield a list to which each signal is appended that asks this process to end, instead of ending it."""
    received: list[int] = []
    previous: dict[int, Any] = {}
    for signum in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        # An ignored signal stays ignored: nohup asks for that.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            previous[signum] = signal.signal(signum, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class Output:
    """Writes the lines of several processes, one at a time; `error` says why no more can be written."""

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
                with self._lock:
                    if self.error is not None:
                        continue
                    try:
                        self._out.write(prefix + line.removesuffix(b"\n") + b"\n")
                        # At once: a buffer would hold back the last words of a process that fails.
                        self._out.flush()
                    except OSError as error:
                        self.error = error


class Process:
    """A process that is started here, and ends with this one; what it prints goes to `out`, or as ours does.

    With `enter`, a command that enters a machine of the lab, it also ends with all that it has started, and
    its signals are for its process group, as on a terminal. `seconds` is how long it ran, once that is seen.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        out: Output | None,
        prefix: str = "",
        *,
        errors: IO[bytes] | None = None,
        enter: Sequence[str] = (),
    ) -> None:
        self.seconds: float | None = None
        self._start, self._is_kept = time.monotonic(), bool(enter)
        self._process = subprocess.Popen(
            [*enter, *exiting_with_this(command, is_kept=self._is_kept)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if out is not None else None,
            stderr=subprocess.STDOUT if out is not None else errors,
            # One thread each, unless the user says otherwise: they share the cores of one machine.
            env={"OMP_NUM_THREADS": "1", **os.environ, LAUNCHER_VARIABLE: str(os.getpid()), **variables},
            # Ctrl-C on a terminal reaches every process of its session at once; here, this process alone
            # hears it, and ends the others in order.
            start_new_session=True,
        )
        self._reader: threading.Thread | None = None
        if out is not None:
            arguments = self._process.stdout, prefix.encode()
            self._reader = threading.Thread(target=out.follow, args=arguments, daemon=True)
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
        code = self._process.returncode
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def read_to_the_end(self) -> None:
        """Wait for the last lines of a process that has ended."""
        if self._reader is not None:
            self._reader.join(None if self._is_kept else LAST_WORDS_SECONDS)

    def send(self, number: int) -> None:
        """Send a signal, if it still runs; SIGKILL ends it for certain."""
        # Once it has ended, its number may be a different process's.
        if self.exit_code is not None:
            return
        if not self._is_kept:
            os.kill(self._process.pid, number)
        elif number == signal.SIGKILL:
            # At SIGKILL its keeper could end no one.
            os.kill(self._process.pid, END_ALL)
        else:
            os.killpg(self._process.pid, number)


def places_of(rank: int, size: int) -> dict[str, str]:
    """Return the variables by which torchrun tells a process its rank, if all are on one machine."""
    own, all_of_them = str(rank), str(size)
    return {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": all_of_them, "LOCAL_WORLD_SIZE": all_of_them}


class ProcessesOfMember:
    """Several processes that end together, and look like one: the first that fails ends the others at once.

    They are told what torchrun tells its own.
    """

    def __init__(self, start: Callable[[Mapping[str, str]], Process], size: int) -> None:
        # A free port that no one can take meanwhile: the listener becomes the store's. It is closed with it.
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        self._store = TCPStore(LOOPBACK, port, master_listen_fd=listener.detach(), **options)
        variables = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "none",
        }
        self._failed: Process | None = None
        self._processes: list[Process] = []
        try:
            for rank in range(size):
                self._processes.append(start({**variables, **places_of(rank, size)}))
        except BaseException:
            self.send(signal.SIGKILL)
            raise

    @property
    def exit_code(self) -> int | None:
        """The code of the first to fail, once all have ended; 0 if all ended well; None while some run."""
        codes = [process.exit_code for process in self._processes]
        if self._failed is None:
            self._failed = next((process for process in self._processes if process.exit_code), None)
            # One is gone, and the others can do nothing without it, not even leave in order.
            if self._failed is not None:
                self.send(signal.SIGKILL)
        if None in codes:
            return None
        return 0 if self._failed is None else self._failed.exit_code

    @property
    def ending(self) -> str:
        """How the first that failed ended, in words."""
        return (self._failed or self._processes[0]).ending

    def read_to_the_end(self) -> None:
        """As `Process.read_to_the_end`, of all."""
        for process in self._processes:
            process.read_to_the_end()

    def send(self, number: int) -> None:
        """As `Process.send`, to all."""
        for process in self._processes:
            process.send(number)


class Job:
    """Processes that run here; the first that fails ends the others.

    They are asked to end after `grace_seconds`, and killed `end_within_seconds` later. A signal asks them at
    once, a further one kills them. If their output can't be written, they are asked at once, too.

    Attributes:
        processes: By place, from 0.
        failure: What the first that failed died of, in one line; None if none has.
        received: The signal that has asked the job to end; None if none has.
    """

    def __init__(
        self,
        start: Callable[[int], Process | ProcessesOfMember],
        size: int,
        *,
        out: Output | None = None,
        grace_seconds: float = 0.0,
        end_within_seconds: float = END_WITHIN_SECONDS,
        passes_signals_on: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.processes: list[Any] = []  # each a Process, or several as one
        self.failure: str | None = None
        self.received: int | None = None
        self._start, self._size, self._out, self._say = start, size, out, say
        self._grace_seconds, self._end_within_seconds = grace_seconds, end_within_seconds
        self._passes_signals_on = passes_signals_on
        self._failed_code = 0
        self._deadline = math.inf  # set when the job is over, for those that still run

    @property
    def exit_code(self) -> int:
        """0 if all ended well, else as a shell tells it; 128 + the signal if one has ended the job."""
        if self.received is not None:
            return 128 + self.received
        if self.output_error is not None:
            return 128 + signal.SIGPIPE if isinstance(self.output_error, BrokenPipeError) else 1
        return self._failed_code

    @property
    def output_error(self) -> OSError | None:
        """Why what the processes print can't be written; None as long as it can."""
        return self._out.error if self._out is not None else None

    @property
    def is_running(self) -> bool:
        """Whether some processes still run."""
        return any(process.exit_code is None for process in self.processes)

    def run(self, each_look: Callable[[], None] = lambda: None) -> int | None:
        """Stay until all processes have ended; return the signal that asked them to, if one did."""
        with ExitStack() as opened:
            # Before any process: a signal while they start must end them, too.
            self._signals = opened.enter_context(end_signals())
            self._prepare(opened)
            # If one can't be started, those before it are ended on the way out.
            opened.callback(self._end)
            for place in range(self._size):
                self.processes.append(self._start(place))
            while self._goes_on() and not self._signals:
                each_look()
                time.sleep(LOOK_EVERY_SECONDS)
            if self._signals:
                self.received = self._signals[-1]
                name = signal.Signals(self.received).name
                self._say(f"{name}: all are asked to end; a further signal kills them")
        each_look()
        return self.received

    def _prepare(self, opened: ExitStack) -> None:
        """Open what the processes need, before they start; it closes after their end."""

    def _goes_on(self) -> bool:
        """Look after the processes once; return whether the job goes on."""
        codes = [process.exit_code for process in self.processes]
        failed = [place for place, code in enumerate(codes) if code]
        if failed and self.failure is None:
            first, self.failure = self._first_of(failed)
            self._failed_code = codes[first] or 0
            # Wait first: the others find out by themselves, and their own words tell more than a signal's.
            self._deadline = time.monotonic() + self._grace_seconds
        return None in codes and self.output_error is None and time.monotonic() < self._deadline

    def _end(self) -> None:
        """Ask all that still run to end, and kill those that take too long, or all at a further signal."""
        numbers, num_received = [int(signal.SIGTERM)], len(self._signals)
        if self.received is not None and self._passes_signals_on:
            numbers.insert(0, self.received)
        for signum in numbers:
            # All are asked first, and share one deadline: they may be waiting for each other.
            self._send(signum)
            deadline = time.monotonic() + self._end_within_seconds
            while self.is_running and time.monotonic() < deadline and len(self._signals) == num_received:
                time.sleep(LOOK_EVERY_SECONDS)
        self._send(signal.SIGKILL)
        while self.is_running:
            time.sleep(LOOK_EVERY_SECONDS)
        for process in self.processes:
            process.read_to_the_end()

    def _send(self, number: int) -> None:
        for process in self.processes:
            process.send(number)

    def _first_of(self, failed: list[int]) -> tuple[int, str]:
        """Return which of the processes found to have failed was the first, and what it died of."""
        return failed[0], f"process {failed[0]} {self.processes[failed[0]].ending}"


class LocalJob(Job):
    """A job whose processes are told what torchrun would tell them; `join_group` makes their group.

    They find each other by a file that other users can't open, and listen on the loopback interface only.
    torchrun's rendezvous would listen on every address, and load pickles from anyone who reaches it.
    """

    def __init__(self, command: Sequence[str], processes: int, *, errors: IO[bytes] | None = None) -> None:
        super().__init__(self._started, processes)
        self._command, self._errors, self._interface = list(command), errors, loopback_interface()

    def _prepare(self, opened: ExitStack) -> None:
        # Its mode is 0700: anyone who could write to the file could tell the processes to connect elsewhere.
        self._folder = Path(opened.enter_context(TemporaryDirectory(prefix="thinwire-job-")))

    def _started(self, process_rank: int) -> Process:
        variables = {
            **places_of(process_rank, self._size),
            "GLOO_SOCKET_IFNAME": self._interface,
            "NCCL_SOCKET_IFNAME": self._interface,
            "TORCHELASTIC_ERROR_FILE": str(self._error_path(process_rank)),
            STORE_VARIABLE: str(self._folder / "store"),
        }
        return Process(self._command, variables, None, errors=self._errors)

    def _error_path(self, process_rank: int) -> Path:
        """Return where `torch.distributed.elastic`'s decorator `record` writes what a process died of."""
        return self._folder / f"error-{process_rank}.json"

    def _first_of(self, failed: list[int]) -> tuple[int, str]:
        # In the order in which each wrote at its end. A process that wrote nothing was killed, and is first:
        # the others' errors are for want of it.
        paths = {rank: self._error_path(rank) for rank in failed}
        ages = {rank: path.stat().st_mtime_ns if path.exists() else 0 for rank, path in paths.items()}
        first = min(failed, key=ages.__getitem__)
        try:
            cause = json.loads(paths[first].read_text())["message"]
        except (OSError, ValueError, KeyError):
            return super()._first_of([first])
        message = str(cause["message"] if isinstance(cause, dict) else cause)
        return first, f"process {first}: {message.strip().partition(chr(10))[0]}"


class ElasticJob(Job):
    """Elastic members on this machine, and a lighthouse unless one was given.

    A member that dies (by a signal, or an exit code other than 0) is started again. It finds in its
    environment what `elastic.TorchftGroup` reads, and its number, from 0, which it keeps. If it is several
    processes, they find what torchrun would tell them, of this member alone.

    The exit code is 0 if no member died for good, or enough have ended well: as many as an averaging needs,
    or one if a lighthouse was given, which may have other members. Else it is that of the first that died so.
    """

    def __init__(  # noqa: PLR0913 - the options of `thinwire run`
        self,
        command: Sequence[str],
        members: int,
        *,
        processes_per_member: int = 1,
        min_members: int = 1,
        lighthouse: str | None = None,
        host: str | None = None,
        port: int = 0,
        max_restarts: int = 3,
        end_within_seconds: float = 30.0,
        say: Callable[[str], None] = lambda line: None,
        out: IO[bytes],
    ) -> None:
        super().__init__(
            self._started,
            whole_count("max", members, minimum=1),
            out=Output(out),
            end_within_seconds=number("grace_seconds", end_within_seconds, minimum=0),
            say=say,
        )
        self._command = list(command)
        self._min_members = whole_count("min", min_members, minimum=1)
        self._processes = whole_count("processes_per_member", processes_per_member, minimum=1)
        self._max_restarts = whole_count("max_restarts", max_restarts, minimum=0)
        if lighthouse is None and members < min_members:
            few = f"max={members} members are fewer than min={min_members}: they would wait forever"
            raise ConfigError(f"{few}; raise max, or give the lighthouse where others are")
        if lighthouse is not None and port:
            raise ConfigError("port is of a lighthouse that is started here; leave it out with lighthouse")
        self._torchft = torchft_module("torchft.coordination")
        self._port, self._given = port, lighthouse
        self._address = lighthouse or ""
        self._host = host or (LOOPBACK if lighthouse is None else None)
        self._restarts = [0] * members
        self._ended: dict[int, int] = {}  # exit codes of members that have ended for good, in that order

    def _goes_on(self) -> bool:
        """Start again those that have died; return whether the job goes on.

        It does not when all have ended, too many have died for good for the others to go on, or what
        they print can't be written; nor when some have ended well, and `end_within_seconds` later others, too
        few for an averaging, have not.
        """
        codes_of = [(member, process.exit_code) for member, process in enumerate(self.processes)]
        self._ended.update((member, 0) for member, code in codes_of if code == 0)
        for member, code in codes_of:
            if code and member not in self._ended:
                self._take_back(member, code)
        codes = list(self._ended.values())
        are_well = codes.count(0) >= (self._min_members if self._given is None else 1)
        self._failed_code = 0 if are_well else next(filter(None, codes), 0)
        if self.output_error is not None or len(self._ended) == self._size:
            return False
        if self._are_enough() or 0 not in codes:
            return self._are_enough()
        # One has ended well: training is over, and the others are about to end, too; but for one that came
        # too late, and would wait for members that never come.
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self._end_within_seconds
        return time.monotonic() < self._deadline

    def _take_back(self, member: int, code: int) -> None:
        """Start a member that has died again, unless that is of no use."""
        self.processes[member].read_to_the_end()
        ended = self.processes[member].ending
        # A member that has just died still counts as going on here: with it back, they are enough. But if
        # all others have ended, one of them well, training is over: it would begin from scratch.
        is_over = len(self._ended) == self._size - 1 and 0 in self._ended.values()
        if self._restarts[member] < self._max_restarts and self._are_enough() and not is_over:
            self._restarts[member] += 1
            self.processes[member] = self._started(member)
            again = f"started again ({self._restarts[member]} of {self._max_restarts} restarts)"
        else:
            self._ended[member] = code
            again = "not started again"
        self._say(f"member {member} {ended}; {again}")

    def _are_enough(self) -> bool:
        # At a lighthouse that was given there may be others.
        return self._given is not None or self._size - len(self._ended) >= self._min_members

    def _started(self, member: int) -> Process | ProcessesOfMember:
        variables = {
            "PYTHONUNBUFFERED": "1",  # lines come when they are printed
            LIGHTHOUSE: self._address,
            MIN_MEMBERS: str(self._min_members),
            MEMBER: str(member),
        }
        if self._host is not None:
            variables[HOSTNAME] = self._host
        if self._host == LOOPBACK:
            variables["GLOO_SOCKET_IFNAME"] = loopback_interface()
        if self._processes == 1:
            return Process(self._command, variables, self._out, f"[{member}] ")

        def start(told: Mapping[str, str]) -> Process:
            return Process(self._command, {**variables, **told}, self._out, f"[{member}.{told['RANK']}] ")

        return ProcessesOfMember(start, self._processes)

    def _prepare(self, opened: ExitStack) -> None:
        """Start a lighthouse, unless one was given; it ends last: members that leave still ask it."""
        if self._given is not None:
            return
        try:
            # One member is enough to it: how many an averaging needs, they see to themselves, and one that is
            # asked to leave learns that it is alone. In this process: it ends with it, whatever ends that.
            server = self._torchft.LighthouseServer(
                bind=f"{self._host}:{self._port}",
                min_replicas=1,
                # It waits as long as torchft_lighthouse; a member that comes 0.1 s late would be left behind.
                join_timeout_ms=JOIN_TIMEOUT_MS,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"a lighthouse can't listen at {self._host}:{self._port}: {error}; change host or port"
            ) from error
        opened.callback(server.shutdown)
        # It names the port truly, and the host by this machine's name, which others may not know.
        self._address = f"http://{self._host}:{server.address().rpartition(':')[2]}"
        needed = f"averagings need {self._min_members} members, {self._size} start here"
        self._say(f"lighthouse {self._address}; {needed}")


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    found = next((name for name in LOOPBACK_INTERFACES if name in names), None)
    if found is None:
        raise ConfigError(
            f"processes on one machine are joined over its loopback interface, "
            f"{' or '.join(LOOPBACK_INTERFACES)}; this one has {', '.join(names) or 'no interface'}"
        )
    return found


def is_in_local_job() -> bool:
    """Return whether this process was started by a `LocalJob`."""
    return STORE_VARIABLE in os.environ


def join_group(backend: str, *, timeout_seconds: float) -> None:
    """Make the default process group: of a `LocalJob`'s processes by its file, else as torchrun tells."""
    where: dict[str, Any] = {}
    if is_in_local_job():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = {"store": FileStore(os.environ[STORE_VARIABLE], size), "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **where)


def leave_group() -> None:
    """Destroy the default process group, and before that what keeps it."""
    # A DDP model that is still there, in a cycle, keeps the backend's threads running until the interpreter
    # ends, and then they sometimes abort.
    gc.collect()
    dist.destroy_process_group()


def python_module(name: str) -> list[str]:
    """Return the command that runs a module, with the current folder on its path only if this process has it.

    `python -m` puts that folder first, so in a stranger's folder a `random.py` would run. (Python 3.10 can't
    be kept from it.)
    """
    has_current = any(Path(folder or ".").resolve() == Path.cwd() for folder in sys.path)
    leave_out = [] if has_current or sys.version_info < (3, 11) else ["-P"]
    return [sys.executable, *leave_out, "-m", name]
