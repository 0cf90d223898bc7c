"""Functions that commands share: join a job, show work of more than some seconds, write a file at the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
import typer
from rich.console import Console

from thinwire.checks import processes_here
from thinwire.errors import ConfigError
from thinwire.launch import (
    LocalJob,
    is_in_local_job,
    join_group,
    leave_group,
    python_module,
)

# Options of commands that run on the processes of a job.
PROCESSES = typer.Option(
    None,
    help="Start this many processes on this machine, over its loopback interface only.",
    show_default="this is a process of a job",
)
BACKEND = typer.Option(
    None, metavar="NAME", help="The backend of torch.distributed.", show_default="nccl with a GPU, else gloo"
)


def run_here(processes: int | None, option: str = "--processes") -> None:
    """Run this command in this many processes of this machine.

    Exits as they do. Returns at once in one of them, and if None is asked for.
    """
    if processes is None or is_in_local_job():
        return
    processes_here(option.removeprefix("--"), processes, minimum=1)
    if "RANK" in os.environ:
        raise ConfigError(f"{option} starts a job, but this is a process of one (RANK is set): leave it out")
    job = LocalJob([*python_module("thinwire"), *sys.argv[1:]], processes)
    exit_if_stopped(job.run())
    sys.exit(job.exit_code)


def exit_if_stopped(received: int | None) -> None:
    """Say so and exit, as a shell tells it, if a signal has ended the processes."""
    if received is not None:
        name = signal.Signals(received).name
        again = "every process has ended, the same command begins again"
        print(f"thinwire: stopped by {name}; {again}", file=sys.stderr)
        sys.exit(128 + received)


@contextmanager
def joined_job(
    command: str, backend: str | None, *, timeout_seconds: float = 600.0
) -> Iterator[torch.device]:
    """Join the default process group of the job, and yield the process's device.

    With the backend None, it is NCCL if there is a GPU, else Gloo.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        start = f"such as torchrun --nproc-per-node 2 --no-python thinwire {command}"
        here = "or on this machine alone, with --processes 2"
        raise ConfigError(
            f"{command} runs on the processes of a job: start it on all of them, {start}; {here}"
        )
    device = torch.device("cpu")
    try:
        if backend != "gloo" and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            # Before the group is made: NCCL takes the current device, and all would take the first.
            torch.cuda.set_device(device)
        join_group(backend or ("nccl" if device.type == "cuda" else "gloo"), timeout_seconds=timeout_seconds)
    # torch raises any of these, by backend and by what is wrong.
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"the process group of the job can't be joined: {error}") from error
    try:
        yield device
    finally:
        leave_group()


def check_output(option: str, path: Path | None) -> None:
    """Refuse, before the work, a file that can't be written after it; `option` named it, such as "--save"."""
    if path is not None and path.is_dir():
        raise ConfigError(f"{option} {path} can't be written: it is a folder; give a file")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path} can't be written: there is no folder {path.parent}; make it first"
        )


def tell_without_numba() -> None:
    """Say on stderr that figures of the CPU are not what they could be, if Numba is not installed."""
    if find_spec("numba") is None:
        print(
            "thinwire: Numba is not installed: few bits and low rank are slow on the CPU without it; "
            "pip install '.[numba]' in a clone of Thinwire",
            file=sys.stderr,
        )


@contextmanager
def shown_measuring(console: Console, budget_seconds: float) -> Iterator[Callable[[str], None]]:
    """Show what is being measured, and the time left."""
    deadline = time.monotonic() + budget_seconds

    def show(doing: str) -> None:
        left_seconds = deadline - time.monotonic()
        # A few steps of a large model take longer than any budget.
        left = f"about {left_seconds:.0f} s left" if left_seconds > 0 else "longer than was asked for"
        status.update(f"{doing}; {left}")

    begin = f"measuring, about {budget_seconds:.0f} s …"
    if not console.is_terminal:
        console.print(f"thinwire: {begin}", soft_wrap=True, highlight=False)
    with console.status(begin) as status:
        yield show
