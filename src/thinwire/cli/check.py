"""The `thinwire check` command: print what the checks find."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape

from thinwire.channel import gather_numbers
from thinwire.cli.common import Processes, joined_job, run_here, tell_without_numba
from thinwire.errors import ConfigError
from thinwire.selfcheck.checks import CHECKS, Bench, Check
from thinwire.selfcheck.device import measure, new_page
from thinwire.selfcheck.page import DevicePage, KeptPage

# A collective that some process does not make ends the check.
TIMEOUT_SECONDS = 60.0

# Parts of the page, and steps within them, begin within the first; what there is of it is printed after the
# second, and whatever hangs ends with its process after the third.
PAGE_SECONDS, KEPT_SECONDS, END_SECONDS = 200.0, 265.0, 270.0
PLAIN_EVERY_SECONDS = 10.0


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
            help="Measure the job's device as well, on GPT-2 small: a page in Markdown and JSON.",
            show_default="only check",
        ),
    ] = None,
) -> None:
    """Check that Thinwire works on the processes, the backend and the devices of a job, in under a minute.

    It may take another one on a machine that has never run it: kernels are compiled there once. To be
    started on every process, as the training is; or with `--processes`, which needs no job. With
    `--device` it takes at most five minutes, and outside of a job it is one process; its page is printed
    whatever fails or hangs, and says what was not run and why. The exit code is 1 if something does not work.

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
    report = _Report(as_json, None if device is None else new_page(device))
    with (
        _ended_in_time(limited=device is not None),
        report.kept() as kept,
        joined_job("check", backend, timeout_seconds=TIMEOUT_SECONDS) as own_device,
    ):
        if device not in (None, own_device.type):
            raise ConfigError(_unlike(own_device.type, str(device)))
        works = _checked_and_printed(Bench(own_device), report, kept)
    if os.environ.get("RANK", "0") == "0":
        tell_without_numba()
    if not works:
        raise typer.Exit(1)


def _unlike(own: str, asked: str) -> str:
    why = "--backend gloo runs on the CPU, and without it a job runs on the GPU where torch finds one"
    if asked == "cuda" and not torch.cuda.is_available():
        is_built = torch.version.cuda or torch.version.hip
        why = "torch finds no GPU here" if is_built else "torch is built without CUDA here"
    return f"the job's device is {own}, got --device {asked}; {why}"


@dataclass
class _Report:
    """What was found, and how the first process prints it.

    Attributes:
        as_json: Whether as JSON.
        page: About the device; None if nobody asked for one.
        title: The setting of the checks.
        failures: By check, on how many processes it fails.
    """

    as_json: bool
    page: DevicePage | None
    title: str = "no group was joined"
    failures: dict[str, int] = field(default_factory=dict)

    def rendered(self, page: DevicePage | None) -> str:
        """Return what is printed last: the page, and with JSON all of it."""
        if page is not None and not self.as_json:
            return f"\n{page.as_markdown()}\n\n```json\n{json.dumps(page.as_plain())}\n```"
        found: dict[str, object] = {
            "setting": self.title,
            "checks": len(self.failures),
            "failed_on_processes": {name: count for name, count in self.failures.items() if count},
        }
        return json.dumps(found if page is None else {**found, "device": page.as_plain()})

    def kept(self) -> AbstractContextManager[KeptPage | None]:
        """Return what holds the page until it is printed; it yields None where this process prints none."""
        if self.page is None or os.environ.get("RANK", "0") != "0":
            return nullcontext()
        return KeptPage(self.page, self.rendered, within_seconds=KEPT_SECONDS)


def _checked_and_printed(bench: Bench, report: _Report, kept: KeptPage | None) -> bool:
    """Return whether all is well, after the first process has printed what was found. Collective."""
    start = time.monotonic()
    own = {}
    # Progress goes where output that is parsed does not.
    console = Console(stderr=True, quiet=report.as_json or bench.transport.rank != 0)
    with shown_checks(console, len(CHECKS)) as show_check:
        # One after the other, in the same order on all: each check makes collectives.
        for name, run in CHECKS.items():
            show_check(name)
            own[name] = _outcome(name, run, bench)
    report.title = f"{bench.transport.size} processes, "
    if bench.machines is not None:
        report.title += f"{bench.machines.between.size} machines of {bench.machines.inside.size}, "
    report.title += f"{dist.get_backend()}, {bench.device.type}"
    report.title += f", {time.monotonic() - start:.1f} s"
    # A check may fail on some processes only; all end with the same exit code.
    everyone = gather_numbers([float(not works) for works in own.values()], bench.transport, "the outcomes")
    failures = [round(sum(of_check)) for of_check in zip(*everyone, strict=True)]
    report.failures = dict(zip(own, failures, strict=True))
    prints, page = bench.transport.rank == 0, report.page
    try:
        if prints and not report.as_json:
            lines = [f"{'FAILS' if count else 'works'}  {name}" for name, count in report.failures.items()]
            # Before the page: if the device hangs there, this is what is known of it.
            print("\n".join([f"thinwire check: {report.title}", *lines]), flush=True)
        if page is not None:
            measure(
                page,
                bench.device,
                bench.transport,
                within_seconds=PAGE_SECONDS - (time.monotonic() - start),
                tell=lambda doing: _say(bench, doing),
            )
        if kept is not None:
            kept.print()
        elif prints and report.as_json:
            print(report.rendered(None), flush=True)
    finally:
        # The others wait until all is printed: a launcher ends every process once one has failed.
        gather_numbers([0.0], bench.transport, "waiting until all is printed")
    return not any(failures) and (page is None or page.is_whole)


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
    """Return whether a check holds on this process; print what it finds, errors of any kind too, at once."""
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


@contextmanager
def shown_checks(
    console: Console, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], None]]:
    """Show which check is under way, and the time left; in a pipe a line at most every 10 s."""
    begun = shown = clock()
    done = 0

    def show(name: str) -> None:
        nonlocal shown, done
        now = clock()
        left = f"about {(now - begun) / done * (total - done):.0f} s left" if done else "under a minute left"
        done += 1
        line = f"check {done} of {total}, {left}: {name}"
        status.update(escape(line))
        if not console.is_terminal and now - shown >= PLAIN_EVERY_SECONDS:
            shown = now
            console.print(f"thinwire: {line}", soft_wrap=True, highlight=False, markup=False)

    with console.status("") as status:
        yield show
