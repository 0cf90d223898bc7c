"""What a command writes when it is done."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from thinwire.errors import ConfigError


def check_output(option: str, path: Path | None) -> None:
    """Refuse, before the work, a file that can't be written after it.

    Whether the disk has room only the writing tells.

    Args:
        option: That named the file, such as "--save".
        path: None if it was not given.

    Raises:
        ConfigError: It is a folder, its folder is not there, or it must not be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} must be a file, got the folder {path}")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path} can't be written: there is no folder {path.parent}; make it first"
        )
    # What exists may be written where its folder may not, such as /dev/null.
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(
            f"{option} {path} can't be written: no permission; give a file in a folder of yours"
        )


def tell_without_numba() -> None:
    """Say on stderr that figures of the CPU are not what they could be, where Numba is not installed."""
    if find_spec("numba") is None:
        print(
            "thinwire: Numba is not installed: few bits and low rank are slow on the CPU without it; "
            "pip install '.[numba]' in a clone of Thinwire",
            file=sys.stderr,
        )
