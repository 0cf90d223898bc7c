"""A network namespace for the lab itself, and what it needs of the machine.

The lab starts itself anew in a namespace of its own, as root or (in a user namespace) without. Nothing that
is made in there has a name outside, so all of it is gone when its last process is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from thinwire.errors import ConfigError

__all__ = ["LAB_VARIABLE", "check_machine", "end_leftovers", "is_inside", "start_inside"]

LAB_VARIABLE = (
    "THINWIRE_LAB"  # in the environment of all that runs in a lab: its process, and when that began
)
PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "setpriv")}


def is_inside() -> bool:
    """Whether this process is the lab in its own namespace."""
    return os.environ.get(LAB_VARIABLE) == _identity(os.getpid())


def check_machine() -> None:
    """Refuse a machine that can't have a lab.

    Raises:
        ConfigError: Not Linux, or a tool is missing.
    """
    if sys.platform != "linux":
        raise ConfigError(f"the lab needs Linux's network namespaces; this is {sys.platform}")
    missing = [name for name, tools in PACKAGES.items() if not all(map(shutil.which, tools))]
    if missing:
        raise ConfigError(f"the lab needs {' and '.join(missing)}; install it with the system's packages")


def start_inside(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the same command in a network namespace of its own.

    Raises:
        ConfigError: The machine allows neither root nor anybody else to make one.
    """
    tries = [["--net"], ["--user", "--map-root-user", "--net"]]
    for flags in tries if os.geteuid() == 0 else tries[1:]:
        if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode == 0:
            os.environ[LAB_VARIABLE] = _identity(os.getpid())
            sys.stdout.flush()
            os.execvp("unshare", ["unshare", *flags, sys.executable, "-m", "thinwire.cli", *arguments])
    raise ConfigError(
        "the lab can't make a network namespace: run it as root (in a container, with --privileged, or with "
        "--cap-add SYS_ADMIN --cap-add NET_ADMIN), or allow unprivileged user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1; on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0)"
    )


def end_leftovers() -> None:
    """Kill what is left of labs that were themselves killed."""
    for process_id in _processes():
        lab = _lab_of(process_id)
        if lab is not None and lab != _identity(int(lab.partition("-")[0])):
            os.kill(process_id, signal.SIGKILL)


def _identity(process_id: int) -> str:
    """A process's number and when it began, which no later process has in common with it."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return f"{process_id}-gone"
    return f"{process_id}-{stat.rpartition(')')[2].split()[19]}"


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _lab_of(process_id: int) -> str | None:
    """The lab that a process is of; None if of none, or if it is not ours to look at."""
    try:
        environment = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{LAB_VARIABLE}=".encode()
    return next((each[len(prefix) :].decode() for each in environment if each.startswith(prefix)), None)
