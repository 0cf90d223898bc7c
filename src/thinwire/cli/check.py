"""The `thinwire check` command: print what the checks find."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape

from thinwire.channel import gather_numbers
from thinwire.cli.common import BACKEND, PROCESSES, joined_job, run_here, tell_without_numba
from thinwire.errors import ConfigError
from thinwire.selfcheck.checks import CHECKS, Bench
from thinwire.selfcheck.device import DevicePage, measure, new_page, printed_once

# A collective that some process does not make ends the check.
TIMEOUT_SECONDS = 60.0

# Parts of the page, and steps within them, begin within the first; what there is of it is printed after the
# second, and whatever hangs ends with its process after the third.
PAGE_SECONDS, PRINT_SECONDS, END_SECONDS = 200.0, 265.0, 270.0


def check(
    *,
    backend: str | None = BACKEND,
    processes: int | None = PROCESSES,
    as_json: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
    device: str | None = typer.Option(
        None,
        metavar="cpu|cuda",
        help="Also measure this device, on GPT-2 small, and print a page in Markdown and JSON.",
        show_default="only check",
    ),
) -> None:
    """Check that Thinwire works on the processes, the backend and the devices of a job, in under a minute.

    Start it on every process, as you start the training; or, on one machine without a job, with
    `--processes`. The first time on a machine it may take a minute longer, because kernels are compiled. With
    `--device` it takes at most five minutes, and needs no job; it prints its page even if something fails or
    hangs, and says what was not run and why. The exit code is 1 if something does not work.

    Example: `torchrun --nproc-per-node 2 --no-python thinwire check`

    Example: `thinwire check --processes 2`

    Example: `thinwire check --device cuda`
    """
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if device is not None and "RANK" not in os.environ:
        processes = processes or 1  # who asks about a device need not have a job
    # Before a group is joined: in the process that starts the others it does not return.
    run_here(processes)
    page = None if device is None else new_page(device)
    report = _Report(as_json, page, prints=os.environ.get("RANK", "0") == "0")
    printing: AbstractContextManager[Callable[[], None] | None] = nullcontext()
    if page is not None:
        # A thread in C does it: what waits for a device that hangs never comes back to Python.
        faulthandler.dump_traceback_later(END_SECONDS, exit=True)
        if report.prints:
            printing = printed_once(page, report.rendered, within_seconds=PRINT_SECONDS)
    with printing as print_page, joined_job("check", backend, timeout_seconds=TIMEOUT_SECONDS) as own_device:
        if device not in (None, own_device.type):
            raise ConfigError(_unlike(own_device.type, str(device)))
        report.fill(Bench(own_device), print_page)
    faulthandler.cancel_dump_traceback_later()
    if report.prints:
        tell_without_numba()
    if any(report.failures.values()) or not (page is None or page.is_whole):
        raise typer.Exit(1)


def _unlike(own: str, asked: str) -> str:
    why = "--backend gloo runs on the CPU, and without it a job runs on the GPU where torch finds one"
    if asked == "cuda" and not torch.cuda.is_available():
        is_built = torch.version.cuda or torch.version.hip
        why = "torch finds no GPU here" if is_built else "torch is built without CUDA here"
    return f"the job's device is {own}, got --device {asked}; {why}"


@dataclass
class _Report:
    """What was found, and whether and how this process prints it."""

    as_json: bool
    page: DevicePage | None
    prints: bool
    start: float = field(default_factory=time.monotonic)
    title: str = "no group was joined"
    failures: dict[str, int] = field(default_factory=dict)  # by check, on how many processes

    def rendered(self) -> str:
        """Return what is printed last: the page, and with JSON all of it."""
        if self.page is not None and not self.as_json:
            return f"\n{self.page.as_markdown()}\n\n```json\n{json.dumps(asdict(self.page))}\n```"
        found: dict[str, object] = {
            "setting": self.title,
            "checks": len(self.failures),
            "failed_on_processes": {name: count for name, count in self.failures.items() if count},
        }
        return json.dumps(found if self.page is None else {**found, "device": asdict(self.page)})

    def fill(self, bench: Bench, print_page: Callable[[], None] | None) -> None:
        """Find and print all. Collective."""
        self.failures = _failures(bench, Console(stderr=True, quiet=self.as_json or not self.prints))
        seconds = time.monotonic() - self.start
        self.title = f"{bench.transport.size} processes, "
        if bench.machines is not None:
            self.title += f"{bench.machines.between.size} machines of {bench.machines.inside.size}, "
        self.title += f"{dist.get_backend()}, {bench.device.type}, {seconds:.1f} s"
        try:
            if self.prints and not self.as_json:
                lines = [f"{'FAILS' if count else 'works'}  {name}" for name, count in self.failures.items()]
                # Before the page: if the device hangs there, this is what is known of it.
                print("\n".join([f"thinwire check: {self.title}", *lines]), flush=True)
            if self.page is not None:
                left, tell = PAGE_SECONDS - seconds, partial(_say, bench)
                measure(self.page, bench.device, bench.transport, within_seconds=left, tell=tell)
            if print_page is not None:
                print_page()
            elif self.prints and self.as_json:
                print(self.rendered(), flush=True)
        finally:
            # The others wait until all is printed: a launcher ends every process once one has failed.
            gather_numbers([0.0], bench.transport, "waiting until all is printed")


def _failures(bench: Bench, console: Console) -> dict[str, int]:
    """Return by check on how many processes it fails, the same on all. Collective."""
    fails = []
    with console.status("") as status:
        # One after the other, in the same order on all: each check makes collectives.
        for number, (name, run) in enumerate(CHECKS.items(), start=1):
            status.update(escape(f"check {number} of {len(CHECKS)}: {name}"))
            bench.findings.clear()
            try:
                run(bench)
            except Exception as error:
                # Any error: the checks to come are made all the same, so that the processes stay together.
                bench.findings.append(f"{type(error).__name__}: {error}")
            for found in bench.findings:
                # At once: if a later check hangs, this may be why.
                _say(bench, f"{name}: {found}")
            fails.append(float(bool(bench.findings)))
    # A check may fail on some processes only; all end with the same exit code.
    everyone = gather_numbers(fails, bench.transport, "the outcomes")
    return dict(zip(CHECKS, (round(sum(each)) for each in zip(*everyone, strict=True)), strict=True))


def _say(bench: Bench, what: str) -> None:
    print(f"thinwire: process {bench.transport.rank}: {what}", file=sys.stderr, flush=True)
