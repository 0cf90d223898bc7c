"""Print a page on behalf of a process that ends, or does not get on, before it has printed it itself.

A script that imports nothing of Thinwire: `python -S page_keeper.py SECONDS`. On its standard input it gets
lines of JSON: `[if_gone, if_late]`, the page to print if the process ends now, or if the seconds are over;
and `null` once the process prints the page itself. The exit code is 0 then, and 1 if this has printed it.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

CHUNK_BYTES = 1 << 16


def kept(source: int, seconds: float) -> str | None:
    """Return the page to print; None where the process prints it itself.

    Args:
        source: Where lines come from, a file descriptor.
        seconds: After which the page is printed, whatever the process does.
    """
    end, unread = time.monotonic() + seconds, b""
    if_gone, if_late = "", ""
    while True:
        if not select.select([source], [], [], max(0.0, end - time.monotonic()))[0]:
            return if_late
        # Unbuffered: what a buffer held would not be seen by `select`.
        chunk = os.read(source, CHUNK_BYTES)
        if not chunk:
            return if_gone
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            pages = json.loads(line)
            if pages is None:
                return None
            if_gone, if_late = pages


if __name__ == "__main__":
    page = kept(sys.stdin.fileno(), float(sys.argv[1]))
    if page is not None:
        print(page, flush=True)
        sys.exit(1)
