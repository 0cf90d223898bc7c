"""A page that is printed whatever becomes of the process that fills it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from thinwire.selfcheck.page import DevicePage

SCRIPT = Path(__file__).with_name("page_keeper.py")

GONE_IN_IT = "the process ended in it, and could not say why; what a library wrote of it stands on stderr"
GONE_BEFORE = "the process ended before"


class KeptPage:
    """While open, a page that is printed once: by this process, or by another one if this ends or hangs.

    By a process, as what may end or hang here is below all that Python can catch: a kernel that does not
    end, an abort by NCCL's watchdog, a lack of memory. An exception on the way out stands on the page.

    Args:
        page: Filled by others.
        rendered: Makes of it the text that is printed.
        within_seconds: After which the other process prints what there is.
    """

    def __init__(
        self, page: DevicePage, rendered: Callable[[DevicePage], str], *, within_seconds: float
    ) -> None:
        self.page, self._rendered = page, rendered
        self._within_seconds = within_seconds
        self._is_printed = False

    def __enter__(self) -> KeptPage:
        self._process = subprocess.Popen(
            # With no site packages it starts at once, whatever those import.
            [sys.executable, "-S", str(SCRIPT), str(self._within_seconds)],
            stdin=subprocess.PIPE,
            # What ends this process's session or group is when it is needed.
            start_new_session=True,
        )
        self.update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_printed:
            why = "" if error is None else str(error).partition("\n")[0] or type(error).__name__
            self.page = self.page.ended(why)
            self.print()

    def update(self) -> None:
        """Tell the other process how the page stands."""
        seconds = f"{self._within_seconds:.0f} s"
        if_gone = self.page.ended(GONE_BEFORE, in_a_part=GONE_IN_IT)
        if_late = self.page.ended(
            f"the {seconds} were over before", in_a_part=f"ended with the process after {seconds}"
        )
        self._tell([self._rendered(each) for each in (if_gone, if_late)])

    def print(self) -> None:
        """Print the page, unless the other process has done so, as the time was over."""
        self._is_printed = True
        self._tell(None)
        with suppress(BrokenPipeError):
            self._stdin.close()
        if self._process.wait() == 0:
            print(self._rendered(self.page), flush=True)

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _tell(self, what: list[str] | None) -> None:
        # The other process is gone once it has printed the page, and what comes then is too late.
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(what).encode() + b"\n")
            self._stdin.flush()
