"""Elastic members on this machine: started, started again when they die, ended in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

from thinwire.checks import number, whole_count
from thinwire.elastic.torchft_group import HOSTNAME, LIGHTHOUSE, MEMBER, MIN_MEMBERS, torchft_module
from thinwire.errors import ConfigError
from thinwire.launch import EndSignals, Output, Process, loopback_interface

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_MS = 60_000
LAST_WORDS_SECONDS = 5.0  # for a member's output to end: what it has started may have that open still


@dataclass
class _Member:
    """A member, whichever process it is just now; `exit_code` is None until it has ended for good."""

    number: int
    process: Process
    restarts: int = 0
    exit_code: int | None = None


class ElasticJob:
    """While open, members run on this machine; they and their lighthouse have ended afterwards.

    A member that dies (by a signal, or an exit code other than 0) is started again. It finds in its
    environment what `elastic.TorchftGroup` reads, and in `THINWIRE_MEMBER` its number, from 0, which it keeps
    when it is started again.

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
        self._command = list(command)
        self._num_members = whole_count("max", members, minimum=1)
        self._min_members = whole_count("min", min_members, minimum=1)
        self._max_restarts = whole_count("max_restarts", max_restarts, minimum=0)
        self._end_within_seconds = number("grace_seconds", end_within_seconds, minimum=0)
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
        self._say, self._output = say, Output(out)
        self._members: list[_Member] = []
        self._failures: list[int] = []  # exit codes of members that died for good, in that order
        self._over_since: float | None = None
        self._open = ExitStack()

    def __enter__(self) -> ElasticJob:
        with ExitStack() as opened:
            if self._given is None:
                self.address = self._lit(opened)
            # Closed from the last: members end first, while the lighthouse still answers those that leave
            # in order.
            opened.callback(self.end)
            for place in range(self._num_members):
                self._members.append(_Member(place, self._started(place)))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def exit_code(self) -> int:
        """0 if nobody died for good, or enough have ended well, else that of the first that died for good.

        Enough are as many as an averaging needs; at a lighthouse that was given, where others may be, one.

        As a shell tells it: 128 + the signal that ended it. Where what they print can't be written, that of
        `Output`.
        """
        if self._output.error is not None:
            return self._output.exit_code
        ended_well = sum(member.exit_code == 0 for member in self._members)
        if not self._failures or ended_well >= (self._min_members if self._given is None else 1):
            return 0
        return self._failures[0]

    def look(self) -> bool:
        """Start again those that have died; return whether the job goes on.

        It does not when all have ended, so many have died for good that the others would only wait, or what
        they print can't be written; nor when some have ended well, and `end_within_seconds` later others, too
        few for an averaging, have not.
        """
        for member in self._going_on():
            if member.process.exit_code == 0:
                member.exit_code = 0
        for member in self._going_on():
            code = member.process.exit_code
            if code:
                member.process.read_to_the_end(LAST_WORDS_SECONDS)
                ended = member.process.ending
                # Who has just died still counts as going on here: with it back, they are enough. But where
                # all others have ended, one of them well, training is over: it would begin from scratch.
                is_over = len(self._going_on()) == 1 and self._has_ended_well()
                if member.restarts < self._max_restarts and self._are_enough() and not is_over:
                    member.restarts += 1
                    member.process = self._started(member.number)
                    again = f"started again ({member.restarts} of {self._max_restarts} restarts)"
                else:
                    member.exit_code = code
                    self._failures.append(code)
                    again = "not started again"
                self._say(f"member {member.number} {ended}; {again}")
        if self._output.error is not None or not self._going_on():
            return False
        if self._are_enough():
            return True
        # Where one has ended well, training is over, and the others are about to end, too; but for one that
        # came too late, and would wait for members that never come.
        if self._over_since is None and self._has_ended_well():
            self._over_since = time.monotonic()
        return self._over_since is not None and (
            time.monotonic() < self._over_since + self._end_within_seconds
        )

    def kill(self, number: int) -> None:
        """Kill a member, if it still runs."""
        self._members[number].process.kill()  # which looks first whether it has ended

    def run(self, end_signals: EndSignals, each_look: Callable[[], None] = lambda: None) -> int | None:
        """Stay until the job ends, or a signal comes, which is returned; a second one kills all that run."""

        def look() -> bool:
            each_look()
            return self.look()

        received, num_received = end_signals.stand_by(look), end_signals.num_received
        if received is not None:
            self._say(f"{signal.Signals(received).name}: members leave; once more kills them")
        self.end(lambda: end_signals.num_received > num_received)
        return received

    def end(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Ask all members that still run to leave, and kill those that take too long, or if it is urgent."""
        Process.end([member.process for member in self._members], self._end_within_seconds, is_urgent)
        for member in self._members:
            member.process.read_to_the_end(LAST_WORDS_SECONDS)

    def _going_on(self) -> list[_Member]:
        return [member for member in self._members if member.exit_code is None]

    def _has_ended_well(self) -> bool:
        return any(member.exit_code == 0 for member in self._members)

    def _are_enough(self) -> bool:
        # At a lighthouse that was given there may be others.
        return self._given is not None or len(self._going_on()) >= self._min_members

    def _started(self, place: int) -> Process:
        variables = {
            "PYTHONUNBUFFERED": "1",  # lines come when they are printed
            LIGHTHOUSE: self.address,
            MIN_MEMBERS: str(self._min_members),
            MEMBER: str(place),
        }
        if self._host is not None:
            variables[HOSTNAME] = self._host
        if self._host == LOOPBACK:
            variables["GLOO_SOCKET_IFNAME"] = loopback_interface()
        return Process(self._command, variables, self._output, f"[{place}] ")

    def _lit(self, opened: ExitStack) -> str:
        """Start a lighthouse, and return its address."""
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
        return f"http://{self._host}:{server.address().rpartition(':')[2]}"
