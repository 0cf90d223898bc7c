"""The pictures of docs/, one an idea, legible on light and on dark pages: python benchmarks/pictures.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
INK, COMPUTE, INSIDE, SLOW = "#808080", "#5b8db8", "#6aa56a", "#d9822b"
plt.rcParams |= {"svg.hashsalt": "thinwire", "svg.fonttype": "path", "font.size": 10, "text.color": INK}


def canvas(width: float, height: float, *, inches: float = 8.0) -> Axes:
    """Axes without a frame, one unit as long in both directions."""
    _, axes = plt.subplots(figsize=(inches, inches * height / width), layout="constrained")
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")
    return axes


def box(axes: Axes, left: float, bottom: float, width: float, height: float, text: str, color: str) -> None:
    """A filled box with a word in it."""
    style = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": color, "edgecolor": "none"}
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, **style))
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", color="white", size=9)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": color, "lw": 1.5})


def timeline(
    name: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]], end: float
) -> None:
    """Rows of boxes over time: (start, length, text, colour)."""
    height = 0.9 * len(rows) + 0.7
    axes = canvas(end + 3.6, height)
    for number, (label, boxes) in enumerate(rows):
        bottom = height - 0.9 * (number + 1)
        axes.text(3.3, bottom + 0.3, label, ha="right", va="center")
        for start, length, text, color in boxes:
            box(axes, 3.5 + start, bottom, length, 0.6, text, color)
    arrow(axes, (3.5, 0.25), (end + 3.5, 0.25))
    axes.text(end + 3.5, 0.05, "time", ha="right", va="top", size=9)
    save(name)


def save(name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    plt.savefig(FOLDER / f"{name}.svg", transparent=True, metadata={"Date": None})
    plt.close()


def two_levels() -> None:
    """Exact inside of each machine, small messages between machines."""
    axes = canvas(15, 6.6)
    for machine, (frame, gpus, parts) in enumerate(((0.3, 0.5, 4.2), (8.7, 12.9, 8.9))):
        outline = {"boxstyle": "round,pad=0.1", "fill": False, "edgecolor": INK}
        axes.add_patch(FancyBboxPatch((frame, 0.9), 6, 5.3, **outline))
        axes.text(frame + 3, 0.45, f"machine {machine}", ha="center", va="center")
        axes.text(frame + 3, 5.85, "exact mean, fast link", ha="center", va="center", size=9)
        for place in range(4):
            bottom = 4.65 - 1.2 * place
            box(axes, gpus, bottom, 1.7, 0.8, f"GPU {place}", COMPUTE)
            box(axes, parts, bottom, 1.9, 0.8, f"part {place}", INSIDE)
            ends = (gpus + 1.8, parts - 0.1) if machine == 0 else (gpus - 0.1, parts + 2.0)
            arrow(axes, (ends[0], bottom + 0.4), (ends[1], bottom + 0.4), INSIDE)
    for place in range(4):
        height, style = 5.05 - 1.2 * place, {"arrowstyle": "<->", "color": SLOW, "lw": 2}
        axes.annotate("", (8.85, height), (6.15, height), arrowprops=style)
    axes.text(7.5, 0.45, "a few bits, slow link", ha="center", va="center", color=SLOW)
    save("two-levels")


def step() -> None:
    """What a step sends while the backward pass goes on, and after it."""
    rows = [
        (
            "computing",
            [
                (0, 2.9, "forward", COMPUTE),
                *((3 + 2 * i, 1.9, f"backward {i + 1}", COMPUTE) for i in range(3)),
                (11.3, 1.7, "optimizer", COMPUTE),
            ],
        ),
        ("slow link", [(5 + 2 * i, 1.5, f"bucket {i + 1}", SLOW) for i in range(3)]),
        ("all commit, or none", [(10.6, 0.6, "", INSIDE)]),
    ]
    timeline("step", rows, 13.2)


def local_sgd() -> None:
    """Four members train by themselves and average every few steps; with a delay, while they go on."""
    steps = [(1.2 * i + (0.8 if i > 3 else 0), 1.1, "step", COMPUTE) for i in range(8)]
    late = [(1.2 * i, 1.1, "step", COMPUTE) for i in range(9)]
    rows = [
        ("LocalSGD", steps),
        ("slow link", [(4.8, 0.7, "", SLOW), (10.4, 0.7, "", SLOW)]),
        ("with a delay", late),
        ("slow link", [(4.8, 2.3, "two steps late", SLOW)]),
    ]
    timeline("local-sgd", rows, 11.4)


def error_feedback() -> None:
    """What a message does not carry is added to the next step's gradient."""
    axes = canvas(13, 3.2)
    box(axes, 0.2, 1.6, 2.2, 0.9, "gradient", COMPUTE)
    box(axes, 4.4, 1.6, 2.4, 0.9, "compress", INSIDE)
    box(axes, 9.6, 1.6, 3.0, 0.9, "small message", SLOW)
    box(axes, 4.4, 0.2, 2.4, 0.9, "residual", INK)
    axes.text(3.4, 2.05, "+", ha="center", va="center", size=16)
    arrow(axes, (2.5, 2.05), (3.2, 2.05))
    arrow(axes, (3.6, 2.05), (4.3, 2.05))
    arrow(axes, (6.9, 2.05), (9.5, 2.05), SLOW)
    arrow(axes, (5.6, 1.55), (5.6, 1.15))
    arrow(axes, (4.3, 0.65), (3.4, 1.75))
    axes.text(7.0, 0.65, "what the message does not carry", va="center", size=9)
    axes.text(1.4, 0.65, "next step", va="center", size=9)
    save("error-feedback")


if __name__ == "__main__":
    for draw in (two_levels, step, local_sgd, error_feedback):
        draw()
        print(FOLDER / f"{draw.__name__.replace('_', '-')}.svg")
