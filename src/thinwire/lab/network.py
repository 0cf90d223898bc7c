"""The machines: network namespaces joined by a bridge, with slow links, and what they need of the computer.

No namespace has a name outside: each is held open by a sleeping process, which ends with the lab. The first
is made as root or (in a user namespace) without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from thinwire.errors import CommunicationError, ConfigError
from thinwire.lab import link_check, relay
from thinwire.lab.layout import QUEUE_SECONDS, Layout, bits_per_second, seconds

PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "setpriv")}
CHECK_SECONDS, TOLERANCE, MIN_TOLERANCE_SECONDS = 0.8, 0.1, 1e-3
HOLD_OPEN = ["sh", "-c", "echo it stands; exec sleep infinity"]


def check_machine() -> None:
    """Refuse a computer that can't have a lab."""
    if sys.platform != "linux":
        raise ConfigError(f"the lab needs Linux's network namespaces; this is {sys.platform}")
    missing = [name for name, tools in PACKAGES.items() if not all(map(shutil.which, tools))]
    if missing:
        raise ConfigError(f"the lab needs {' and '.join(missing)}; install it with the system's packages")


class Network:
    """While open, the network stands.

    Each machine is a namespace; the processes on it reach each other by its loopback. What joins their slow
    links is in a namespace of the lab's: a bridge, or a relay if packets are to be late or lost.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._machines: list[Namespace] = []
        self._open = ExitStack()
        self._checked_bytes = [0] * layout.machines  # sent before the command was started

    def __enter__(self) -> Network:
        with ExitStack() as opened:
            self._core = Namespace()
            # What stands is taken down if a later tool fails; only a whole network is kept open.
            opened.callback(self._core.close)
            self._run("ip", "link", "set", "lo", "up")
            for machine in range(self.layout.machines):
                self._add_machine(machine, opened)
            if self.has_relay:
                self._start_relay(opened)
            else:
                self._add_bridge()
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def command_in(self, machine: int, *command: str) -> list[str]:
        """Return a command line that runs `command` on a machine, and ends with this process, even killed."""
        return ["setpriv", "--pdeathsig", "KILL", "--", *self._machines[machine].command(*command)]

    def entering(self, machine: int) -> list[str]:
        """Return what stands before a command line, to run it on a machine."""
        return self._machines[machine].command()

    @property
    def has_relay(self) -> bool:
        """Whether packets are late or lost."""
        return self.layout.delays != relay.Delays()

    def _add_bridge(self) -> None:
        self._run("ip", "link", "add", "core", "type", "bridge")
        self._run("ip", "link", "set", "core", "up")
        for machine in range(self.layout.machines):
            self._run("ip", "link", "set", f"machine{machine}", "master", "core")

    def _start_relay(self, opened: ExitStack) -> None:
        delays = self.layout.delays
        if delays.loss:
            # Packets of the length that real links lose, each by itself.
            for machine in range(self.layout.machines):
                _run(*self.command_in(machine, "ip", "link", "set", "eth0", "gso_max_segs", "1"))
        interfaces = [f"machine{machine}" for machine in range(self.layout.machines)]
        opened.enter_context(_standing(self._core.command(*delays.command(interfaces)), relay.READY))

    def check_link(self) -> str:
        """Measure the link from machine 0 to 1, for some seconds; return what was found, as a sentence.

        Raises:
            CommunicationError: It misses what was asked for by more than a tenth.
        """
        script = [sys.executable, "-S", link_check.__file__]
        with _standing(self.command_in(1, *script, "serve"), link_check.READY):
            measuring = [*script, "measure", self.layout.address(1), str(CHECK_SECONDS)]
            found = json.loads(_run(*self.command_in(0, *measuring)))
        # What was on its way arrives; it is not the command's.
        time.sleep(QUEUE_SECONDS + found["round_trip_seconds"])
        self._checked_bytes = list(map(self._counted_bytes, range(self.layout.machines)))
        return self._judged(found["round_trip_seconds"], found["bits_per_second"])

    def _judged(self, round_trip_seconds: float, bits: float) -> str:
        layout, rate = self.layout, self.layout.rate_of(0)
        asked_seconds, jitter_seconds = seconds(layout.latency), seconds(layout.jitter)
        found = f"a round trip takes {1e3 * round_trip_seconds:.1f} ms"
        measured = f"{found}, and a machine sends {bits / 1e6:.1f} Mbit/s"
        allowed_seconds = max(TOLERANCE * asked_seconds, MIN_TOLERANCE_SECONDS) + jitter_seconds
        is_late = abs(round_trip_seconds - asked_seconds) > allowed_seconds
        # Senders slow down if something is lost, so the rate can't be seen.
        is_seen = rate is not None and not layout.delays.loss
        if is_late or (is_seen and abs(bits / bits_per_second(rate or "") - 1) > TOLERANCE):
            raise CommunicationError(
                f"{measured}, but {layout.latency} and {rate or 'any rate'} were asked for: this computer is "
                "busy, or can't hold such a link; try again, or ask for a lower rate or a longer latency"
            )
        return measured

    def sent_bytes(self, machine: int) -> int:
        """Return what a machine has sent, by its interface: with headers and acknowledgements."""
        return self._counted_bytes(machine) - self._checked_bytes[machine]

    def _counted_bytes(self, machine: int) -> int:
        (interface,) = json.loads(
            _run(*self.command_in(machine, "ip", "-json", "-statistics", "link", "show", "dev", "eth0"))
        )
        return int(interface["stats64"]["tx"]["bytes"])

    def _add_machine(self, machine: int, opened: ExitStack) -> None:
        """Make a machine, and its link, of which the other end is not joined to anything yet."""
        # Within the core's user namespace, so that the core may put ends of links into it.
        namespace = Namespace(self._core)
        opened.callback(namespace.close)
        self._machines.append(namespace)
        peer = ["peer", "name", "eth0", "netns", str(namespace.holder_pid)]
        self._run("ip", "link", "add", f"machine{machine}", "type", "veth", *peer)
        self._run("ip", "link", "set", f"machine{machine}", "up")
        # /24: machines find each other without routes; MAX_MACHINES keeps to it.
        address = ["ip", "addr", "add", f"{self.layout.address(machine)}/24", "dev", "eth0"]
        for command in (["ip", "link", "set", "lo", "up"], address, ["ip", "link", "set", "eth0", "up"]):
            _run(*self.command_in(machine, *command))
        # Shaped where it is sent, in the machine's own queue: its sockets feel the slow link, as they would
        # feel a real one's driver.
        shaping = self.layout.shaping(machine)
        if shaping:
            _run(*self.command_in(machine, "tc", "qdisc", "add", "dev", "eth0", "root", *shaping))

    def _run(self, *command: str) -> None:
        """Run a tool where the bridge is."""
        _run(*self._core.command(*command))


class Namespace:
    """A network namespace; it is gone with this process, even if that is killed outright.

    Attributes:
        holder_pid: The process that holds it open.
    """

    def __init__(self, outer: Namespace | None = None) -> None:
        flags = _allowed_flags() if outer is None else ["--net"]
        make = ["unshare", *flags, *HOLD_OPEN]
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
        self._user_holder_pid: int | None = outer._user_holder_pid if outer is not None else None
        if "--user" in flags:
            self._user_holder_pid = self.holder_pid
        assert self._holder.stdout is not None
        # `unshare` has made it before the holder prints; earlier, there would be nothing to enter.
        with self._holder.stdout as printed:
            is_there = printed.readline() != b""
        if not is_there:
            self.close()
            raise CommunicationError("a network namespace could not be made; see what unshare has printed")

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs `command` in there."""
        user = [f"--user=/proc/{self._user_holder_pid}/ns/user", "--preserve-credentials"]
        flags = [] if self._user_holder_pid is None else user
        return ["nsenter", *flags, f"--net=/proc/{self.holder_pid}/ns/net", "--", *command]

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


@contextmanager
def _standing(command: list[str], ready: str) -> Iterator[None]:
    """Run a tool of the lab's beside; it has printed `ready` before this goes on."""
    held = ["setpriv", "--pdeathsig", "KILL", "--", *command]
    with subprocess.Popen(
        held, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as tool:
        assert tool.stdout is not None
        try:
            if tool.stdout.readline().strip() != ready:
                raise CommunicationError(f"a part of the lab ended at once: {' '.join(command)}")
            yield
        finally:
            tool.kill()


def _run(*command: str) -> str:
    """Run a tool to its end; return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommunicationError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
