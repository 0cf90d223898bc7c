"""Pictures of results, as PNG and SVG beside their pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from pages import result_path

plt.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "thinwire",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def step_time(
    medians_ms: Mapping[str, Mapping[str, float]], title: str, *, baselines: Sequence[str]
) -> list[str]:
    """Step time against link rate, one line an algorithm; ours are solid, baselines send nothing."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    rates = list(medians_ms)
    algorithms = list(medians_ms[rates[0]])
    styles = dict(zip(baselines, ("k:", "k-."), strict=False))
    for algorithm in algorithms:
        is_peer = algorithm.startswith(("PyTorch", "epfml", "torchft"))
        style = styles.get(algorithm, "o--" if is_peer else "o-")
        axes.plot(rates, [medians_ms[rate][algorithm] for rate in rates], style, label=algorithm)
    axes.set(
        yscale="log", xlabel="link rate of each host, per second", ylabel="ms per step, median", title=title
    )
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(axis="y", which="both", alpha=0.25)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return save_figure(figure, "network", title.replace(" ", "-"))


def predicted_against_measured(
    steps_ms: Mapping[str, Sequence[tuple[float, float]]], *name_parts: str | None
) -> list[str]:
    """One point a prediction (measured, predicted), one colour a setting, and a band of 15 %."""
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    every = [value for points in steps_ms.values() for point in points for value in point]
    ends = [0.8 * min(every), 1.2 * max(every)]
    axes.fill_between(ends, [0.85 * end for end in ends], [1.15 * end for end in ends], color="0.92")
    axes.plot(ends, ends, "k:", linewidth=1)
    for number, (setting, points) in enumerate(steps_ms.items()):
        marker = "os^Dv*"[number // 4 % 6]
        axes.plot(*zip(*points, strict=True), marker, label=setting, markersize=5, alpha=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms per step", ylabel="predicted, ms per step")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    return save_figure(figure, "advice", *name_parts)


# Algorithm, seconds on the clock, held-out losses.
def gap_against_bytes(gaps: Mapping[str, tuple[float, float, float]], path: Path) -> None:
    """Loss gap to exact averaging in percent, and half of its interval, against times fewer bytes."""
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    for number, (method, (times_fewer, percent, half)) in enumerate(gaps.items()):
        marker = "os^Dv*"[number // 10 % 6]
        axes.errorbar(times_fewer, percent, half, fmt=marker, label=method, capsize=3, markersize=5)
    axes.axhline(0, color="black", linewidth=1)
    # One training that went astray would make all others a line.
    axes.set(ylim=(-5, 20), xscale="log", xlabel="times fewer bytes than bf16")
    axes.set(
        ylabel="held-out loss beside exact, %", title="AdamW, 4 members, 2 000 steps: mean, 95 % interval"
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    _write(figure, [path.with_suffix(suffix) for suffix in (".png", ".svg")])


def save_figure(figure: Figure, *name_parts: str | None) -> list[str]:
    """Write a figure of this run in both formats; their names within the folder of results."""
    paths: list[Path] = [result_path(suffix, *name_parts) for suffix in ("png", "svg")]
    _write(figure, paths)
    return [path.name for path in paths]


def _write(figure: Figure, paths: Sequence[Path]) -> None:
    # Without the time of writing: the same figures make the same file, and no change where none was measured.
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
