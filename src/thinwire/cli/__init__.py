"""The `thinwire` command: one file for each subcommand, and the one room of typer and rich."""

from thinwire.cli.app import main

__all__ = ["main"]
