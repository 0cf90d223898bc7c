"""Long runs: how far they are and how long yet, and what they keep for the next start."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from pages import ROOT, cpu_model

UNFINISHED_FOLDER = ROOT / "build" / "unfinished"
TERMINAL_EVERY_SECONDS, LOG_EVERY_SECONDS = 0.5, 30.0
INTERRUPTED = 128 + signal.SIGINT


class Progress:
    """Tells on stderr how far a run is, and how long it takes yet: as a context, around all of it.

    On a terminal it is one line that changes; in a log, a line at most every 30 s. A run that is interrupted,
    or asked to end, says what becomes of its work and exits. `kept` is the file that has what is finished;
    without one the next start begins again.
    """

    def __init__(
        self,
        total: float,
        *,
        kept: Path | None = None,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept, self._clock, self._total = kept, clock, total
        self._out = sys.stderr if out is None else out
        self._is_terminal = self._out.isatty()
        self._start = clock()
        self._shown = -math.inf if self._is_terminal else self._start

    def __enter__(self) -> Progress:
        # So that whatever has been started is ended by it as by Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not self._total and self._kept is not None:
            print(f"nothing left to measure: all of it is in {self._kept}", file=self._out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_terminal:
            self._out.write("\r\x1b[K")
        if kind is KeyboardInterrupt:
            becomes = f"what is finished is in {self._kept}: the same command goes on from there"
            if self._kept is None:
                becomes = "nothing is kept: this benchmark can't be resumed"
            print(f"interrupted; {becomes}", file=self._out)
            raise SystemExit(INTERRUPTED)

    def show(self, done: float, now: object) -> None:
        """Tell how much of the total is done in this run, and what is being done, if it is time to."""
        seconds = self._clock()
        if seconds - self._shown < (TERMINAL_EVERY_SECONDS if self._is_terminal else LOG_EVERY_SECONDS):
            return
        self._shown = seconds
        elapsed, left = seconds - self._start, "time left not known yet"
        if done:
            left = in_words(elapsed * (self._total - done) / done) + " left"
        line = f"{100 * done / self._total:3.0f} %, {in_words(elapsed)} gone, {left}: {now}"
        # Longer ones would wrap, and the next could not take its place.
        self._out.write(f"\r{line[:100]}\x1b[K" if self._is_terminal else f"{line}\n")
        self._out.flush()


def in_words(seconds: float) -> str:
    """Return a time as people tell it."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


class Kept:
    """What a run has found so far, a line each in a file, on this processor: the next start has it."""

    def __init__(self, name: str, folder: Path = UNFINISHED_FOLDER) -> None:
        self.path = folder / f"{name}.jsonl"
        self._processor = cpu_model()

    def all(self) -> list[tuple[dict[str, Any], Any]]:
        """Return keys and what was found of each."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        rows = [json.loads(line) for line in lines]
        return [(row["key"], row["found"]) for row in rows if row["processor"] == self._processor]

    def find(self, **key: object) -> Any:
        """Return what was found; None if nothing was."""
        return next((found for other, found in self.all() if other == key), None)

    def add(self, found: object, **key: object) -> None:
        """Keep what was found, at once; its key tells it from all else in the file, and JSON has both."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "processor": self._processor, "found": found}) + "\n")

    def finish(self) -> None:
        """All is on its page: the next start measures again."""
        self.path.unlink(missing_ok=True)
