"""Other people's code to run beside ours: what is not a dependency is installed when a benchmark runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

EPFML = "git+https://github.com/epfml/powersgd.git"


@contextmanager
def epfml(*, is_wanted: bool) -> Iterator[str]:
    """Install epfml's `powersgd` into a folder that is gone at the end; empty if pip can't, which is said."""
    if not is_wanted:
        yield ""
        return
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "--no-deps", "--target", folder, EPFML], check=False)
        if done.returncode:
            print("SKIPPED: pip can't install epfml's powersgd (its own words above), so it is not measured")
        yield "" if done.returncode else folder
