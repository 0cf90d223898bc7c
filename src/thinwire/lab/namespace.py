"""A network namespace for the lab itself, and what it needs of the machine.

The lab starts itself anew in a namespace of its own, as root or (in a user namespace) without. Nothing that
is made in there has a name outside, so all of it is gone when its last process is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from thinwire.errors import ConfigError
from thinwire.interpreter import python_module

__all__ = ["LAB_VARIABLE", "check_machine", "is_inside", "start_inside"]

LAB_VARIABLE = "THINWIRE_LAB"  # in the environment: the lab that this is, or was started by
PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "setpriv")}


def is_inside() -> bool:
    """Whether this process is the lab in its own namespace."""
    return os.environ.get(LAB_VARIABLE) == _identity()


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
            os.environ[LAB_VARIABLE] = _identity()
            sys.stdout.flush()
            os.execvp("unshare", ["unshare", *flags, *python_module("thinwire.cli"), *arguments])
    raise ConfigError(
        "the lab can't make a network namespace: run it as root (in a container, with --privileged, or with "
        "--cap-add SYS_ADMIN --cap-add NET_ADMIN), or allow unprivileged user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1; on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0)"
    )


def _identity() -> str:
    """This process's number and when it began, which it keeps when it becomes another program."""
    stat = Path("/proc/self/stat").read_text()
    return f"{os.getpid()}-{stat.rpartition(')')[2].split()[19]}"
