"""Elastic members on this machine: started, started again when they die, ended in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import IO, Any

from thinwire.checks import number, whole_count
from thinwire.errors import ConfigError
from thinwire.launch import Job, Output, Process, loopback_interface
from thinwire.localsgd.members.torchft_group import HOSTNAME, LIGHTHOUSE, MEMBER, MIN_MEMBERS, torchft_module

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_MS = 60_000


class ElasticJob(Job):
    """While open, members run on this machine; they and their lighthouse have ended afterwards.

    A member that dies (by a signal, or an exit code other than 0) is started again. It finds in its
    environment what `elastic.TorchftGroup` reads, and in `THINWIRE_MEMBER` its number, from 0, which it keeps
    when it is started again.

    The exit code is 0 if no member died for good, or enough have ended well: as many as an averaging needs,
    or one at a lighthouse that was given, where others may be. Else it is that of the first that died so.

    Attributes:
        address: Of the lighthouse.
    """

    def __init__(
        self,
        command: Sequence[str],
        members: int,
        *,
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
        self._max_restarts = whole_count("max_restarts", max_restarts, minimum=0)
        if lighthouse is None and members < min_members:
            raise ConfigError(
                f"max={members} members are fewer than min={min_members}: they would wait for others for "
                "ever; raise max, or give the lighthouse that others meet at, too"
            )
        if lighthouse is not None and port:
            raise ConfigError(
                "port is that of a lighthouse that is started here; leave it out with lighthouse"
            )
        self._torchft = torchft_module("torchft.coordination")
        self._port, self._given = port, lighthouse
        self.address = lighthouse or ""
        self._host = host or (LOOPBACK if lighthouse is None else None)
        self._restarts = [0] * members
        self._ended: dict[int, int] = {}  # exit codes of members that have ended for good, in that order

    def look(self) -> bool:
        """Start again those that have died; return whether the job goes on.

        It does not when all have ended, so many have died for good that the others would only wait, or what
        they print can't be written; nor when some have ended well, and `end_within_seconds` later others, too
        few for an averaging, have not.
        """
        found = [(each, process.exit_code) for each, process in enumerate(self.processes)]
        self._ended.update((each, 0) for each, code in found if code == 0)
        for each, code in found:
            if code and each not in self._ended:
                self._take_back(each, code)
        if self.output_error is not None or len(self._ended) == self._size:
            return False
        if self._are_enough():
            return True
        # If one has ended well, training is over, and the others are about to end, too; but for one that
        # came too late, and would wait for members that never come.
        if self._over_since is None and 0 in self._ended.values():
            self._over_since = time.monotonic()
        return self._over_since is not None and self._is_within(self._end_within_seconds)

    def kill(self, member: int) -> None:
        """Kill a member, if it still runs."""
        self.processes[member].send(signal.SIGKILL)

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

    def _code_of_failure(self) -> int:
        codes = list(self._ended.values())
        are_enough = codes.count(0) >= (self._min_members if self._given is None else 1)
        return 0 if are_enough else next(filter(None, codes), 0)

    def _are_enough(self) -> bool:
        # At a lighthouse that was given there may be others.
        return self._given is not None or self._size - len(self._ended) >= self._min_members

    def _started(self, member: int) -> Process:
        variables = {
            "PYTHONUNBUFFERED": "1",  # lines come when they are printed
            LIGHTHOUSE: self.address,
            MIN_MEMBERS: str(self._min_members),
            MEMBER: str(member),
        }
        if self._host is not None:
            variables[HOSTNAME] = self._host
        if self._host == LOOPBACK:
            variables["GLOO_SOCKET_IFNAME"] = loopback_interface()
        return Process(self._command, variables, self._out, f"[{member}] ")

    def _prepare(self, opened: ExitStack) -> None:
        """Start a lighthouse, unless one was given; it ends last: members that leave still ask it."""
        if self._given is not None:
            return
        try:
            # One member is enough to it: how many an averaging needs, they see to themselves, and one that is
            # asked to leave learns that it is alone. In this process: it ends with it, whatever ends that.
            server: Any = self._torchft.LighthouseServer(
                bind=f"{self._host}:{self._port}",
                min_replicas=1,
                # As of torchft_lighthouse; else it would leave behind whoever comes 0.1 s after the others.
                join_timeout_ms=JOIN_TIMEOUT_MS,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"no lighthouse can listen at {self._host}:{self._port}: {error}; give another host or port"
            ) from error
        opened.callback(server.shutdown)
        # It names the port truly, and the host by this machine's name, which others may not know.
        self.address = f"http://{self._host}:{server.address().rpartition(':')[2]}"
