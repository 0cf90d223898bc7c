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
from thinwire.errors import ConfigError
from thinwire.local_job import run_here
from thinwire.selfcheck.checks import CHECKS, Bench, Check
from thinwire.selfcheck.device import measured

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
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            help="Measure the job's device as well, on GPT-2 small: a page in Markdown.",
            show_default="only check",
        ),
    ] = None,
) -> None:
    """Check that Thinwire works on the processes, the backend and the devices of a job, in under a minute.

    To be started on every process, as the training is; or with `--processes`, which needs no job. The exit
    code is 1 if something does not work.

    Example: `torchrun --nproc-per-node 2 --no-python thinwire check`

    Example: `thinwire check --processes 2`

    Example: `torchrun --nproc-per-node 1 --no-python thinwire check --device cuda`
    """
    # Before a group is joined: in the process that starts the others it does not return.
    run_here(processes)
    with joined_job("check", backend, timeout_seconds=TIMEOUT_SECONDS) as own_device:
        if device not in (None, own_device.type):
            raise ConfigError(
                f"the job's device is {own_device.type}, got --device {device}; --backend gloo runs on the "
                "CPU, and without it a job runs on the GPU where torch finds one"
            )
        bench = Bench(own_device)
        start = time.perf_counter()
        # One after the other, in the same order on all: each check makes collectives.
        own = {name: _outcome(name, run, bench) for name, run in CHECKS.items()}
        title = f"{bench.transport.size} processes, {dist.get_backend()}, {own_device.type}"
        title += f", {time.perf_counter() - start:.1f} s"
        # A check may fail on some processes only; all end with the same exit code.
        everyone = gather_numbers(
            [float(not works) for works in own.values()], bench.transport, "the outcomes"
        )
        failures = [round(sum(of_check)) for of_check in zip(*everyone, strict=True)]
        page = None if device is None else measured(own_device, bench.transport)
        try:
            if bench.transport.rank == 0:
                outcomes = dict(zip(own, failures, strict=True))
                failed = {name: count for name, count in outcomes.items() if count}
                lines = [f"{'FAILS' if count else 'works'}  {name}" for name, count in outcomes.items()]
                found: dict[str, object] = {
                    "setting": title,
                    "checks": len(outcomes),
                    "failed_on_processes": failed,
                }
                text = "\n".join([f"thinwire check: {title}", *lines])
                if page is not None:
                    found["device"] = page.as_plain()
                    text += f"\n\n{page.as_markdown()}"
                print(json.dumps(found) if as_json else text, flush=True)
        finally:
            # The others wait until all is printed: a launcher ends every process once one has failed.
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
        # Of any kind: the checks to come are made all the same, so that the processes stay together.
        bench.findings.append(f"{type(error).__name__}: {error}")
    for found in bench.findings:
        # At once: if a later check hangs, this may be why.
        print(f"thinwire: process {bench.transport.rank}: {name}: {found}", file=sys.stderr, flush=True)
    return not bench.findings
