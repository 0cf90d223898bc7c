"""Run `script arguments…` and leave without interpreter teardown.

After all is done, teardown now and then ends a process by SIGABRT in a native thread: seen in one of eight
launches of plain DDP under stock Accelerate, without Thinwire. A launcher then reports failure.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
