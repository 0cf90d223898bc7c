"""The `thinwire` command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from thinwire.errors import ConfigError, ThinwireError

if TYPE_CHECKING:
    import typer

CLI_PACKAGES = ("typer", "rich")


def main() -> None:
    """Run one command. A user's mistake is one line on stderr, never a traceback."""
    try:
        build_app()()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in CLI_PACKAGES:
            raise
        _fail(f"the command line needs {package}: pip install 'thinwire[cli]'", code=2)
    except ConfigError as error:
        _fail(str(error), code=2)
    except (ThinwireError, OSError) as error:
        _fail(str(error), code=1)
    except KeyboardInterrupt:
        sys.exit(130)


def build_app() -> typer.Typer:
    """The command and its subcommands.

    Raises:
        ModuleNotFoundError: the packages of `thinwire[cli]` are not installed.
    """
    import typer  # noqa: PLC0415 - an optional package, needed by the command line alone

    from thinwire.advice.command import advise  # noqa: PLC0415 - the same
    from thinwire.demo.command import demo  # noqa: PLC0415 - the same
    from thinwire.lab.command import lab  # noqa: PLC0415 - the same
    from thinwire.probe.command import probe  # noqa: PLC0415 - the same
    from thinwire.selftest.command import check  # noqa: PLC0415 - the same

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(describe)
    app.command()(demo)
    app.command()(lab)
    app.command()(probe)
    app.command()(advise)
    app.command()(check)
    return app


def describe() -> None:
    """Thinwire trains PyTorch models data-parallel over slow networks: small messages, same model."""


def _fail(message: str, *, code: int) -> NoReturn:
    print(f"thinwire: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
