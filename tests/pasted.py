"""Lines that `thinwire advise` prints to paste, run as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import thinwire
from advice.ways import LOCAL, TWO, advice_of
from thinwire.advice.variants import LocalVariant, lines_to_paste


def lines_for(adapter: str) -> list[str]:
    """Where 2 bits are advised, and where models are averaged every other step, in 4 bits."""
    way = LocalVariant(thinwire.DiLoCo, 2, {"algorithm": thinwire.Quantize(bits=4)})
    local = replace(LOCAL, name=way.name, code=way.code)
    return [lines_to_paste(advice_of(best, budget=0.2))[adapter] for best in (TWO, local)]


@contextmanager
def handles() -> Iterator[list[Any]]:
    """What the lines have made, in order."""
    made: list[Any] = []

    def noting(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            made.append(function(*args, **kwargs))
            return made[-1]

        return called

    with (
        patch.object(thinwire, "attach", noting(thinwire.attach)),
        patch.object(thinwire, "DiLoCo", noting(thinwire.DiLoCo)),
    ):
        yield made


def run(text: str, names: dict[str, Any]) -> None:
    """Run lines, and behind `with` the user's loop: the name `loop`, called."""
    exec(f"{text}\n    loop()" if text.endswith(":") else f"{text}\nloop()", names)
