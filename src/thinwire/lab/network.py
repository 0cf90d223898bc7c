"""The hosts: network namespaces joined by bridges, with slow links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from thinwire.errors import CommunicationError
from thinwire.lab.layout import Layout
from thinwire.lab.namespace import Namespace


class Network:
    """While open, the network stands.

    Each host is a namespace. The bridges are in another one: one for each node, and one that joins the nodes'
    slow links.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._hosts: list[Namespace] = []
        self._open = ExitStack()

    def __enter__(self) -> Network:
        """Set the network up."""
        with ExitStack() as opened:
            self._core = Namespace()
            # What stands is taken down if a later tool fails; only a whole network is kept open.
            opened.callback(self._core.close)
            self._run("ip", "link", "set", "lo", "up")
            self._bridge("core")
            for node in range(self.layout.nodes):
                self._add_node(node)
            for host in range(self.layout.hosts):
                self._add_host(host, opened)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take it down."""
        self._open.close()

    def command_in(self, host: int, *command: str) -> list[str]:
        """Return a command line that runs `command` in a host, and ends with this process, even if killed."""
        return ["setpriv", "--pdeathsig", "KILL", "--", *self._hosts[host].command(*command)]

    def kept_command_in(self, host: int, *command: str) -> list[str]:
        """Return the same, for a `Process` that may start others: a keeper ends them with it."""
        # -S: the keeper needs no package, and starts sooner where none is looked for.
        keeper = [sys.executable, "-S", str(Path(__file__).with_name("keeper.py"))]
        return self._hosts[host].command(*keeper, str(os.getpid()), *command)

    def sent_bytes(self, host: int) -> int:
        """Return what a host has sent, by the counter of its interface: with headers and acknowledgements."""
        (interface,) = json.loads(
            _run(*self.command_in(host, "ip", "-json", "-statistics", "link", "show", "dev", "eth0"))
        )
        return int(interface["stats64"]["tx"]["bytes"])

    def _add_node(self, node: int) -> None:
        """Make a bridge for the hosts of a node, with a slow link to the others."""
        if self.layout.hosts_per_node == 1:
            return
        self._bridge(f"node{node}")
        self._run("ip", "link", "add", f"up{node}", "type", "veth", "peer", "name", f"down{node}")
        self._run("ip", "link", "set", f"up{node}", "master", f"node{node}", "up")
        self._run("ip", "link", "set", f"down{node}", "master", "core", "up")
        if self.layout.rate is not None:
            # One queue for all hosts of the node: they share the link.
            self._run("tc", "qdisc", "add", "dev", f"up{node}", "root", *self.layout.shaping())

    def _add_host(self, host: int, opened: ExitStack) -> None:
        """Make a host and join it to its bridge."""
        # Within the core's user namespace, so that the core may put ends of links into it.
        namespace = Namespace(self._core)
        opened.callback(namespace.close)
        self._hosts.append(namespace)
        alone = self.layout.hosts_per_node == 1
        bridge = "core" if alone else f"node{host // self.layout.hosts_per_node}"
        peer = ["peer", "name", "eth0", "netns", str(namespace.holder_pid)]
        self._run("ip", "link", "add", f"host{host}", "type", "veth", *peer)
        self._run("ip", "link", "set", f"host{host}", "master", bridge, "up")
        # /24: hosts find each other without routes; MAX_HOSTS keeps to it.
        address = ["ip", "addr", "add", f"{self.layout.address(host)}/24", "dev", "eth0"]
        for command in (["ip", "link", "set", "lo", "up"], address, ["ip", "link", "set", "eth0", "up"]):
            _run(*self.command_in(host, *command))
        # Shaped where it is sent, in the host's own queue: its sockets feel the slow link, as they would
        # feel a real one's driver.
        if alone and self.layout.rate is not None:
            shaped = ["tc", "qdisc", "add", "dev", "eth0", "root", *self.layout.shaping()]
            _run(*self.command_in(host, *shaped))

    def _bridge(self, name: str) -> None:
        self._run("ip", "link", "add", name, "type", "bridge")
        self._run("ip", "link", "set", name, "up")

    def _run(self, *command: str) -> None:
        """Run a tool where the bridges are."""
        _run(*self._core.command(*command))


def _run(*command: str) -> str:
    """Run a tool to its end; return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommunicationError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
