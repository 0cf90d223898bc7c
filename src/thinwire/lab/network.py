"""The hosts: network namespaces joined by bridges, with slow links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from thinwire.errors import CommunicationError
from thinwire.lab.layout import Layout

__all__ = ["Network"]

READY_WITHIN_SECONDS = 10.0


class Network:
    """While open, the network stands; to be used in a network namespace of its own.

    Each host is a namespace that a sleeping process holds open. The bridges are in the namespace of this
    process: one for each node, and one that joins the nodes' slow links.

    Args:
        layout: What it looks like.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._holders: list[subprocess.Popen[bytes]] = []
        self._open = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as opened:
            _run("ip", "link", "set", "lo", "up")
            _bridge("core")
            for node in range(self.layout.nodes):
                self._add_node(node)
            for host in range(self.layout.hosts):
                self._add_host(host, opened)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def command_in(self, host: int, *command: str) -> list[str]:
        """A command line that runs `command` in a host, and ends with this process even if that is killed."""
        namespace = f"--net=/proc/{self._holders[host].pid}/ns/net"
        return ["setpriv", "--pdeathsig", "KILL", "--", "nsenter", namespace, "--", *command]

    def kept_command_in(self, host: int, *command: str) -> list[str]:
        """The same for a command that may start others: a keeper ends them with it, or with this process."""
        keeper = [sys.executable, "-S", str(Path(__file__).with_name("keeper.py"))]
        return self.command_in(host, *keeper, str(os.getpid()), *command)

    def sent_bytes(self, host: int) -> int:
        """What a host has sent so far, by the counter of its interface: with headers and acknowledgements."""
        (interface,) = json.loads(
            _run(*self.command_in(host, "ip", "-json", "-statistics", "link", "show", "dev", "eth0"))
        )
        return int(interface["stats64"]["tx"]["bytes"])

    def _add_node(self, node: int) -> None:
        """A bridge for the hosts of a node, with a slow link to the others."""
        if self.layout.hosts_per_node == 1:
            return
        _bridge(f"node{node}")
        _run("ip", "link", "add", f"up{node}", "type", "veth", "peer", "name", f"down{node}")
        _run("ip", "link", "set", f"up{node}", "master", f"node{node}", "up")
        _run("ip", "link", "set", f"down{node}", "master", "core", "up")
        if self.layout.rate is not None:
            _run("tc", "qdisc", "add", "dev", f"up{node}", "root", *self.layout.shaping())

    def _add_host(self, host: int, opened: ExitStack) -> None:
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--net", "sleep", "infinity"]
        )
        opened.callback(_end, holder)
        self._holders.append(holder)
        _wait_for_namespace(holder)
        alone = self.layout.hosts_per_node == 1
        bridge = "core" if alone else f"node{host // self.layout.hosts_per_node}"
        peer = ["peer", "name", "eth0", "netns", str(holder.pid)]
        _run("ip", "link", "add", f"host{host}", "type", "veth", *peer)
        _run("ip", "link", "set", f"host{host}", "master", bridge, "up")
        address = ["ip", "addr", "add", f"{self.layout.address(host)}/24", "dev", "eth0"]
        for command in (["ip", "link", "set", "lo", "up"], address, ["ip", "link", "set", "eth0", "up"]):
            _run(*self.command_in(host, *command))
        if alone and self.layout.rate is not None:
            shaped = ["tc", "qdisc", "add", "dev", "eth0", "root", *self.layout.shaping()]
            _run(*self.command_in(host, *shaped))


def _bridge(name: str) -> None:
    _run("ip", "link", "add", name, "type", "bridge")
    _run("ip", "link", "set", name, "up")


def _wait_for_namespace(holder: subprocess.Popen[bytes]) -> None:
    """Until the holder has left this process's namespace."""
    own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + READY_WITHIN_SECONDS
    while holder.poll() is None and time.monotonic() < deadline:
        if os.readlink(Path(f"/proc/{holder.pid}/ns/net")) != own:
            return
        time.sleep(0.005)
    raise CommunicationError("a host's network namespace could not be made; see what unshare has printed")


def _run(*command: str) -> str:
    """Run a tool to its end; what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommunicationError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
