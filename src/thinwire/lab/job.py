"""One command on each host: their output with a prefix, their end, and the lab's exit code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from thinwire.lab.network import Network
from thinwire.launch import EndSignals, Output, Process

LOOK_EVERY_SECONDS = 0.05


def run_on_hosts(
    network: Network, command: Sequence[str], output: Output, *, grace_seconds: float
) -> tuple[int, list[float]]:
    """Run a command on every host until all have ended, and with it what it has started.

    Once one has failed, or a signal (which is passed on) asks the lab to end, the others are asked to end
    after `grace_seconds`, and killed after as many more. Where their output can't be written, they are asked
    to end at once.

    Returns:
        The exit code of the first that failed, as a shell tells it (128 + the signal that ended it); 0 if
        none did; that of `output` if it has an error. And how many seconds each ran.
    """
    # Before the first host starts: a signal in between must find somebody to pass it on.
    with EndSignals() as asked:
        hosts = [_Host(network, host, command, output) for host in range(network.layout.hosts)]
        exit_code = _wait(hosts, asked, output, grace_seconds)
    return exit_code, [host.seconds for host in hosts]


class _Host:
    """The process on a host, and how many seconds it ran."""

    def __init__(self, network: Network, host: int, command: Sequence[str], output: Output) -> None:
        self.exit_code: int | None = None
        self.seconds = 0.0
        self._start = time.monotonic()
        # Unbuffered, lines come when they are printed.
        variables = {"PYTHONUNBUFFERED": "1", **network.layout.environment(host)}
        prefix = f"[host {host:>{len(str(network.layout.hosts - 1))}}] "
        self._process = Process(network.kept_command_in(host, *command), variables, output, prefix)

    def has_just_ended(self) -> bool:
        """Return whether it ended since the last time this was asked."""
        code = self._process.exit_code
        if self.exit_code is not None or code is None:
            return False
        # Its last lines may still be on their way, and must stand before what the lab says at the end.
        self._process.read_to_the_end()
        self.exit_code, self.seconds = code, time.monotonic() - self._start
        return True

    def send(self, number: int) -> None:
        """Send a signal to the command's process group; SIGKILL to all that the command has started."""
        # By now its number may be another process's.
        if self._process.exit_code is not None:
            return
        if number == signal.SIGKILL:
            # Not SIGKILL, at which the keeper could do nothing: now it ends all that the command has started.
            os.kill(self._process.pid, signal.SIGUSR1)
        else:
            os.killpg(self._process.pid, number)


def _wait(hosts: Sequence[_Host], asked: EndSignals, output: Output, grace_seconds: float) -> int:
    """Wait until all hosts have ended; see `run_on_hosts`.

    Returns:
        The lab's exit code.
    """
    failure: int | None = None
    # When, and which signal. One list for all reasons: a later and more pressing one takes the place of what
    # was planned before.
    to_send: list[tuple[float, int]] = []
    passed_on = is_output_lost = False
    while any(host.exit_code is None for host in hosts):
        time.sleep(LOOK_EVERY_SECONDS)
        now = time.monotonic()
        last_words = [(now + grace_seconds, signal.SIGTERM), (now + 2 * grace_seconds, signal.SIGKILL)]
        for host in hosts:
            if host.has_just_ended() and host.exit_code and failure is None:
                # Not at once: the others find out by themselves, and their own words tell more than a
                # signal's.
                failure, to_send = host.exit_code, list(last_words)
        if asked.received is not None and not passed_on:
            failure, to_send, passed_on = 128 + asked.received, list(last_words), True
            for host in hosts:
                host.send(asked.received)
        if output.error is not None and not is_output_lost:
            # Nobody reads what they would still say: no grace.
            is_output_lost = True
            to_send = [(now, signal.SIGTERM), (now + grace_seconds, signal.SIGKILL)]
        while to_send and now >= to_send[0][0]:
            _, number = to_send.pop(0)
            for host in hosts:
                host.send(number)
    return output.exit_code if output.error is not None else failure or 0
