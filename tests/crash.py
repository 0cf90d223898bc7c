"""Fresh processes that may die."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

import forked


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        told: What its body returned, None if it died.
        exit_code: Of the process; negative if a signal ended it.
    """

    told: Any
    exit_code: int | None


@dataclass(frozen=True)
class Setting:
    """What a body is told of its process."""

    process_rank: int
    processes: int
    timeout_seconds: float
    store: str

    def join_group(self) -> None:
        """Join the others in a Gloo group, over a file that is gone with the run."""
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.store}",
            rank=self.process_rank,
            world_size=self.processes,
            timeout=timedelta(seconds=self.timeout_seconds),
        )
        assert dist.get_world_size() == self.processes


def run(
    body: Callable[..., Any],
    *args: Any,
    processes: int = 3,
    timeout_seconds: float = 30.0,
    limit_seconds: float = 100.0,
) -> list[Ended]:
    """Run `body(setting, *args)` in fresh processes; all have ended when this returns.

    A process that has not ended by itself after `limit_seconds` is killed, and the test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [forked.context().Pipe(duplex=False) for _ in range(processes)]
        running = [
            forked.process(
                _serve, body, Setting(number, processes, timeout_seconds, f"{folder}/store"), args, pipe
            )
            for number, (_, pipe) in enumerate(pipes)
        ]
        for process in running:
            process.start()
        for _, pipe in pipes:
            pipe.close()
        deadline = time.monotonic() + limit_seconds
        told = [_received(pipe, deadline) for pipe, _ in pipes]
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [number for number, process in enumerate(running) if process.is_alive()]
        for process in running:
            process.kill()
            process.join()
    assert not hung, f"processes {hung} did not end; told: {told}"
    return [Ended(value, process.exitcode) for value, process in zip(told, running, strict=True)]


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


def _received(pipe: Connection, deadline: float) -> Any:
    """What a process tells; None if it ends without."""
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            return pickle.loads(pipe.recv_bytes())
    except EOFError:
        pass
    return None


def _serve(body: Callable[..., Any], setting: Setting, args: tuple[Any, ...], pipe: Connection) -> None:
    os.chdir(tempfile.gettempdir())
    try:
        pipe.send_bytes(pickle.dumps(body(setting, *args)))
    except BaseException:
        pipe.send_bytes(pickle.dumps(f"the body failed: {traceback.format_exc()}"))
        raise
