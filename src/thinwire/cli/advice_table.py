"""Predictions as a table that reads well on a narrow terminal, too: names break between settings only."""

from __future__ import annotations

import re

from thinwire.advice.result import Advice

COLUMNS = ("ms", "between", "%", "MB", "kept", "loss")
GAP = "  "


def table_lines(advice: Advice, width: int) -> list[str]:
    """Return a heading, and a line or some for each prediction, fastest first.

    Args:
        advice: What was predicted.
        width: Of a line. Where names have no room beside the numbers, they stand above them.
    """
    rows = [(each.name, cells) for each, cells in zip(advice.predictions, _cells(advice), strict=True)]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *(cells for _, cells in rows), strict=True)]

    def aligned(cells: tuple[str, ...]) -> str:
        return GAP.join(cell.rjust(size) for cell, size in zip(cells, widths, strict=True))

    heading = aligned(COLUMNS)
    room = min(width - len(GAP + heading), max(len(name) for name, _ in rows))
    # Where not even one setting has room.
    if room < max(len(line) for name, _ in rows for line in folded(name, 0)):
        below = [[*folded(name, width), GAP + aligned(cells)] for name, cells in rows]
        return [GAP + heading, *(line for lines in below for line in lines)]
    lines = [" " * room + GAP + heading]
    for name, cells in rows:
        first, *others = folded(name, room)
        lines += [first.ljust(room) + GAP + aligned(cells), *others]
    return lines


def folded(name: str, width: int) -> list[str]:
    """Return a name in lines, broken behind commas and brackets; what follows the first is indented.

    Args:
        name: As it is written in code.
        width: Of a line; a setting that is longer stays whole.

    Examples:
        >>> folded("DiLoCo(every_steps=30, fragments=2)", 24)
        ['DiLoCo(every_steps=30,', '  fragments=2)']
    """
    lines: list[str] = []
    for piece in re.findall(r"[^,(]+[,(]? ?", name):
        if lines and len(lines[-1] + piece.rstrip()) <= width:
            lines[-1] += piece
        else:
            lines.append(piece if not lines else "  " + piece)
    return [line.rstrip() for line in lines]


def _cells(advice: Advice) -> list[tuple[str, ...]]:
    """Return what stands in the columns of numbers."""
    rows: list[tuple[str, ...]] = []
    lows = [f"{1e3 * each.low_seconds:.1f}" for each in advice.predictions]
    highs = [f"{1e3 * each.high_seconds:.1f}" for each in advice.predictions]
    low_width, high_width = max(map(len, lows)), max(map(len, highs))
    for each, low, high in zip(advice.predictions, lows, highs, strict=True):
        # What leaves a process and what reaches it are as much, in all collectives that there are. Digits
        # enough for what is sent once in many steps.
        ways = dict.fromkeys(
            f"{size / 1e6:.2f}" if size >= 1e6 else f"{size / 1e6:.2g}"
            for size in (each.sent_bytes, each.received_bytes)
        )
        rows.append(
            (
                f"{1e3 * each.step_seconds:.1f}",
                f"{low:>{low_width}} – {high:>{high_width}}",
                f"{100 * each.step_seconds / advice.baseline.step_seconds:.0f}",
                ", ".join(ways),
                f"{each.memory_bytes / 1e6:.1f}",
                each.loss.short,
            )
        )
    return rows
