"""Signals that ask a process to end, for commands that have something to clean up, or to say."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM has come; as `KeyboardInterrupt`, so that what cleans up after Ctrl-C does so here."""


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """While open, end by an exception at SIGTERM; but a process of a job its launcher may end at once.

    Raises:
        Terminated: SIGTERM has come.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or "RANK" in os.environ or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class EndSignals:
    """While open, remembers a signal that asks this process to end, instead of being ended by it.

    Signals that this process ignores, as under nohup, stay ignored.

    Attributes:
        received: The last one; None if there was none.
        num_received: How many there were.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.num_received = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> EndSignals:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # What is ignored stays so: nohup asks for that.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.num_received += 1
