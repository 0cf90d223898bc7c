"""A job of real elastic members and their lighthouse."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import learner
from processes import Process, print_stacks, process
from thinwire.lab import Network

PATIENCE_SECONDS = 60.0
TIMEOUT_SECONDS = 4.0
FIRST_PORT = 20_000  # at which the processes of the first member meet


class Member:
    """The processes of a member. If one is killed, or fails, the others are ended, as a launcher does."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = processes
        for each in processes:
            each.start()

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self.processes]

    @property
    def pid(self) -> int:
        """Of the first process."""
        return self.pids[0]

    def is_alive(self) -> bool:
        if any(each.exitcode for each in self.processes):
            self.kill()
        return any(each.is_alive() for each in self.processes)

    def kill(self) -> None:
        for each in self.processes:
            each.kill()

    def join(self, seconds: float | None = None) -> None:
        for each in self.processes:
            each.join(seconds)


class Job:
    """Members that meet at one lighthouse, and what they have told so far.

    With a lab's network, the lighthouse is on its first host, and member n on the host n + 1; of more
    members than hosts in turn. With settings for all `learners`, the lighthouse is a process of its own,
    which dies as one. A member has `processes_per_member`.
    """

    def __init__(
        self,
        folder: Path,
        network: Network | None = None,
        *,
        learners: dict[str, Any] | None = None,
        least_at_lighthouse: int = 1,
        processes_per_member: int = 1,
    ) -> None:
        self._processes_per_member = processes_per_member
        os.environ.setdefault("RUST_LOG", "error")  # the lighthouse logs every quorum
        self._network, self._learners, self._least = network, learners, least_at_lighthouse
        self._host = "127.0.0.1" if network is None else network.address(0)
        self._port = 0 if network is None else 29510
        if learners is not None and network is None:
            with socket.create_server((self._host, 0)) as free:
                self._port = free.getsockname()[1]
        self.light()
        self.address = f"http://{self._host}:{self._port}"
        self._path = folder / "told"
        self._path.touch()
        self._lines: list[dict[str, Any]] = []
        self._read_bytes = 0
        self.processes: list[Member] = []

    def light(self) -> None:
        """Start the lighthouse, or start it again where it was."""
        if self._learners is not None:
            bind = f"{self._host}:{self._port}"
            namespaces = [] if self._network is None else self._namespaces(0)
            self._remote = process(_lit, bind, self._least, namespaces=namespaces)
            self._remote.start()
            return
        self._lighthouse = _lighthouse(f"{self._host}:{self._port}", self._least)
        self._port = int(self._lighthouse.address().rpartition(":")[2])

    def darken(self) -> None:
        """End the lighthouse."""
        if self._learners is None:
            self._lighthouse.shutdown()
        else:
            self._remote.kill()
            self._remote.join()

    def _namespaces(self, host: int) -> list[str]:
        assert self._network is not None
        return [flag.partition("=")[2] for flag in self._network.command_in(host) if "/ns/" in flag]

    def _host_of(self, member: int) -> int:
        assert self._network is not None
        return 1 + member % (self._network.machines - 1)

    def set_link(self, member: int, state: str) -> None:
        """Cut a member's link ("down"), or mend it ("up")."""
        assert self._network is not None
        command = self._network.command_in(self._host_of(member), "ip", "link", "set", "eth0", state)
        subprocess.run(command, check=True)

    def cut(self, member: int, seconds: float) -> None:
        """Cut a member's link for so long."""
        self.set_link(member, "down")
        time.sleep(seconds)
        self.set_link(member, "up")

    def stop(self, member: int, seconds: float, place: int = 0) -> None:
        """Let a process of a member stand still for so long."""
        pid = self.processes[member].pids[place]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def darken_for(self, seconds: float) -> None:
        """End the lighthouse, and start it again."""
        self.darken()
        time.sleep(seconds)
        self.light()

    def start(self, member: int, **options: Any) -> Member:
        namespaces = []
        if self._network is not None:
            host = self._host_of(member)
            namespaces = self._namespaces(host)
            options = {"hostname": self._network.address(host), **options}
        # By default no two begin with the same model.
        usual = {"seed": member, "learning": {"has_buffers": "averages_gradients" not in options}}
        options = {**(usual if self._learners is None else self._learners), **options}
        places = [
            (rank, self._processes_per_member, 20_000 + member) for rank in range(self._processes_per_member)
        ]
        self.processes.append(
            Member(
                [
                    process(
                        _member, str(self._path), self.address, member, place, options, namespaces=namespaces
                    )
                    for place in places
                ]
            )
        )
        return self.processes[-1]

    def told(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return what was told so far, of that kind."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            complete = file.read().rpartition(b"\n")[0]
        if complete:
            self._read_bytes += len(complete) + 1
            self._lines += map(json.loads, complete.splitlines())
        return [line for line in self._lines if wanted.items() <= line.items()]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                print_stacks([process for member in self.processes for process in member.processes])
                raise AssertionError("\n".join(map(str, self.told()[-30:])))
            time.sleep(0.02)

    def wait_for_averagings(self, member: int, number: int = 2) -> None:
        """Wait until a member has told of so many more."""
        before = len(self.told(event="averaged", member=member))
        self.wait(lambda: len(self.told(event="averaged", member=member)) >= before + number)

    def check_equal(self, by: str = "step") -> int:
        """Check that the models after each averaging are one; return how many several members told of.

        Not that of a member which was killed just then: if it alone knew that all had received everything,
        the others have repeated the averaging without it.
        """
        dead = {pid for member in self.processes if not member.is_alive() for pid in member.pids}
        last = {line["pid"]: line["time"] for line in self.told() if line["pid"] in dead}
        alike: dict[int, list[dict[str, Any]]] = {}
        for line in self.told():
            if line["event"] in ("joined", "averaged") and line["time"] != last.get(line["pid"]):
                alike.setdefault(line[by], []).append(line)
        for lines in alike.values():
            assert len({line["checksum"] for line in lines}) == 1, "\n".join(map(str, lines))
        self.check_compressed()
        return sum(len(lines) > 1 for lines in alike.values())

    def check_compressed(self) -> None:
        """Check that all members have sent few bits. torchft's send fp32."""
        is_peer = self._learners is not None and self._learners.get("peer", False)
        ratios = [line["ratio"] for line in self.told(event="averaged") if not is_peer]
        assert is_peer or min(ratios) > 4

    def close(self) -> None:
        for member in self.processes:
            member.kill()
            member.join()
        self.darken()


def _lighthouse(bind: str, least: int, grace_ms: int = 2_000) -> Any:
    return import_module("torchft.coordination").LighthouseServer(
        bind=bind, min_replicas=least, join_timeout_ms=grace_ms, heartbeat_timeout_ms=3000
    )


def _lit(bind: str, least: int) -> None:
    # Longer than a message's timeout, by which a survivor may learn that another one has died: who comes
    # after the grace starts from the others, and has lost its steps.
    server = _lighthouse(bind, least, grace_ms=6_000)
    threading.Event().wait()
    server.shutdown()


def _member(
    path: str, lighthouse: str, member: int, place: tuple[int, int, int], options: dict[str, Any]
) -> None:
    rank, size, port = place
    if size > 1:
        inside = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in inside.items()})
    if "hostname" in options:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    learner.learn(path, lighthouse, member, **{"timeout_seconds": TIMEOUT_SECONDS, **options})
