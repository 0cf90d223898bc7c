"""Files that a command writes when it is done."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.errors import ConfigError

__all__ = ["check_output"]


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
