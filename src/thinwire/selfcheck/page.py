"""A page about a device: what was found, what has failed, and what was not run and why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

Row: TypeAlias = "dict[str, str | float | int | None]"
"""A line of a table, by column; None where a number is not known."""


@dataclass
class DevicePage:
    """All that was found so far. It is true at any time: what has not ended stands on it as such.

    Attributes:
        setting: Versions, device and group.
        copied_bytes_per_second: Of a copy of the gradients, bytes read and written; None if there was none.
        kernels: How far the arithmetic of each matrix rank is from that in float64, relative to it.
        steps: What a step of each algorithm takes, from the first bucket to the last mean.
        failures: What raised an error on this process, or was ended, by part, and why.
        not_run: What was left out, by part, and why.
        under_way: The part that has begun and not ended, if any.
        to_come: Parts that have not begun.
    """

    setting: dict[str, str]
    copied_bytes_per_second: float | None = None
    kernels: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    under_way: str | None = None
    to_come: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all parts have ended, and well."""
        return not (self.failures or self.not_run or self.under_way or self.to_come)

    def ended(self, why: str) -> DevicePage:
        """Return the page as it is if nothing more is run."""
        under_way = {} if self.under_way is None else {self.under_way: why}
        not_run = {**self.not_run, **dict.fromkeys(self.to_come, why)}
        return replace(
            self, failures={**self.failures, **under_way}, not_run=not_run, under_way=None, to_come=[]
        )

    def as_plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    def as_markdown(self) -> str:
        """Return it as a page to paste into an issue."""
        lines = [f"- {name}: {value}" for name, value in self.setting.items()]
        if self.copied_bytes_per_second is not None:
            lines.append(f"- a copy: {self.copied_bytes_per_second / 1e9:,.0f} GB/s")
        for rows, number in ((self.kernels, ".1e"), (self.steps, ",.2f")):
            lines += ["", *_table(rows, number)] if rows else []
        gaps = [f"- **failed**: {name}: {why}" for name, why in self.failures.items()]
        gaps += [f"- **not run**: {name}: {why}" for name, why in self.not_run.items()]
        return "\n".join([*lines, "", *gaps] if gaps else lines)


class KeptPage:
    """While open, a page that is printed once, even if what fills it raises or hangs.

    By a thread, which goes on while another waits for a device or a message. A process that is killed prints
    nothing.
    """

    def __init__(
        self, page: DevicePage, rendered: Callable[[DevicePage], str], *, within_seconds: float
    ) -> None:
        self._page, self._rendered = page, rendered
        self._lock, self._is_printed = threading.Lock(), False
        why = f"it had not ended after {within_seconds:.0f} s"
        self._timer = threading.Timer(within_seconds, lambda: self._print_once(page.ended(why)))
        self._timer.daemon = True

    def __enter__(self) -> KeptPage:
        self._timer.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        why = "" if error is None else str(error).partition("\n")[0] or type(error).__name__
        self._print_once(self._page.ended(why))
        self._timer.cancel()

    def print(self) -> None:
        """Print the page, unless that was done as the time was over."""
        self._print_once(self._page)

    def _print_once(self, page: DevicePage) -> None:
        with self._lock:
            if not self._is_printed:
                self._is_printed = True
                print(self._rendered(page), flush=True)


def _table(rows: Sequence[Mapping[str, object]], number: str) -> list[str]:
    def cell(value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, float):
            return format(value, number)
        return f"{value:,}" if isinstance(value, int) else str(value)

    heads = [name.replace("_", " ") for name in rows[0]]
    marks = ["---", *["--:"] * (len(heads) - 1)]
    cells = [[cell(value) for value in row.values()] for row in rows]
    return [f"| {' | '.join(line)} |" for line in [heads, marks, *cells]]
