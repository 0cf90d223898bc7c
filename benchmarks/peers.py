"""Other people's code to run beside ours: installed when a benchmark runs, never committed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

__all__ = ["EPFML", "installed"]

EPFML = "git+https://github.com/epfml/powersgd.git"


@contextmanager
def installed(requirement: str) -> Iterator[str]:
    """A folder to import a package from, gone at the end.

    Raises:
        CalledProcessError: pip can't install it; it has said why.
    """
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", folder, requirement], check=True)
        yield folder
