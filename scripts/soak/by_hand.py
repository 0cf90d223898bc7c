"""Long runs that are started by hand: at Ctrl-C and SIGTERM they say what becomes of their work."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import processes

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def said_if_interrupted(becomes: str) -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM end this process in order, with one sentence."""
    # Ctrl-C reaches all processes. This one ends the others, which have from their server what it ignores.
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.context()
    for each in before:
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; {becomes}", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
