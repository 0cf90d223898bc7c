"""The `thinwire probe` command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.job import BACKEND, PROCESSES, check_output, joined_job, run_here, write_output
from thinwire.errors import ConfigError
from thinwire.probe import Probe
from thinwire.probe import probe as measure
from thinwire.probe.link_timings import ring_share
from thinwire.probe.prober import compare_streams

BAR_WIDTH = 20
SHOWN_FACTOR = 1.2
MAX_STREAMS, WORTH_A_CONNECTION = 16, 1.1


def probe(
    *,
    budget_seconds: float = typer.Option(20.0, help="About how many seconds the probe may take."),
    backend: str | None = BACKEND,
    save: Path | None = typer.Option(
        None, metavar="FILE", help="Write the result there, for thinwire advise --probe."
    ),
    processes: int | None = PROCESSES,
    streams: str | None = typer.Option(
        None, metavar="1,4,8", help="Also compare these numbers of Gloo connections to each process."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Measure the network between the processes of a job: by message size, in machines and between them.

    Start it on every process, as you start the training; or with `--processes`, to see what this machine
    alone can do. Process 0 prints the result and writes the files.

    Example: `torchrun --nproc-per-node 2 --no-python thinwire probe --save probe.json`

    Example: `thinwire lab --machines 2 --rate 100mbit -- thinwire probe`
    """
    counts = _counts(streams)
    # Only on the process that writes: other machines of a job need no such folder.
    if os.environ.get("RANK", "0") == "0":
        check_output("--save", save)
    # Like `thinwire check`, this does not return if it starts processes.
    run_here(processes)
    with joined_job("probe", backend) as device:
        is_first = dist.get_rank() == 0
        console = Console(stderr=True, quiet=not is_first)
        begin = f"measuring, about {budget_seconds:.0f} s"
        if not console.is_terminal:
            console.print(f"thinwire: {begin} …", soft_wrap=True, highlight=False)
        with console.status(begin) as status:
            probed = measure(budget_seconds=budget_seconds, device=device, progress=status.update)
        rates = compare_streams(counts, probed) if counts else {}
        if is_first:
            # All processes have the same result.
            print(probed.to_json()) if as_json else show(probed, Console())
            if rates:
                Console(stderr=as_json).print(describe_streams(rates), highlight=False, soft_wrap=True)
            if save is not None:
                write_output(save, probed.to_json() + "\n")


def _counts(streams: str | None) -> list[int]:
    parts = [] if streams is None else streams.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= MAX_STREAMS for part in parts):
        raise ConfigError(
            f"--streams must be numbers from 1 to {MAX_STREAMS}, such as 1,4,8; got {streams!r}"
        )
    return sorted({1, *map(int, parts)}) if parts else []  # one connection is always compared


def describe_streams(rates: Mapping[int, float]) -> str:
    """Return the rates by connections, and which setting to use."""
    by_count = ", ".join(f"{1e-6 * rate:,.0f} Mbit/s by {count}" for count, rate in rates.items())
    best = max(rates, key=lambda count: rates[count])
    # The fewest that are about as good: each connection has a busy thread.
    fewest = min(count for count, rate in rates.items() if rate >= rates[best] / WORTH_A_CONNECTION)
    do = "one is enough"
    if fewest > 1:
        names = ",".join(["eth0"] * fewest)
        do = f"set GLOO_SOCKET_IFNAME={names} (your interface, {fewest} times) on every machine"
    return f"connections {by_count}, eight averagings in flight: {do}"


def show(probed: Probe, console: Console) -> None:
    """Print the measurements as a table with bars, then the conclusions."""
    console.print(_table(probed))
    rate = probed.bytes_per_second
    unknown = "not known: a larger --budget-seconds sends larger messages"
    lines = {
        "latency": f"{1e3 * probed.latency_seconds:.3f} ms per averaging of {probed.world_size} processes",
        "bandwidth": unknown if rate is None else f"{8e-6 * rate:,.0f} Mbit/s each process sends",
    }
    for kind, factor in probed.wire_factors.items():
        # A smaller factor may be due to other work on the machine.
        if factor > SHOWN_FACTOR:
            slower = f"{factor:.1f} times as long as averaging, for as many bytes on the wire"
            lines[kind.replace("_", "-")] = f"takes {slower}"
    if probed.doubt:
        lines["doubtful"] = probed.doubt
    if len(probed.nodes) > 1:
        lines["structure"] = ", ".join(f"{{{', '.join(map(str, node))}}}" for node in probed.nodes)
        inside, between = (probed.pair_bytes_per_second(inside=is_inside) for is_inside in (True, False))
        if inside and between:
            lines["structure"] += f": {8e-6 * inside:,.0f} Mbit/s inside, {8e-6 * between:,.0f} between them"
    for name, text in lines.items():
        console.print(f"{name:<10} {text}", highlight=False, soft_wrap=True)


def _table(probed: Probe) -> Table:
    table = Table(title=f"Averaging on {probed.world_size} processes, {probed.backend}, {probed.device}")
    for name in ("bytes", "ms, median", "spread", "times", "Mbit/s", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    # Count the bytes that each process sends, as in a ring: its link carries these.
    megabits = 8e-6 * ring_share(probed.world_size)
    rates = [megabits * timing.message_bytes / timing.median_seconds for timing in probed.timings]
    for timing, rate in zip(probed.timings, rates, strict=True):
        table.add_row(
            f"{timing.message_bytes:,}",
            f"{1e3 * timing.median_seconds:.3f}",
            f"{1e3 * timing.spread_seconds:.3f}",
            str(len(timing.seconds)),
            f"{rate:,.1f}",
            "█" * round(BAR_WIDTH * rate / max(rates)),
        )
    return table
