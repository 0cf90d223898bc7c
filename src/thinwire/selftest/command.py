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
from thinwire.selftest.checks import CHECKS, Bench, Check, CheckError

__all__ = ["check"]


def check(
    *,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of torch.distributed.", show_default="nccl with a GPU, else gloo"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Check that Thinwire works on the processes, the backend and the devices of a job, in under a minute.

    To be started on every process, as the training is. The exit code is 1 if something does not work.

    Example: `torchrun --nproc-per-node 2 --no-python thinwire check`
    """
    with joined_job("check", backend) as device:
        bench = Bench(device)
        start = time.perf_counter()
        own = {name: _outcome(run, bench) for name, run in CHECKS.items()}
        title = f"{bench.channel.size} processes, {dist.get_backend()}, {device.type}"
        title += f", {time.perf_counter() - start:.1f} s"
        failures = bench.sum(torch.tensor([float(found is not None) for found in own.values()])).tolist()
        for name, found in own.items():
            if found is not None:
                print(f"thinwire: process {bench.channel.process_rank}: {name}: {found}", file=sys.stderr)
        if bench.channel.process_rank == 0:
            outcomes = dict(zip(own, map(round, failures), strict=True))
            print(_json(outcomes, title) if as_json else _printed(outcomes, title))
        bench.sum(torch.zeros(1))  # all have printed
    if any(failures):
        raise typer.Exit(1)


def _outcome(run: Check, bench: Bench) -> str | None:
    """None if a check holds, else what was found; an error of any kind is the check's."""
    try:
        run(bench)
    except CheckError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _json(outcomes: dict[str, int], title: str) -> str:
    failed = {name: count for name, count in outcomes.items() if count}
    return json.dumps({"setting": title, "checks": len(outcomes), "failed_on_processes": failed})


def _printed(outcomes: dict[str, int], title: str) -> str:
    lines = [f"{'FAILS' if count else 'works'}  {name}" for name, count in outcomes.items()]
    return "\n".join([f"thinwire check: {title}", *lines])
