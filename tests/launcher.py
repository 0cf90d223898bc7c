"""Moved, mostly."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from commands import (
    EXAMPLES,
    TOLD,
    WITHOUT_PACKAGE,
    Running,
    assert_compressed_and_agreed,
    run_all,
    run_job,
    run_processes,
    run_python,
    stand_ins,
    started_python,
)
from thinwire.lab import Network


def torchrun(script: Path, *arguments: str, processes: int = 2, timeout_seconds: float = 100) -> str:
    """What the script printed, errors included; raises if it failed.

    Its agent and the processes that it starts are forked. The rendezvous is a file: what torchrun finds
    there, it loads as a pickle.
    """
    with tempfile.TemporaryDirectory() as folder, stand_ins() as stand_in:
        launch = ["torch.distributed.run", "--local-addr=127.0.0.1", "--rdzv-backend=c10d"]
        launch += [f"--rdzv-endpoint={folder}/store", "--rdzv-conf=store_type=file"]
        launch += [f"--nproc-per-node={processes}", *stand_in, str(script), *arguments]
        told = {"OMP_NUM_THREADS": "1"}
        ended = run_python(*launch, environment=told, timeout_seconds=timeout_seconds)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def run_in_network(
    network: Network, *command: str, timeout_seconds: float = 100
) -> list[subprocess.CompletedProcess[str]]:
    """How processes ended on the machines of a lab's network; for the command see `run_python`."""
    ranks = range(network.processes)
    told = [network.environment(rank) for rank in ranks]
    entering = [network.command_in(rank // network.processes_per_machine) for rank in ranks]
    files = [[flag.partition("=")[2] for flag in flags if "/ns/" in flag] for flags in entering]
    return run_all(command, told, timeout_seconds=timeout_seconds, namespaces=files)


__all__ = [
    "EXAMPLES",
    "TOLD",
    "WITHOUT_PACKAGE",
    "Running",
    "assert_compressed_and_agreed",
    "run_in_network",
    "run_job",
    "run_processes",
    "run_python",
    "started_python",
    "torchrun",
]
