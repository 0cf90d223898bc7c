"""Functions shared by commands: start and join a job, check output files before the work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import typer

from thinwire.checks import processes_here
from thinwire.errors import ConfigError
from thinwire.launch import LocalJob, join_group, leave_group, python_module
from thinwire.local_job import is_in_local_job

if TYPE_CHECKING:
    import torch

# Options of commands that run on the processes of a job.
PROCESSES = typer.Option(
    None, help="Start this many processes here, over the loopback interface only.", show_default="join a job"
)
BACKEND = typer.Option(
    None, metavar="NAME", help="The backend of torch.distributed.", show_default="nccl with a GPU, else gloo"
)


def run_here(processes: int | None) -> None:
    """Run this command in `processes` and exit with their code; return in the processes, and if None."""
    if processes is None or is_in_local_job():
        return
    processes_here("processes", processes, minimum=1)
    if "RANK" in os.environ:
        raise ConfigError(
            "--processes starts a job, but this process already belongs to one (RANK is set); leave it out"
        )
    job = LocalJob([*python_module("thinwire"), *sys.argv[1:]], processes)
    exit_if_stopped(job.run())
    sys.exit(job.exit_code)


def exit_if_stopped(received: int | None) -> None:
    """If a signal has ended the processes, log it and exit with the shell's code for it."""
    if received is not None:
        stopped = f"thinwire: stopped by {signal.Signals(received).name}; every process has ended"
        print(f"{stopped}; run the same command to start again", file=sys.stderr)
        sys.exit(128 + received)


@contextmanager
def joined_job(
    command: str, backend: str | None, *, timeout_seconds: float = 600.0
) -> Iterator[torch.device]:
    """Join the job's default process group (NCCL if there is a GPU, else Gloo), and yield the device."""
    import torch  # noqa: PLC0415 - slow to import, needed here alone

    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        start = f"torchrun --nproc-per-node 2 --no-python thinwire {command}"
        raise ConfigError(
            f"{command} runs on the processes of a job: start it on all of them, such as {start}; or on this "
            "machine alone, with --processes 2"
        )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    numbers = {name: os.environ.get(name, "0") for name in names}
    wrong = [name for name, text in numbers.items() if not text.isdecimal()]
    if wrong or int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):  # for such a rank torch would wait
        had = ", ".join(f"{name}={numbers[name]!r:.40}" for name in wrong or ("RANK", "WORLD_SIZE"))
        raise ConfigError(f"the environment has {had}, which is no place in a job; start it with torchrun")
    device = torch.device("cpu")
    try:
        if backend != "gloo" and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            # Before making the group: NCCL uses the current device, and all would use the first.
            torch.cuda.set_device(device)
        join_group(backend or ("nccl" if device.type == "cuda" else "gloo"), timeout_seconds=timeout_seconds)
    # torch raises any of these, depending on the backend and the cause.
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"can't join the job's process group: {error}") from error
    try:
        yield device
    finally:
        leave_group()


def check_output(option: str, path: Path | None) -> None:
    """Raise before the work if a file can't be written after it; `option` is its name, such as "--save"."""
    if path is None:
        return
    is_new = not os.path.lexists(path)
    with _named_errors(option, path):
        if path.is_fifo():
            return  # its reader would find the end
        path.open("ab").close()
        if is_new:
            path.unlink(missing_ok=True)  # machines that share a folder may all try at once


def write_output(path: Path, text: str) -> None:
    """Write a file after the work; the error names it, which Python's does not if the disk is full."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        error.filename = str(path)
        raise


def make_folder(option: str, folder: Path) -> None:
    """Make a folder for files, with its parents; raise if that, or a file in it, is impossible."""
    with _named_errors(option, folder):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


@contextmanager
def _named_errors(option: str, path: Path) -> Iterator[None]:
    # Typer takes whatever follows an option for its value.
    if str(path) == "--":
        raise ConfigError(f"{option} got -- as its path, which begins the command; give a path before --")
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path} can't be written: {error.strerror}; give another path") from error


def tell_without_numba() -> None:
    """Print on stderr that the CPU's figures could be better, if Numba is not installed."""
    if find_spec("numba") is None:
        print(
            "thinwire: Numba is not installed: few bits and low rank are slow on the CPU without it; "
            "pip install '.[numba]' in a clone of Thinwire",
            file=sys.stderr,
        )
