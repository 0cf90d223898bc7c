"""Network namespaces that live as long as the lab, and what they need of the machine.

None has a name outside: each is held open by a sleeping process, which ends with the lab. The first is made
as root or (in a user namespace) without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from thinwire.errors import CommunicationError, ConfigError

PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "setpriv")}
HOLD_OPEN = ["sh", "-c", "echo it stands; exec sleep infinity"]


def check_machine() -> None:
    """Refuse a machine that can't have a lab."""
    if sys.platform != "linux":
        raise ConfigError(f"the lab needs Linux's network namespaces; this is {sys.platform}")
    missing = [name for name, tools in PACKAGES.items() if not all(map(shutil.which, tools))]
    if missing:
        raise ConfigError(f"the lab needs {' and '.join(missing)}; install it with the system's packages")


class Namespace:
    """A network namespace; it is gone with this process, even if that is killed outright.

    Attributes:
        holder_pid: The process that holds it open.
    """

    def __init__(self, outer: Namespace | None = None) -> None:
        flags = _allowed_flags() if outer is None else ["--net"]
        make = ["unshare", *flags, *HOLD_OPEN]
        self._holder = subprocess.Popen(
            # By the kernel, not by an exit handler: the namespace is gone even where this process is killed
            # outright.
            ["setpriv", "--pdeathsig", "KILL", "--", *(make if outer is None else outer.command(*make))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # Ctrl-C on a terminal reaches the whole session; the lab passes it on, and still needs its hosts.
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
    """Return the flags with which this machine lets `unshare` make a first network namespace."""
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
