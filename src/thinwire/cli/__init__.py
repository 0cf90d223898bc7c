"""The `thinwire` command, its errors and its pipes; each subcommand has its own file."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from thinwire.errors import ConfigError, ThinwireError
from thinwire.local_job import say_once
from thinwire.version import __version__

if TYPE_CHECKING:
    import typer

CLI_PACKAGES = ("matplotlib", "numpy", "rich", "typer")
COMMANDS = ("check", "probe", "advise", "lab", "demo", "report", "run", "attach")


def main() -> None:
    """Run one command. Print a user's mistake as one line on stderr, a traceback only with --debug.

    The same for output that can't be written; if its reader has gone, the command ends as if by SIGPIPE.
    """
    # A shell may have closed them.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    # Not every terminal has our signs, or those of a path: it shows "?" instead.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            _run_typed()
        finally:
            # In `finally`: most commands end with SystemExit.
            _write_what_is_left()
    except ModuleNotFoundError as missing:
        # Any other missing package is a broken installation or a bug, and needs its traceback.
        package = (missing.name or "").partition(".")[0]
        if package not in CLI_PACKAGES:
            raise
        _fail(f"the command line needs {package}: pip install '.[cli]' in a clone of Thinwire", code=2)
    # The shell's exit code for SIGPIPE. Before OSError, of which it is a subclass.
    except BrokenPipeError:
        sys.exit(128 + 13)
    except (ThinwireError, OSError) as error:
        if sys.argv[1:2] == ["--debug"]:  # an option of the main command
            raise
        _fail(str(error), code=2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        # The shell's exit code for SIGINT.
        sys.exit(130)


def _run_typed() -> NoReturn:
    """Run the command that was typed, and exit with its code. Raise if typer can't parse it."""
    app = build_app()
    # Imported here, so that `main` can report a missing package.
    import typer  # noqa: PLC0415

    usage_error: Any = typer.BadParameter.__base__  # of click, or of the copy in newer releases of typer
    try:
        sys.exit(app(standalone_mode=False))
    except usage_error as error:
        message = error.format_message().rstrip(".?")
        if not message:  # nothing was typed: typer has shown the help
            sys.exit(2)
        raise ConfigError(f"{message[0].lower()}{message[1:]}; --help shows what can be typed") from error


def build_app() -> typer.Typer:
    """Return the command with its subcommands."""
    # Imported here, so that `main` can report a missing package.
    import typer  # noqa: PLC0415

    # Without Typer's own display of exceptions: `main` prints errors.
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")

    @app.callback(invoke_without_command=True)
    def describe(
        *,
        debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),  # `main` looks
        version: bool = typer.Option(False, "--version", help="Print the version."),
    ) -> None:
        """Thinwire trains PyTorch models data-parallel over slow networks: small messages, same model.

        Example: `thinwire demo`
        """
        if version:
            typer.echo(f"thinwire {__version__}")
            raise typer.Exit

    if sys.argv[1:] in (["--help"], ["--version"]):
        for name in COMMANDS:
            app.command(name, help=_docstring(name))(lambda: None)
        return app
    # A command that was typed is imported alone: most of the others import torch.
    for name in set(sys.argv[1:2]).intersection(COMMANDS) or COMMANDS:
        # All arguments after the script of `run`, or the command of `attach`, belong to it, even options.
        context = {"allow_interspersed_args": False} if name in ("run", "attach") else None
        app.command(context_settings=context)(getattr(import_module(f"thinwire.cli.{name}"), name))
    return app


def _docstring(name: str) -> str:
    """Return a command's help, without importing it, which would import torch."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return source.partition(f"\ndef {name}(")[2].split('"""')[1]


def _write_what_is_left() -> None:
    """Flush stdout now: when the interpreter ends, it is too late to report that it can't be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Bytes that are still in the buffer would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OSError(f"the output can't be written: {error.strerror}") from error


def _fail(message: str, *, code: int) -> NoReturn:
    say_once(f"thinwire: {message}")
    sys.exit(code)
