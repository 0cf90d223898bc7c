"""Running a script on the hosts of `thinwire lab`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch.distributed as dist

UNSHAPED = "unshaped"
LOOK_EVERY_SECONDS = 0.5


def run_in_lab(
    hosts: int,
    rate: str,
    script: Sequence[str],
    *,
    processes: int = 1,
    latency: str = "0ms",
    packages: str = "",
    meanwhile: Callable[[], object] = lambda: None,
) -> Any:
    """Run a Python script on every host; return what its first process told `leave_job`.

    Args:
        hosts: How many.
        rate: Of each host's link, such as "100mbit", or `UNSHAPED`.
        script: Its path and arguments; it is given `--work=FILE`, for `leave_job`.
        processes: On each host.
        latency: A round trip between hosts, such as "20ms".
        packages: A folder with more packages to import.
        meanwhile: Is called twice a second.

    Raises:
        CalledProcessError: It failed on some host.
    """
    command = [sys.executable, "-m", "thinwire", "lab", f"--machines={hosts}"]
    command += [f"--processes-per-machine={processes}", *([] if rate == UNSHAPED else [f"--rate={rate}"])]
    command += [] if latency == "0ms" else [f"--latency={latency}"]
    path = ":".join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command += ["--", sys.executable, *script, f"--work={out}"]
        # Ctrl-C reaches all. This process ends the lab, which ends its hosts; they ignore what it does now.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        running = subprocess.Popen(command, env=environment)
        try:
            signal.signal(signal.SIGINT, before)
            while running.poll() is None:
                meanwhile()
                time.sleep(LOOK_EVERY_SECONDS)
        finally:
            # If this process is interrupted: the lab ends its hosts before it ends.
            running.terminate()
            running.wait()
        if running.returncode:
            raise subprocess.CalledProcessError(running.returncode, command)
        return json.loads(out.read_text())


def leave_job(found: object = None, out: Path | None = None) -> NoReturn:
    """Let the first process write what was found; end without the interpreter's end, which may abort."""
    if out is not None and dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def interface_sent_bytes() -> int:
    """What this host's interface has sent; each host has a namespace of its own."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def own_address() -> str:
    """This host's address in the lab: the one from which it reaches the first host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
