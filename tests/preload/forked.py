"""`forked.py SCRIPT …`: what the `.pth` file lets happen, where torch's DDP is imported already."""

from __future__ import annotations

import atexit
import runpy
import sys

from torch.nn.parallel import DistributedDataParallel

from thinwire.preload.startup import watch_built

if __name__ == "__main__":
    watch_built(DistributedDataParallel)
    del sys.argv[0]
    # Kept: a script's models are alive when Python ends.
    namespace = runpy.run_path(sys.argv[0], run_name="__main__")
    atexit._run_exitfuncs()  # a forked process ends without
