"""The `thinwire attach` command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import typer

from thinwire.cli.job import check_output, make_folder
from thinwire.errors import ConfigError
from thinwire.launch import ending_with_this
from thinwire.preload import strict as strict_run
from thinwire.preload.options import Options


def attach(
    command: list[str] = typer.Argument(
        default_factory=list, metavar="-- COMMAND…", help="Any training command.", show_default=False
    ),
    *,
    # This is text, so that what is no number is refused in one line, like every other wrong value.
    bits: str | None = typer.Option(None, metavar="N", help="Send gradients in N bits.", show_default="4"),
    algorithm: str | None = typer.Option(
        None, metavar="TEXT", help='As in Python, such as "PowerSGD(matrix_rank=4)".'
    ),
    auto: bool = typer.Option(False, "--auto", help="Let the run's first steps choose the algorithm."),
    watch: Path | None = typer.Option(None, metavar="FILE", help="Record steps, for `thinwire report`."),
    checkpoint: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="Folder for the algorithm's state: loaded at the start, saved at the end and on SIGTERM.",
    ),
    strict: bool = typer.Option(
        False, "--strict", help="Fail if a model can't be attached, or if no step was averaged."
    ),
) -> None:
    """Run a training command with small messages: every DDP model that it builds is attached.

    The command stays as it is, whatever builds the model: your own script, Accelerate, the Trainer and
    libraries built on it, Lightning. With several machines, run the same line on each. If you don't control
    the launcher, set THINWIRE_ATTACH="Quantize(bits=4)" in the environment of the processes instead.

    Models that already have a communication hook, FSDP, DeepSpeed and runs of one process stay as they are,
    and a line says so.

    Example: `thinwire attach --bits 4 -- torchrun --nproc-per-node 2 train.py --epochs 1`
    """
    if not command or sys.argv[-len(command) - 1] != "--":
        missing = "-- before the command" if command else "command after --"
        raise ConfigError(f"no {missing}; write thinwire attach --bits 4 -- torchrun … train.py …")
    if (bits is not None) + (algorithm is not None) + auto > 1:
        raise ConfigError("expected one of --bits, --algorithm and --auto, got several; leave the others out")
    if algorithm is None:
        algorithm = "auto()" if auto else f"{'4' if bits is None else bits} bits"
    # Absolute paths: processes may change their folder before they read these.
    records, folder = (None if path is None else str(path.resolve()) for path in (watch, checkpoint))
    options = Options(algorithm, records, folder, strict)
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"there is no command {command[0]!r}; nothing was started")
    if watch is not None and not watch.parent.is_dir():
        make_folder("--watch", watch.parent)
    check_output("--watch", watch)
    if checkpoint is not None:
        make_folder("--checkpoint", checkpoint)
    environment = os.environ | options.environment()
    _check_installed(program, environment)
    if strict:
        program = sys.executable
        command = [program, "-I", "-S", strict_run.__file__, *ending_with_this(command)]
    os.execve(program, command, environment)


def _check_installed(program: str, environment: dict[str, str]) -> None:
    """Raise if the command is a Python, or a script of one, in which Thinwire is not installed."""
    interpreter = program
    if not re.fullmatch(r"python[\d.]*", Path(program).name):
        with Path(program).open("rb") as file:
            line = file.readline().decode(errors="replace")
        if not line.startswith("#!") or "python" not in line:
            return
        interpreter = line[2:].strip()
    look = "import sys; sys.exit('thinwire.preload.startup' not in sys.modules)"
    if subprocess.run([*interpreter.split(), "-c", look], env=environment, check=False).returncode:
        raise ConfigError(
            f"{interpreter} does not have thinwire, so nothing was started; install it there: "
            "pip install . in a clone of Thinwire"
        )
