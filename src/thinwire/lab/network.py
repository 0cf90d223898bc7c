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
from contextlib import ExitStack

from thinwire.errors import CommunicationError, ConfigError
from thinwire.lab.layout import Layout

PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "setpriv")}
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

    Each machine is a namespace; the processes on it reach each other by its loopback. The bridge that joins
    the machines' slow links is in a namespace of the lab's.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._machines: list[Namespace] = []
        self._open = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as opened:
            self._core = Namespace()
            # What stands is taken down if a later tool fails; only a whole network is kept open.
            opened.callback(self._core.close)
            self._run("ip", "link", "set", "lo", "up")
            self._run("ip", "link", "add", "core", "type", "bridge")
            self._run("ip", "link", "set", "core", "up")
            for machine in range(self.layout.machines):
                self._add_machine(machine, opened)
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

    def sent_bytes(self, machine: int) -> int:
        """Return what a machine has sent, by its interface: with headers and acknowledgements."""
        (interface,) = json.loads(
            _run(*self.command_in(machine, "ip", "-json", "-statistics", "link", "show", "dev", "eth0"))
        )
        return int(interface["stats64"]["tx"]["bytes"])

    def _add_machine(self, machine: int, opened: ExitStack) -> None:
        """Make a machine and join it to the bridge."""
        # Within the core's user namespace, so that the core may put ends of links into it.
        namespace = Namespace(self._core)
        opened.callback(namespace.close)
        self._machines.append(namespace)
        peer = ["peer", "name", "eth0", "netns", str(namespace.holder_pid)]
        self._run("ip", "link", "add", f"machine{machine}", "type", "veth", *peer)
        self._run("ip", "link", "set", f"machine{machine}", "master", "core", "up")
        # /24: machines find each other without routes; MAX_MACHINES keeps to it.
        address = ["ip", "addr", "add", f"{self.layout.address(machine)}/24", "dev", "eth0"]
        for command in (["ip", "link", "set", "lo", "up"], address, ["ip", "link", "set", "eth0", "up"]):
            _run(*self.command_in(machine, *command))
        # Shaped where it is sent, in the machine's own queue: its sockets feel the slow link, as they would
        # feel a real one's driver.
        if self.layout.rate is not None:
            shaped = ["tc", "qdisc", "add", "dev", "eth0", "root", *self.layout.shaping()]
            _run(*self.command_in(machine, *shaped))

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


def _run(*command: str) -> str:
    """Run a tool to its end; return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CommunicationError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
