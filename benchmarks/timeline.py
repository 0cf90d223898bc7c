"""Where the time of a step goes, on each host of the lab: buckets, messages, arithmetic, and the idle link.

The ranges are those that Thinwire leaves in `torch.profiler`; when the link is busy, its own counter tells.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from pages import markdown_table
from plots import save_figure
from thinwire.lab import BITS, number_with_unit
from whole_steps import Batch, Trainer, loss_of

EXPLANATION = (
    "A step of median length among seven, on two hosts with one core each. Ranges are those that Thinwire "
    "leaves in `torch.profiler`, which itself takes some milliseconds; that the link sends is read from its "
    "counter, every half millisecond."
)
WARM_UP_STEPS, STEPS = 4, 7
SAMPLE_SECONDS = 5e-4
IDLE_MS = 1.0  # shorter ones are between two packets
# In a process of its own: a thread would wait for the interpreter's lock.
SAMPLER = f"""
import sys, time
file, out, before = open("/proc/net/dev"), open(sys.argv[1], "w"), ""
while True:
    file.seek(0)
    sent = next(line for line in file if line.strip().startswith("eth0:")).partition(":")[2].split()[8]
    if sent != before:
        out.write(f"{{time.perf_counter()}} {{sent}}\\n")
        out.flush()
        before = sent
    time.sleep({SAMPLE_SECONDS})
"""

Span = tuple[str, float, float]  # a name, and milliseconds from the step's start


@dataclass
class Picture:
    """One step of a host."""

    ranges: list[Span]
    sending: list[tuple[float, float]]  # while the card sends, in milliseconds
    step_ms: float

    def idle(self) -> list[tuple[float, float]]:
        """Return when the link sends nothing, between its first and its last byte."""
        return [(before[1], after[0]) for before, after in pairwise(self.sending)]

    def doing(self, start: float, end: float) -> str:
        """Return what the host does meanwhile, by the range that covers most of it."""

        def shared(span: Span) -> float:
            return min(end, span[2]) - max(start, span[1])

        inner = [span for span in self.ranges if span[0].startswith("thinwire")]
        best = max([*inner, ("", 0.0, 0.0)], key=shared)
        if shared(best) > (end - start) / 2:
            return best[0]
        return max(self.ranges, key=shared)[0]


def take(trainer: Trainer, draw: Callable[[], Batch], rate: str) -> Picture:
    """Return a picture of a step of median length. Collective."""
    for _ in range(WARM_UP_STEPS):
        trainer.step(draw())
    starts, took = list[float](), list[float]()
    with TemporaryDirectory() as folder:
        samples = Path(folder, "samples")
        with subprocess.Popen([sys.executable, "-c", SAMPLER, str(samples)]) as sampler:
            while not samples.exists():
                time.sleep(0.01)
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                for number in range(STEPS):
                    batch = draw()
                    starts.append(time.perf_counter())
                    with record_function(f"step {number}"):
                        with record_function("forward"):
                            loss = loss_of(trainer.model, batch)
                        with record_function("backward"):
                            torch.autograd.backward(loss)
                        with record_function("optimizer"):
                            trainer.update()
                    took.append(time.perf_counter() - starts[-1])
            sampler.terminate()
        lines = [line.split() for line in samples.read_text(encoding="ascii").splitlines()]
    number = sorted(range(STEPS), key=took.__getitem__)[STEPS // 2]
    # The same step on all hosts.
    chosen = torch.tensor(number)
    dist.broadcast(chosen, 0)
    number = int(chosen)
    events: list[Any] = list(profiled.events() or ())
    step = next(event for event in events if event.name == f"step {number}")
    ranges = [
        (event.name, (event.time_range.start - step.time_range.start) / 1e3,
         (event.time_range.end - step.time_range.start) / 1e3)
        for event in events
        if event.name.startswith(("thinwire", "forward", "backward", "optimizer"))
        and step.time_range.start <= event.time_range.start < step.time_range.end
    ]  # fmt: skip
    sent = [(1e3 * (float(at) - starts[number]), int(count)) for at, count in lines]
    inside = [(at, count) for at, count in sent if -1 <= at <= 1e3 * took[number]]
    return Picture(
        ranges, busy_times(inside, number_with_unit(rate, BITS, 1, 1e12, "a rate") / 8e3), 1e3 * took[number]
    )


def busy_times(samples: Sequence[tuple[float, int]], bytes_per_ms: float) -> list[tuple[float, float]]:
    """Return when bytes were sent: the counter grows by up to 64 KiB, when the last of them has left."""
    busy: list[tuple[float, float]] = []
    for (_, before), (at, count) in pairwise(samples):
        start = at - (count - before) / bytes_per_ms
        if busy and start - busy[-1][1] < IDLE_MS:
            busy[-1] = (busy[-1][0], at)
        else:
            busy.append((start, at))
    return busy


def section(name: str, pictures: Mapping[str, Picture]) -> str:
    """Return a host's buckets, and the longest times without a byte on its link, as text."""
    parts = [f"### {name}"]
    for host, picture in pictures.items():
        gaps = sorted(picture.idle(), key=lambda gap: gap[0] - gap[1])[:4]
        idle = [
            [f"{picture.doing(start, end)}", f"{start:.0f}", f"{end:.0f}", f"{end - start:.1f}"]
            for start, end in gaps
        ]
        sending = sum(end - start for start, end in picture.sending)
        first = picture.sending[0][0] if picture.sending else 0.0
        last = picture.sending[-1][1] if picture.sending else 0.0
        parts += [
            f"**{host}**: a step of {picture.step_ms:.0f} ms; the link sends for {sending:.0f} ms, between "
            f"{first:.0f} and {last:.0f} ms. The longest times in which it does not:",
            markdown_table(["the host does", "from, ms", "to, ms", "ms"], idle),
        ]
    first_host, picture = next(iter(pictures.items()))
    rows = [
        [label.removeprefix("thinwire: "), f"{start:.0f}", f"{end:.0f}", f"{end - start:.1f}"]
        for label, start, end in picture.ranges
    ]
    parts += [
        f"All that Thinwire does on {first_host}:",
        markdown_table(["", "from, ms", "to, ms", "ms"], rows),
    ]
    return "\n\n".join(parts)


def drawn(pictures: Mapping[str, Picture], title: str, *name_parts: str | None) -> str:
    """Draw hosts' steps above each other; return where."""
    figure, axes = plt.subplots(figsize=(10, 1.2 + 1.4 * len(pictures)), layout="constrained")
    colours = {"forward": "0.75", "backward": "0.6", "optimizer": "0.45", "link": "tab:blue"}
    ticks = dict[str, int]()
    for number, (host, picture) in enumerate(reversed(list(pictures.items()))):
        rows = {"link": 4 * number, "Thinwire": 4 * number + 1, "training": 4 * number + 2}
        ticks |= {f"{host}: {row}": height for row, height in rows.items()}
        spans = [(start, end - start) for start, end in picture.sending]
        axes.broken_barh(spans, (rows["link"] - 0.4, 0.8), color=colours["link"])
        for name, start, end in picture.ranges:
            is_ours = name.startswith("thinwire")
            colour = colours.get(name, "tab:red" if "wait" in name else "tab:green")
            row = rows["Thinwire" if is_ours else "training"]
            axes.broken_barh([(start, end - start)], (row - 0.4, 0.8), color=colour)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.set(xlabel="ms", title=title)
    return save_figure(figure, *name_parts)[0]
