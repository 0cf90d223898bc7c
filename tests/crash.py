"""Moved, mostly."""

from __future__ import annotations

import os
import sys
import threading
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from processes import Ended, Setting
from processes import run_fresh as run


def listening_on(process_id: int) -> set[IPv4Address | IPv6Address]:
    """The addresses that a process listens on, as Linux tells."""
    links = Path(f"/proc/{process_id}/fd").iterdir()
    own = {os.readlink(link) for link in links if link.is_symlink()}
    found: set[IPv4Address | IPv6Address] = set()
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/{process_id}/net/{name}")
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                words = bytes.fromhex(local.partition(":")[0])  # of four bytes, as the machine has them
                parts = [words[i : i + 4] for i in range(0, len(words), 4)]
                packed = b"".join(part[::-1] if sys.byteorder == "little" else part for part in parts)
                found.add(ip_address(packed))
    return found


def threads() -> int:
    """Threads of this process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def children() -> list[str]:
    """Processes that this one has started and not waited for."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


__all__ = ["Ended", "Setting", "children", "listening_on", "run", "threads"]
