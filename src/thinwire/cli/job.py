"""Joining the process group of the job that a command was started in."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, TypeAlias

import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import HashStore

from thinwire.errors import ConfigError
from thinwire.launch import is_in_local_job, join_local_job, loopback_interface

Processes: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Start so many on this machine, joined over its loopback interface only.",
        show_default="this is one of a job",
    ),
]
"""The option `--processes` of commands that run on the processes of a job."""


@contextmanager
def joined_job(
    command: str, backend: str | None, *, timeout_seconds: float = 600.0
) -> Iterator[torch.device]:
    """Join the default process group of the job, and yield the process's device.

    Args:
        command: Its name, for the error.
        backend: None for NCCL where there is a GPU, else Gloo.
        timeout_seconds: Of every collective.

    Raises:
        ConfigError: This is no process of a job, or the job can't be joined.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"{command} runs on the processes of a job: start it on all of them, such as torchrun "
            f"--nproc-per-node 2 --no-python thinwire {command}; or on this machine alone, with --processes 2"
        )
    device = torch.device("cpu")
    try:
        if backend != "gloo" and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            # Before the group is made: NCCL takes the current device, and all would take the first.
            torch.cuda.set_device(device)
        chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
        if is_in_local_job():
            join_local_job(chosen, timeout_seconds=timeout_seconds)
        else:
            dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_seconds))
    # torch raises any of these, by backend and by what is wrong.
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"the process group of the job can't be joined: {error}") from error
    try:
        yield device
    finally:
        _leave_group()


@contextmanager
def alone() -> Iterator[None]:
    """Make a default process group of this process only, which listens on the loopback interface only.

    Raises:
        ConfigError: This machine has no loopback interface.
    """
    # Without it Gloo listens on the address of this machine's name, which others may reach.
    variable = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(variable)
    os.environ[variable] = loopback_interface()
    try:
        # A store in memory: alone, nobody has to be met, and no port is opened.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            _leave_group()
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _leave_group() -> None:
    """Destroy the default process group, and before that what keeps it."""
    # A DDP model that is still there, in a cycle, keeps the backend's threads running into the interpreter's
    # end, where they now and then abort.
    gc.collect()
    dist.destroy_process_group()
