"""The `thinwire check` command: print what the checks find."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

# Parts of the page begin within these; and then, whatever hangs, the process ends.
PAGE_SECONDS, END_SECONDS = 200.0, 290.0


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

    To be started on every process, as the training is; or with `--processes`, which needs no job. With
    `--device` it takes at most five minutes, and outside of a job it is one process. The exit code is 1 if
    something does not work.

    Example: `torchrun --nproc-per-node 2 --no-python thinwire check`

    Example: `thinwire check --processes 2`

    Example: `thinwire check --device cuda`
    """
    if device is not None and "RANK" not in os.environ:
        processes = processes or 1  # who asks about a device need not have a job
    # Before a group is joined: in the process that starts the others it does not return.
    run_here(processes)
    with joined_job("check", backend, timeout_seconds=TIMEOUT_SECONDS) as own_device:
        if device not in (None, own_device.type):
            raise ConfigError(
                f"the job's device is {own_device.type}, got --device {device}; --backend gloo runs on the "
                "CPU, and without it a job runs on the GPU where torch finds one"
            )
        bench = Bench(own_device)
        with _ended_in_time(limited=device is not None):
            works = _checked_and_printed(bench, as_json=as_json, has_page=device is not None)
    if not works:
        raise typer.Exit(1)


def _checked_and_printed(bench: Bench, *, as_json: bool, has_page: bool) -> bool:
    """Return whether all is well, after the first process has printed what was found. Collective.

    Args:
        bench: The processes.
        as_json: Whether to print JSON.
        has_page: Whether to measure the device as well.
    """
    start = time.monotonic()
    # One after the other, in the same order on all: each check makes collectives.
    own = {name: _outcome(name, run, bench) for name, run in CHECKS.items()}
    title = f"{bench.transport.size} processes, {dist.get_backend()}, {bench.device.type}"
    title += f", {time.monotonic() - start:.1f} s"
    # A check may fail on some processes only; all end with the same exit code.
    everyone = gather_numbers([float(not works) for works in own.values()], bench.transport, "the outcomes")
    failures = [round(sum(of_check)) for of_check in zip(*everyone, strict=True)]
    outcomes = dict(zip(own, failures, strict=True))
    prints, page = bench.transport.rank == 0, None
    try:
        if prints and not as_json:
            lines = [f"{'FAILS' if count else 'works'}  {name}" for name, count in outcomes.items()]
            # Before the page: if the device hangs there, this is what is known of it.
            print("\n".join([f"thinwire check: {title}", *lines]), flush=True)
        if has_page:
            page = measured(
                bench.device,
                bench.transport,
                within_seconds=PAGE_SECONDS - (time.monotonic() - start),
                tell=lambda doing: _say(bench, doing),
            )
        if prints and as_json:
            found: dict[str, object] = {
                "setting": title,
                "checks": len(outcomes),
                "failed_on_processes": {name: count for name, count in outcomes.items() if count},
            }
            print(json.dumps(found if page is None else {**found, "device": page.as_plain()}), flush=True)
        elif prints and page is not None:
            print(f"\n{page.as_markdown()}", flush=True)
    finally:
        # The others wait until all is printed: a launcher ends every process once one has failed.
        gather_numbers([0.0], bench.transport, "waiting until all is printed")
    return not any(failures) and (page is None or not page.failures)


@contextmanager
def _ended_in_time(*, limited: bool) -> Iterator[None]:
    """End this process with exit code 1, and say where it stood, if what is done within takes too long."""
    if not limited:
        yield
        return
    # By a thread in C: what waits for a device that hangs never comes back to Python.
    faulthandler.dump_traceback_later(END_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _say(bench: Bench, what: str) -> None:
    print(f"thinwire: process {bench.transport.rank}: {what}", file=sys.stderr, flush=True)


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
        _say(bench, f"{name}: {found}")
    return not bench.findings
