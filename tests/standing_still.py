"""`python standing_still.py LINE script arguments…` runs the script, which stands still for good once it has
printed a line that begins so."""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
from typing import Any

if __name__ == "__main__":
    _, line, *sys.argv = sys.argv
    printed = builtins.print

    def print_(*values: Any, **options: Any) -> None:
        printed(*values, **options)
        while str(values[0]).startswith(line):
            signal.pause()

    builtins.print = print_
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
