"""Lines that `thinwire advise` prints to paste, run as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import thinwire
from advice.ways import TWO, advice_of


def lines_for(framework: str) -> str:
    """Where 2 bits are advised."""
    return advice_of(TWO, budget=0.2).lines[framework]


@contextmanager
def handles() -> Iterator[list[Any]]:
    """What the lines have made, in order."""
    made: list[Any] = []

    def noting(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            made.append(function(*args, **kwargs))
            return made[-1]

        return called

    with patch.object(thinwire, "attach", noting(thinwire.attach)):
        yield made


def run(text: str, names: dict[str, Any]) -> None:
    """Run lines, and behind them the user's loop: the name `loop`, called."""
    exec(f"{text}\nloop()", names)
