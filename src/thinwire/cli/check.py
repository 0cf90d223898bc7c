"""The `thinwire check` command: print what the checks find."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import torch.distributed as dist
import typer

from thinwire.channel import gather_numbers
from thinwire.cli.job import Processes, joined_job
from thinwire.local_job import run_here
from thinwire.selfcheck.checks import CHECKS, Bench, Check

__all__ = ["check"]

# A collective that some process does not make ends the check.
TIMEOUT_SECONDS = 60.0


def check(
    *,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of torch.distributed.", show_default="nccl with a GPU, else gloo"),
    ] = None,
    processes: Processes = None,
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
        title = f"{bench.transport.size} processes, {dist.get_backend()}, {device.type}"
        title += f", {time.perf_counter() - start:.1f} s"
        everyone = gather_numbers(
            [float(not works) for works in own.values()], bench.transport, "the outcomes"
        )
        failures = [round(sum(of_check)) for of_check in zip(*everyone, strict=True)]
        try:
            if bench.transport.rank == 0:
                outcomes = dict(zip(own, failures, strict=True))
                failed = {name: count for name, count in outcomes.items() if count}
                lines = [f"{'FAILS' if count else 'works'}  {name}" for name, count in outcomes.items()]
                found = {"setting": title, "checks": len(outcomes), "failed_on_processes": failed}
                text = "\n".join([f"thinwire check: {title}", *lines])
                print(json.dumps(found) if as_json else text, flush=True)
        finally:  # the others wait for that: a launcher ends all processes when one has failed
            gather_numbers([0.0], bench.transport, "waiting until all is printed")
    if any(failures):
        raise typer.Exit(1)


def _outcome(name: str, run: Check, bench: Bench) -> bool:
    """Return whether a check holds on this process; print what it finds, errors of any kind too, at once.

    Args:
        name: Of the check.
        run: The check.
        bench: What it works with.
    """
    bench.findings.clear()
    try:
        run(bench)
    except Exception as error:
        bench.findings.append(f"{type(error).__name__}: {error}")
    for found in bench.findings:
        print(f"thinwire: process {bench.transport.rank}: {name}: {found}", file=sys.stderr, flush=True)
    return not bench.findings
