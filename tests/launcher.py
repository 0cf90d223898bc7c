"""Moved, mostly."""

from __future__ import annotations

import subprocess

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
    started_python,
)
from thinwire.lab import Network


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
]
