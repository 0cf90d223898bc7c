"""The `thinwire probe` command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.common import BACKEND, PROCESSES, check_output, joined_job, run_here, shown_measuring
from thinwire.errors import ConfigError
from thinwire.probe.measure import compare_streams
from thinwire.probe.measure import probe as measure
from thinwire.probe.result import Probe, Timing, ring_share

BAR_WIDTH = 20
SHOWN_FACTOR = 1.2
MAX_STREAMS, WORTH_A_CONNECTION = 16, 1.1
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def probe(
    *,
    budget_seconds: float = typer.Option(20.0, help="About how long it may take."),
    backend: str | None = BACKEND,
    all_pairs: bool | None = typer.Option(
        None,
        "--all-pairs/--neighbours",
        help="Time all pairs of processes, or neighbours only.",
        show_default="all pairs of up to 8 processes",
    ),
    save: Path | None = typer.Option(
        None, metavar="FILE", help="Write the result as JSON, for thinwire advise --probe."
    ),
    plot: Path | None = typer.Option(
        None, metavar="FILE", help="Draw time against message size: .png, .svg, .pdf."
    ),
    processes: int | None = PROCESSES,
    streams: str | None = typer.Option(
        None, metavar="1,4,8", help="Also compare these numbers of Gloo connections to each process."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Measure how fast the processes of a job average messages of each size, and which are near each other.

    Start it on every process, as you start the training; or with `--processes`, to see what this machine
    alone can do. Process 0 prints the result and writes the files.

    Example: `torchrun --nproc-per-node 2 --no-python thinwire probe --save probe.json`

    Example: `thinwire lab --machines 2 --rate 100mbit -- thinwire probe`
    """
    counts = _counts(streams)
    # Before measuring: matplotlib would refuse it half a minute later.
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot must end in one of {', '.join(PLOT_SUFFIXES)}, got {plot}")
    # Only on the process that writes: the other machines of a job need no such folder.
    if os.environ.get("RANK", "0") == "0":
        check_output("--plot", plot)
        check_output("--save", save)
    # If this starts processes, as in `thinwire check`, it does not return.
    run_here(processes)
    with joined_job("probe", backend) as device:
        is_first = dist.get_rank() == 0
        console = Console(stderr=True, quiet=not is_first)
        with shown_measuring(console, budget_seconds) as show_measuring:
            found = measure(
                budget_seconds=budget_seconds, device=device, all_pairs=all_pairs, progress=show_measuring
            )
        rates = compare_streams(counts, found) if counts else {}
        if is_first:
            # All hold the same result.
            print(found.to_json()) if as_json else show(found, Console())
            if rates:
                Console(stderr=as_json).print(told_streams(rates), highlight=False, soft_wrap=True)
            if save is not None:
                found.save(save)
            if plot is not None:
                save_plot(found, plot)


def _counts(streams: str | None) -> list[int]:
    """Return the numbers of connections to compare; one is always among them."""
    parts = [] if streams is None else streams.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= MAX_STREAMS for part in parts):
        raise ConfigError(
            f"--streams must be numbers from 1 to {MAX_STREAMS}, such as 1,4,8; got {streams!r}"
        )
    return sorted({1, *map(int, parts)}) if parts else []


def told_streams(rates: Mapping[int, float]) -> str:
    """Return the rates by connections, and which setting to use."""
    told = ", ".join(f"{1e-6 * rate:,.0f} Mbit/s by {count}" for count, rate in rates.items())
    best = max(rates, key=lambda count: rates[count])
    # The fewest that are about as good: each connection has a thread that works on it.
    fewest = min(count for count, rate in rates.items() if rate >= rates[best] / WORTH_A_CONNECTION)
    do = "one is enough"
    if fewest > 1:
        names = ",".join(["eth0"] * fewest)
        do = f"set GLOO_SOCKET_IFNAME={names} (your interface, {fewest} times) on every machine"
    return f"connections {told}, eight averagings in flight: {do}"


def save_plot(found: Probe, path: Path) -> None:
    """Draw the time of an averaging against its message's size, with the spread."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, needed here alone

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", yscale="log", xlabel="bytes per message", ylabel="ms per averaging, median and spread"
    )
    sizes = [timing.message_bytes for timing in found.timings]
    pairs = [(1e3 * timing.median_seconds, 1e3 * timing.spread_seconds / 2) for timing in found.timings]
    # A logarithmic axis has nothing at 0 and below.
    lowest = [max(middle - spread, middle / 10) for middle, spread in pairs]
    axes.fill_between(sizes, lowest, [middle + spread for middle, spread in pairs], alpha=0.25)
    axes.plot(sizes, [middle for middle, _ in pairs], "o-")
    rate = found.bytes_per_second
    rate_text = "rate not known" if rate is None else f"{8e-6 * rate:,.0f} Mbit/s"
    axes.set_title(f"{found.world_size} processes, {found.backend}: {rate_text}")
    axes.grid(which="both", alpha=0.25)
    figure.savefig(path)


def show(found: Probe, console: Console) -> None:
    """Print what was found: a table with bars, then what follows from it."""
    console.print(_table(found))
    latency = f"{1e3 * found.latency_seconds:.3f} ms per averaging of {found.world_size} processes"
    small, large = map(_size, found.rate_from or (found.timings[0], found.timings[-1]))
    bandwidth = f"not known: {large} took no longer for sure than {small} did; a larger --budget-seconds "
    bandwidth += "sends larger messages"
    if found.rate_from is not None:
        rate = f"{8e-6 * found.known_rate():,.0f} Mbit/s"
        bandwidth = f"{rate} each process sends, by messages of {small} and {large}"
    lines = [("latency", latency), ("bandwidth", bandwidth)]
    for kind, factor in found.wire_factors.items():
        # Less may be other work of the machine.
        if factor > SHOWN_FACTOR:
            slower = f"takes {factor:.1f} times as long as averaging, for as many bytes on the wire"
            lines.append((kind.replace("_", "-"), slower))
    if found.doubt:
        lines.append(("doubtful", found.doubt))
    if len(found.nodes) > 1:
        structure = ", ".join(f"{{{', '.join(map(str, node))}}}" for node in found.nodes)
        inside, between = (found.pair_bytes_per_second(inside=is_inside) for is_inside in (True, False))
        if inside and between:
            structure += f": {8e-6 * inside:,.0f} Mbit/s inside, {8e-6 * between:,.0f} between them"
        lines.append(("structure", structure))
    for name, text in lines:
        console.print(f"{name:<10} {text}", highlight=False, soft_wrap=True)


def _table(found: Probe) -> Table:
    table = Table(title=f"Averaging on {found.world_size} processes, {found.backend}, {found.device}")
    for name in ("message", "ms, median", "spread", "times", "Mbit/s", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    # Counts what leaves each process, as on a ring: that is what its link carries.
    megabits = 8e-6 * ring_share(found.world_size)
    rates = [megabits * timing.message_bytes / timing.median_seconds for timing in found.timings]
    for timing, rate in zip(found.timings, rates, strict=True):
        table.add_row(
            _size(timing),
            f"{1e3 * timing.median_seconds:.3f}",
            f"{1e3 * timing.spread_seconds:.3f}",
            str(len(timing.seconds)),
            f"{rate:,.1f}",
            "█" * round(BAR_WIDTH * rate / max(rates)),
        )
    return table


def _size(timing: Timing) -> str:
    units = [(1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")]
    size, unit = next(pair for pair in units if timing.message_bytes >= pair[0])
    return f"{timing.message_bytes // size} {unit}"
