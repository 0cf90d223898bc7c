"""The `thinwire check` command."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from thinwire.job import joined_job
from thinwire.local_job import run_here
from thinwire.selftest.checks import CHECKS, Bench, Check

__all__ = ["check"]

# A collective that some process does not make ends the check.
TIMEOUT_SECONDS = 60.0


def check(
    *,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of torch.distributed.", show_default="nccl with a GPU, else gloo"),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Start so many on this machine, joined over its loopback interface only.",
            show_default="this is one of a job",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Check that Thinwire works on the processes, the backend and the devices of a job, in under a minute.

    To be started on every process, as the training is; or with `--processes`, which needs no job. The exit
    code is 1 if something does not work.

    Example: `torchrun --nproc-per-node 2 --no-python thinwire check`

    Example: `thinwire check --processes 2`
    """
    run_here(processes)
    with joined_job("check", backend, timeout_seconds=TIMEOUT_SECONDS) as device:
        bench = Bench(device)
        start = time.perf_counter()
        own = {name: _outcome(name, run, bench) for name, run in CHECKS.items()}
        title = f"{bench.channel.size} processes, {dist.get_backend()}, {device.type}"
        title += f", {time.perf_counter() - start:.1f} s"
        failures = bench.sum(torch.tensor([float(not works) for works in own.values()])).tolist()
        try:
            if bench.channel.process_rank == 0:
                outcomes = dict(zip(own, map(round, failures), strict=True))
                print(_json(outcomes, title) if as_json else _printed(outcomes, title), flush=True)
        finally:  # whether or not it could be printed
            bench.sum(torch.zeros(1))  # all have printed
    if any(failures):
        raise typer.Exit(1)


def _outcome(name: str, run: Check, bench: Bench) -> bool:
    """Whether a check holds on this process; what it finds, errors of any kind too, is told at once."""
    bench.findings.clear()
    try:
        run(bench)
    except Exception as error:
        bench.findings.append(f"{type(error).__name__}: {error}")
    for found in bench.findings:
        print(f"thinwire: process {bench.channel.process_rank}: {name}: {found}", file=sys.stderr, flush=True)
    return not bench.findings


def _json(outcomes: dict[str, int], title: str) -> str:
    failed = {name: count for name, count in outcomes.items() if count}
    return json.dumps({"setting": title, "checks": len(outcomes), "failed_on_processes": failed})


def _printed(outcomes: dict[str, int], title: str) -> str:
    lines = [f"{'FAILS' if count else 'works'}  {name}" for name, count in outcomes.items()]
    return "\n".join([f"thinwire check: {title}", *lines])
