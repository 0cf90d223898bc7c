"""A slow network of several machines on one computer: network namespaces, joined by links."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from thinwire.checks import whole_number
from thinwire.errors import CommunicationError, ConfigError

# Addresses end in 1 to 254.
MAX_MACHINES = 200
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
MIN_BITS_PER_SECOND, MAX_BITS_PER_SECOND = 10**5, 10**11
# What may pass at once after a pause: as little as can be, or short messages would not meet the rate at all.
# But a packet that is handed to the link may have 64 KiB, and a busy kernel may be a millisecond late.
MIN_BURST_BYTES = 68 * 2**10
BURST_SECONDS = 1e-3
INTERFACE = "eth0"
PORT = 29500
PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "setpriv")}


def check_machine() -> None:
    """Refuse a computer that can't have a lab."""
    if sys.platform != "linux":
        raise ConfigError(f"the lab needs Linux's network namespaces; this is {sys.platform}")
    missing = [name for name, tools in PACKAGES.items() if not all(map(shutil.which, tools))]
    if missing:
        raise ConfigError(f"the lab needs {' and '.join(missing)}; install it with the system's packages")


@dataclass(frozen=True)
class Link:
    """A machine's link to the others; without a rate, such as "100mbit", it is as fast as this computer."""

    rate: str | None = None

    def __post_init__(self) -> None:
        self.shaping()

    def shaping(self) -> list[str]:
        """Return the queue of what a machine sends, for `tc qdisc add dev … root`; empty if nothing slows it.

        Examples:
            >>> Link("1.5gbit").shaping()[:3]
            ['tbf', 'rate', '1500000000bit']
        """
        if self.rate is None:
            return []
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", self.rate.lower())
        bits_per_second = float(match[1]) * UNITS[match[2]] if match is not None else 0.0
        if not MIN_BITS_PER_SECOND <= bits_per_second <= MAX_BITS_PER_SECOND:
            raise ConfigError(
                f"a rate is like 100mbit, 1gbit or 500kbit, from 100kbit to 100gbit; got {self.rate[:40]!r}"
            )
        burst_bytes = max(MIN_BURST_BYTES, int(bits_per_second / 8 * BURST_SECONDS))
        return ["tbf", "rate", f"{int(bits_per_second)}bit", "burst", str(burst_bytes), "latency", "100ms"]


class Network:
    """Machines with processes, all behind links of one kind. While open, the network stands.

    Each machine is a namespace; the processes on it reach each other by its loopback. The bridge that joins
    the links is in a namespace of the lab's.
    """

    def __init__(self, machines: int, link: Link | None = None, *, processes_per_machine: int = 1) -> None:
        self.machines = whole_number("machines", machines, minimum=1)
        self.link = link or Link()
        self.processes_per_machine = whole_number("processes_per_machine", processes_per_machine, minimum=1)
        if machines > MAX_MACHINES:
            raise ConfigError(f"machines must be at most {MAX_MACHINES}, got {machines}")
        self.processes = machines * processes_per_machine
        self._namespaces: list[Namespace] = []
        self._open = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as opened:
            self._core = Namespace()
            # What stands is taken down if a later tool fails; only a whole network is kept open.
            opened.callback(self._core.close)
            self._run_in_core("link", "set", "lo", "up")
            self._run_in_core("link", "add", "core", "type", "bridge")
            self._run_in_core("link", "set", "core", "up")
            for machine in range(self.machines):
                # Within the core's user namespace, so that the core may put ends of links into it.
                self._namespaces.append(Namespace(self._core))
                opened.callback(self._namespaces[machine].close)
                self._add_link(machine)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def address(self, machine: int) -> str:
        """Return a machine's address in the network."""
        return f"10.77.0.{machine + 1}"

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return what torchrun would set for a process, and which interface to use.

        Examples:
            >>> Network(machines=2, processes_per_machine=2).environment(3)["LOCAL_RANK"]
            '1'
        """
        machine, place = divmod(rank, self.processes_per_machine)
        # Otherwise Gloo would look for the address of this computer's name, which no namespace has.
        backends = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), INTERFACE)
        return backends | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self.processes_per_machine),
            "GROUP_RANK": str(machine),
            "GROUP_WORLD_SIZE": str(self.machines),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
        }

    def command_in(self, machine: int, *command: str) -> list[str]:
        """Return a command line that runs `command`, or what is written behind it, on a machine."""
        return self._namespaces[machine].command(*command)

    def sent_bytes(self, machine: int) -> int:
        """Return what a machine has sent, by its interface: with headers and acknowledgements."""
        show = ["ip", "-json", "-statistics", "link", "show", "dev", INTERFACE]
        (interface,) = json.loads(_run(*self.command_in(machine, *show)))
        return int(interface["stats64"]["tx"]["bytes"])

    def _add_link(self, machine: int) -> None:
        """Join a machine to the bridge."""
        peer = ["peer", "name", INTERFACE, "netns", str(self._namespaces[machine].holder_pid)]
        self._run_in_core("link", "add", f"machine{machine}", "type", "veth", *peer)
        self._run_in_core("link", "set", f"machine{machine}", "master", "core", "up")
        commands = [
            ["ip", "link", "set", "lo", "up"],
            # /24: machines find each other without routes; MAX_MACHINES keeps to it.
            ["ip", "addr", "add", f"{self.address(machine)}/24", "dev", INTERFACE],
            ["ip", "link", "set", INTERFACE, "up"],
        ]
        # Shaped where it is sent, in the machine's own queue: its sockets feel the slow link, as they would
        # feel a real one's driver.
        if shaping := self.link.shaping():
            commands.append(["tc", "qdisc", "add", "dev", INTERFACE, "root", *shaping])
        for command in commands:
            _run(*self.command_in(machine, *command))

    def _run_in_core(self, *arguments: str) -> None:
        _run(*self._core.command("ip", *arguments))


class Namespace:
    """A network namespace, held open by a process that sleeps; the kernel ends that with this process.

    Attributes:
        holder_pid: The process that holds it open.
    """

    def __init__(self, outer: Namespace | None = None) -> None:
        flags = _allowed_flags() if outer is None else ["--net"]
        make = ["unshare", *flags, "sh", "-c", "echo it stands; exec sleep infinity"]
        self._holder = subprocess.Popen(
            # By the kernel, not by an exit handler: the namespace is gone even if this process is killed.
            ["setpriv", "--pdeathsig", "KILL", "--", *(make if outer is None else outer.command(*make))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # Ctrl-C on a terminal reaches the whole session; the lab passes it on, and still needs the
            # namespaces.
            start_new_session=True,
        )
        self.holder_pid = self._holder.pid
        # A namespace belongs to the user namespace that made it: without entering that, nobody may configure
        # it.
        self._enter_user: list[str] = [] if outer is None else outer._enter_user
        if "--user" in flags:
            self._enter_user = [f"--user=/proc/{self.holder_pid}/ns/user", "--preserve-credentials"]
        assert self._holder.stdout is not None
        # `unshare` has made it before the holder prints; earlier, there would be nothing to enter.
        with self._holder.stdout as printed:
            is_there = printed.readline() != b""
        if not is_there:
            self.close()
            raise CommunicationError("a network namespace could not be made; see what unshare has printed")

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs `command` in there."""
        return ["nsenter", *self._enter_user, f"--net=/proc/{self.holder_pid}/ns/net", "--", *command]

    def close(self) -> None:
        """Let go of it: it is gone when no process is left in there."""
        self._holder.kill()
        # Waited for, or a zombie would stay until the lab ends.
        self._holder.wait()


def _allowed_flags() -> list[str]:
    """Return the flags with which this computer lets `unshare` make a first network namespace."""
    # Tried, not deduced: whether it is allowed hangs on capabilities, sysctls and AppArmor alike.
    tries = [["--net"], ["--user", "--map-root-user", "--net"]]
    for flags in tries if os.geteuid() == 0 else tries[1:]:
        if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode == 0:
            return flags
    raise ConfigError(
        "the lab can't make a network namespace: run it as root (in a container, with --privileged, or with "
        "--cap-add SYS_ADMIN --cap-add NET_ADMIN), or allow unprivileged user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1; on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0)"
    )


def _run(*command: str) -> str:
    """Run a tool to its end; return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommunicationError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
