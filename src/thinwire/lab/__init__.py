"""A slow network of several machines on one computer: network namespaces, joined by links."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from thinwire.checks import whole_number
from thinwire.errors import CommunicationError, ConfigError
from thinwire.lab import link_check
from thinwire.lab.relay import Delays

# Addresses end in 1 to 254.
MAX_MACHINES = 200
BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Bytes that may be sent in a burst after a pause: as few as possible, or the rate would not limit short
# messages. But a packet may have 64 KiB, and a busy kernel may be a millisecond late.
MIN_BURST_BYTES = 68 * 2**10
BURST_SECONDS = 1e-3
QUEUE_SECONDS = 0.1  # packets that wait longer are dropped
INTERFACE = "eth0"
PORT = 29500
PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "setpriv")}
CHECK_SECONDS, TOLERANCE, MIN_TOLERANCE_SECONDS = 0.8, 0.1, 1e-3


def check_machine() -> None:
    """Raise if this computer can't run a lab."""
    if sys.platform != "linux":
        raise ConfigError(f"the lab needs Linux's network namespaces; this is {sys.platform}")
    missing = [name for name, tools in PACKAGES.items() if not all(map(shutil.which, tools))]
    if missing:
        raise ConfigError(f"the lab needs {' and '.join(missing)}; install it with the system's packages")


@dataclass(frozen=True)
class LinkSpec:
    """A machine's link to the others."""

    rate: str | None = None  # the machine's sending rate; None for no limit
    latency: str = "0ms"  # of a round trip between two machines
    jitter: str = "0ms"  # how much longer or shorter a round trip may be
    loss: str = "0%"  # share of packets, each way

    def __post_init__(self) -> None:
        if self.delays.jitter_seconds > self.delays.seconds:
            raise ConfigError(f"jitter must be at most the latency {self.latency}, got {self.jitter}")
        self.shaping()

    @property
    def bits_per_second(self) -> float | None:
        """The rate as a number."""
        known = "a rate must be like 100mbit, 1gbit or 500kbit, from 100kbit to 100gbit"
        return None if self.rate is None else number_with_unit(self.rate.lower(), BITS, 1e5, 1e11, known)

    @property
    def delays(self) -> Delays:
        """The delays and losses of a packet between two machines. A round trip is two ways."""
        known = "a duration must be like 20ms, 500us or 0.1s, up to 2s"
        latency, jitter = (number_with_unit(it, SECONDS, 0, 2, known) for it in (self.latency, self.jitter))
        known = "a loss must be a percentage such as 0.1%, up to 50%"
        return Delays(latency / 2, jitter / 2, number_with_unit(self.loss, {"%": 0.01}, 0, 0.5, known))

    def shaping(self) -> list[str]:
        """Return a machine's sending queue, for `tc qdisc add dev … root`; empty without a rate."""
        bits = self.bits_per_second
        if bits is None:
            return []
        burst_bytes = max(MIN_BURST_BYTES, int(bits / 8 * BURST_SECONDS))
        limit = ["burst", str(burst_bytes), "latency", f"{1e3 * QUEUE_SECONDS:g}ms"]
        return ["tbf", "rate", f"{int(bits)}bit", *limit]


def number_with_unit(text: str, units: Mapping[str, float], least: float, most: float, known: str) -> float:
    """Return the number that a text such as 100mbit stands for."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(\D*)", text)
    value = float(match[1]) * units.get(match[2], -1.0) if match is not None else -1.0
    if not least <= value <= most:
        raise ConfigError(f"{known}; got {text[:40]!r}")
    return value


class Network:
    """Machines with processes, all behind the same kind of link, except for the rates of `slow_machines`.

    The network exists inside this context. Each machine is a namespace, whose processes reach each other over
    its loopback. The links meet in the lab's own namespace, at a bridge, or at a relay if packets are delayed
    or lost.
    """

    def __init__(
        self,
        machines: int,
        link: LinkSpec | None = None,
        *,
        processes_per_machine: int = 1,
        slow_machines: Mapping[int, str] | None = None,
    ) -> None:
        self.machines = whole_number("machines", machines, minimum=1)
        if machines > MAX_MACHINES:
            raise ConfigError(f"machines must be at most {MAX_MACHINES}, got {machines}")
        self.processes_per_machine = whole_number("processes_per_machine", processes_per_machine, minimum=1)
        self.processes = machines * processes_per_machine
        self.links = [link or LinkSpec()] * machines
        for machine, rate in (slow_machines or {}).items():
            if not 0 <= machine < machines:
                raise ConfigError(f"there is no machine {machine}; machines are 0 to {machines - 1}")
            self.links[machine] = replace(self.links[machine], rate=rate)
        # Delays and losses are the same for all machines.
        self.delays = self.links[0].delays
        self.has_relay = self.delays != Delays()
        self._namespaces: list[Namespace] = []
        self._checked_bytes: list[int] = []  # by machine, sent before the command was started
        self._open = ExitStack()

    def __enter__(self) -> Network:
        # It may be opened again.
        self._namespaces, self._checked_bytes = [], [0] * self.machines
        with ExitStack() as opened:  # if a later tool fails, everything is removed
            self._core = Namespace()
            # A namespace disappears when no process is left inside.
            opened.callback(_end, self._core.holder)
            self._run_in_core("link", "set", "lo", "up")
            ends = [f"machine{machine}" for machine in range(self.machines)]
            for machine in range(self.machines):
                # Inside the core's user namespace, so that the core may put ends of links into it.
                self._namespaces.append(Namespace(self._core))
                opened.callback(_end, self._namespaces[machine].holder)
                self._add_link(machine)
            if self.has_relay:
                opened.callback(_end, _held(self._core.command(*self.delays.command(ends))))
            else:
                self._run_in_core("link", "add", "core", "type", "bridge")
                self._run_in_core("link", "set", "core", "up")
                for end in ends:
                    self._run_in_core("link", "set", end, "master", "core")
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def address(self, machine: int) -> str:
        """Return a machine's address in the network."""
        return f"10.77.0.{machine + 1}"

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return torchrun's variables for a process, and the interface to use."""
        machine, local_rank = divmod(rank, self.processes_per_machine)
        # Otherwise Gloo would look for the address of this computer's name, which no namespace has.
        variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), INTERFACE)
        variables |= {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(PORT)}
        variables |= {"RANK": str(rank), "WORLD_SIZE": str(self.processes)}
        variables |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.processes_per_machine)}
        return variables | {"GROUP_RANK": str(machine), "GROUP_WORLD_SIZE": str(self.machines)}

    def command_in(self, machine: int, *command: str) -> list[str]:
        """Return a command line that runs `command`, or words appended to it, on a machine."""
        return self._namespaces[machine].command(*command)

    def contained_command(self, machine: int, *command: str) -> list[str]:
        """Return a command line that runs `command` on a machine; all processes it starts end with it."""
        # In a PID namespace: when its first process ends, the kernel kills all others inside, even in other
        # sessions. The first process is a shell, since a first process gets only signals that it handles;
        # the shell does not print how the command ended.
        first = 'exec 3>&2 2>/dev/null; "$@" 2>&3 3>&-; exit $?'
        inside = ["unshare", "--pid", "--fork", "--kill-child", "--", "sh", "-c", first, "sh", *command]
        return self.command_in(machine, "setpriv", "--pdeathsig", "KILL", "--", *inside)

    def check_link(self) -> str:
        """Measure the link from machine 0 to 1, for some seconds; return the result as a sentence.

        Raises if the link differs from the requested one by more than a tenth.
        """
        script = [sys.executable, "-S", link_check.__file__]
        server = _held(self.command_in(1, *script, "serve"))
        try:
            measuring = [*script, "measure", self.address(1), str(CHECK_SECONDS)]
            round_trip, rate = json.loads(_run(*self.command_in(0, *measuring)))
        finally:
            _end(server)
        link, delays = self.links[0], self.links[0].delays
        # Let packets in flight arrive: they do not belong to the command.
        time.sleep(QUEUE_SECONDS + round_trip)
        self._checked_bytes = [
            before + self.sent_bytes(machine) for machine, before in enumerate(self._checked_bytes)
        ]
        result = f"a round trip takes {1e3 * round_trip:.1f} ms, and a machine sends {rate / 1e6:.1f} Mbit/s"
        allowed_seconds = max(TOLERANCE * 2 * delays.seconds, MIN_TOLERANCE_SECONDS)
        is_late = abs(round_trip - 2 * delays.seconds) > allowed_seconds + 2 * delays.jitter_seconds
        # Senders slow down if packets are lost, so the rate can't be measured.
        asked = None if delays.loss else link.bits_per_second
        if is_late or (asked is not None and abs(rate / asked - 1) > TOLERANCE):
            raise CommunicationError(
                f"{result}, but {link.latency} and {link.rate or 'any rate'} were requested: this computer "
                "is busy, or too slow for such a link; try again, or choose a lower rate or a longer latency"
            )
        return result

    def sent_bytes(self, machine: int) -> int:
        """Return the bytes sent by a machine's interface, with headers and acknowledgements."""
        show = ["ip", "-json", "-statistics", "link", "show", "dev", INTERFACE]
        (interface,) = json.loads(_run(*self.command_in(machine, *show)))
        return int(interface["stats64"]["tx"]["bytes"]) - self._checked_bytes[machine]

    def _add_link(self, machine: int) -> None:
        """Make a machine's link, whose other end is not connected yet."""
        peer = ["peer", "name", INTERFACE, "netns", str(self._namespaces[machine].holder.pid)]
        self._run_in_core("link", "add", f"machine{machine}", "type", "veth", *peer)
        self._run_in_core("link", "set", f"machine{machine}", "up")
        # /24, so that machines find each other without routes; MAX_MACHINES fits into it.
        address = ["ip", "addr", "add", f"{self.address(machine)}/24", "dev", INTERFACE]
        commands = [["ip", "link", "set", "lo", "up"], address, ["ip", "link", "set", INTERFACE, "up"]]
        # Shape in the sending machine's own queue: its sockets are slowed as by a real link's driver.
        if shaping := self.links[machine].shaping():
            commands.append(["tc", "qdisc", "add", "dev", INTERFACE, "root", *shaping])
        if self.delays.loss:
            # Send packets of a real link's size, so that each can be lost separately.
            commands.append(["ip", "link", "set", INTERFACE, "gso_max_segs", "1"])
        for command in commands:
            _run(*self.command_in(machine, *command))

    def _run_in_core(self, *arguments: str) -> None:
        _run(*self._core.command("ip", *arguments))


class Namespace:
    """A network namespace, kept open by a sleeping process, which the kernel ends with this one."""

    def __init__(self, outer: Namespace | None = None) -> None:
        flags = _allowed_flags() if outer is None else ["--net"]
        # When the holder prints, `unshare` has made the namespace; before, there is nothing to enter.
        make = ["unshare", *flags, "sh", "-c", "echo ready; exec sleep infinity"]
        self.holder = _held(make if outer is None else outer.command(*make))
        # A namespace belongs to the user namespace that made it: enter that to configure it.
        self._enter_user: list[str] = [] if outer is None else outer._enter_user
        if "--user" in flags:
            self._enter_user = [f"--user=/proc/{self.holder.pid}/ns/user", "--preserve-credentials"]

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs `command` inside."""
        return ["nsenter", *self._enter_user, f"--net=/proc/{self.holder.pid}/ns/net", "--", *command]


def _allowed_flags() -> list[str]:
    """Return the flags with which `unshare` may make a first network namespace on this computer."""
    # Namespaces are entered through /proc: with other processes there, root would change the computer's own.
    if os.readlink("/proc/self") != str(os.getpid()):
        raise ConfigError("the lab can't run inside a lab: /proc shows other processes; start it outside")
    # Try them: whether it is allowed depends on capabilities, sysctls and AppArmor.
    tries = [["--net"], ["--user", "--map-root-user", "--net"]]
    for flags in tries if os.geteuid() == 0 else tries[1:]:
        if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode == 0:
            return flags
    do = "run it as root (in a container with --privileged), or allow unprivileged user namespaces"
    raise ConfigError(f"the lab can't make a network namespace: {do}, as docs/lab.md says")


def _held(command: list[str]) -> subprocess.Popen[str]:
    """Start a part of the lab, which ends with this process; return after it has printed that it is ready."""
    part = subprocess.Popen(
        # Ended by the kernel, not an exit handler: even if this process is killed.
        ["setpriv", "--pdeathsig", "KILL", "--", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C on a terminal reaches a whole session; the lab forwards it, and still needs its parts.
        start_new_session=True,
    )
    assert part.stdout is not None
    with part.stdout as printed:
        is_ready = printed.readline() == "ready\n"
    if not is_ready:
        _end(part)
        raise CommunicationError(f"a part of the lab has ended; see its output: {' '.join(command)}")
    return part


def _end(part: subprocess.Popen[str]) -> None:
    part.kill()
    part.wait()  # otherwise a zombie would stay until the lab ends


def _run(*command: str) -> str:
    """Run a tool to its end; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommunicationError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
