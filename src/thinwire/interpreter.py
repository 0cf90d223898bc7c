"""Starting another process of this Python."""

from __future__ import annotations

import sys
from pathlib import Path


def python_module(name: str) -> list[str]:
    """Return the command that runs a module, with the current folder on its path only if this process has it.

    `python -m` puts that folder first, so in a stranger's folder a `random.py` would run. (Python 3.10 can't
    be kept from it.)
    """
    has_current = any(Path(each or ".").resolve() == Path.cwd() for each in sys.path)
    leave_out = [] if has_current or sys.version_info < (3, 11) else ["-P"]
    return [sys.executable, *leave_out, "-m", name]
