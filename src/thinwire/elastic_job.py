"""`thinwire run`: elastic members on this machine, restarted when they die."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

from torch._C._distributed_c10d import TCPStore

from thinwire.checks import number, whole_count
from thinwire.errors import ConfigError
from thinwire.launch import Job, Output, Process, ending, loopback_interface, ranks_of
from thinwire.local_sgd.groups.torchft_client import torchft_module
from thinwire.local_sgd.groups.torchft_group import HOSTNAME, LIGHTHOUSE, MEMBER, MIN_MEMBERS

LOOPBACK = "127.0.0.1"
HEARTBEAT_TIMEOUT_MS = 5_000  # torchft_lighthouse's value; a member that is silent this long is dropped
JOIN_TIMEOUT_MS = 60_000  # torchft_lighthouse's value; a short one would drop a member that is 0.1 s late


class MemberProcesses:
    """The processes of one member, as if torchrun had started them: if one fails, the others are killed."""

    def __init__(self, start: Callable[[Mapping[str, str]], Process], size: int) -> None:
        # A free port that no other process can take: the store takes over the listener and closes it.
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
        self._failed_code = 0  # the first failed process's
        self._processes = [start({**variables, **ranks_of(rank, size)}) for rank in range(size)]

    @property
    def exit_code(self) -> int | None:
        """The code of the first process that failed, or 0, once all have ended; None while some run."""
        codes = [process.exit_code for process in self._processes]
        if not self._failed_code and any(codes):
            self._failed_code = next(filter(None, codes))
            self.send(signal.SIGKILL)  # without the failed process the others can't even leave cleanly
        return None if None in codes else self._failed_code

    def read_to_the_end(self) -> None:
        """Wait for the last lines of all processes."""
        for process in self._processes:
            process.read_to_the_end()

    def send(self, number: int) -> None:
        """Send a signal to all processes."""
        for process in self._processes:
            process.send(number)


class ElasticJob(Job):
    """Elastic members on this machine, and a lighthouse unless one was given.

    A member that dies (by a signal, or an exit code other than 0) is restarted. Its environment has the
    variables that `elastic.TorchftGroup` reads, and its number, from 0, which stays the same. If a member has
    several processes, they also get torchrun's variables, as if this member were the whole job.

    The exit code is 0 if no member died for good, or if enough ended well: as many as an averaging needs, or
    one if a lighthouse was given, which may have other members. Otherwise it is that of the first to die so.
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
            output=Output(out),
            end_within_seconds=number("grace_seconds", end_within_seconds, minimum=0),
            say=say,
        )
        self._command = list(command)
        self._min_members = whole_count("min", min_members, minimum=1)
        self._processes = whole_count("processes_per_member", processes_per_member, minimum=1)
        self._max_restarts = whole_count("max_restarts", max_restarts, minimum=0)
        if lighthouse is None and members < min_members:
            raise ConfigError(
                f"max={members} is below min={min_members}, so members would wait forever; raise max, or "
                "pass the lighthouse of other members"
            )
        if lighthouse is not None and port:
            raise ConfigError(
                "port is for a lighthouse that this job starts, but lighthouse is given; leave port out"
            )
        self._torchft = torchft_module("torchft.coordination")
        self._port, self._has_others = port, lighthouse is not None
        self._address = lighthouse or ""
        self._host = host or (LOOPBACK if lighthouse is None else None)
        self._restarts = [0] * self._size
        self._ended: dict[int, int] = {}  # exit codes of members that have ended for good, in order

    def _continues(self) -> bool:
        """Restart members that have died; return whether the job continues."""
        for member, process in enumerate(self.processes):
            code = process.exit_code
            if code == 0:
                self._ended[member] = 0
            elif code and member not in self._ended:
                self._restart_or_end(member, code)
        codes = list(self._ended.values())
        are_well = codes.count(0) >= (1 if self._has_others else self._min_members)
        self.exit_code = 0 if are_well else next(filter(None, codes), 0)
        if self.output.error is not None or len(self._ended) == self._size:
            return False
        if self._are_enough() or 0 not in codes:
            return self._are_enough()
        # One has ended well: training is over, and the others are about to end too. The deadline is for a
        # member that joined too late and would wait for members that never come.
        self._deadline = min(self._deadline, time.monotonic() + self._end_within_seconds)
        return time.monotonic() < self._deadline

    def _restart_or_end(self, member: int, code: int) -> None:
        """Restart a member that has died, unless that is of no use."""
        self.processes[member].read_to_the_end()
        # If all others have ended, one of them well, training is over: this member would start from scratch.
        is_over = len(self._ended) == self._size - 1 and 0 in self._ended.values()
        if self._restarts[member] < self._max_restarts and self._are_enough() and not is_over:
            self._restarts[member] += 1
            self.processes[member] = self._started(member)
            again = f"started again ({self._restarts[member]} of {self._max_restarts} restarts)"
        else:
            self._ended[member] = code
            again = "not started again"
        self._say(f"member {member} {ending(code)}; {again}")

    def _are_enough(self) -> bool:
        return self._has_others or self._size - len(self._ended) >= self._min_members

    def _started(self, member: int) -> Process | MemberProcesses:
        variables = {
            "PYTHONUNBUFFERED": "1",  # show lines as soon as they are printed
            LIGHTHOUSE: self._address,
            MIN_MEMBERS: str(self._min_members),
            MEMBER: str(member),
        }
        if self._host is not None:
            variables[HOSTNAME] = self._host
        if self._host == LOOPBACK:
            variables["GLOO_SOCKET_IFNAME"] = loopback_interface()
        if self._processes == 1:
            return Process(self._command, variables, self.output, f"[{member}] ")

        def start(ranks: Mapping[str, str]) -> Process:
            return Process(self._command, {**variables, **ranks}, self.output, f"[{member}.{ranks['RANK']}] ")

        return MemberProcesses(start, self._processes)

    def _prepare(self, opened: ExitStack) -> None:
        """Start a lighthouse, unless one was given. It ends last: members that leave still query it."""
        if self._has_others:
            return
        try:
            # It needs one member only: members check for themselves whether there are enough, and one that is
            # asked to leave must learn that it is alone. It runs in this process, to end with it in any case.
            server = self._torchft.LighthouseServer(
                bind=f"{self._host}:{self._port}",
                min_replicas=1,
                join_timeout_ms=JOIN_TIMEOUT_MS,
                heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"a lighthouse can't listen at {self._host}:{self._port}: {error}; change host or port"
            ) from error
        opened.callback(server.shutdown)
        # Take only the port from its address: the host is this machine's name, which others may not know.
        self._address = f"http://{self._host}:{server.address().rpartition(':')[2]}"
        needed = f"averagings need {self._min_members} members, {self._size} start here"
        self._say(f"lighthouse {self._address}; {needed}")
