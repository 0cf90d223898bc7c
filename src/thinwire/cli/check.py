"""The `thinwire check` command: print the results of the checks."""

from __future__ import annotations

import json
import os
import platform

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape

from thinwire.cli.job import BACKEND, PROCESSES, joined_job, run_here, tell_without_numba
from thinwire.comm import gather_numbers
from thinwire.errors import ConfigError
from thinwire.kernels.triton import limits
from thinwire.selfcheck.device import COST_WITHOUT_TRITON, Row, gpt2_small, measure
from thinwire.selfcheck.training_checks import CHECKS, CheckContext
from thinwire.version import __version__

# A collective in which some process does not take part ends the check after this time.
TIMEOUT_SECONDS = 60.0


def check(
    *,
    backend: str | None = BACKEND,
    processes: int | None = PROCESSES,
    as_json: bool = typer.Option(False, "--json", help="Print the outcome as JSON."),
    device: str | None = typer.Option(
        None,
        metavar="cpu|cuda",
        help="Also measure this device, on GPT-2 small, and print tables in Markdown.",
        show_default="only check",
    ),
) -> None:
    """Check that Thinwire works on the processes, the backend and the devices of a job, in under a minute.

    Start it on every process, as you start the training; or, on one machine without a job, with
    `--processes`. The first time on a machine it may take a minute longer, because kernels are compiled.
    `--device` needs no job and takes some minutes; it also prints which kernels serve the device. The exit
    code is 1 if something does not work.

    Example: `torchrun --nproc-per-node 2 --no-python thinwire check`

    Example: `thinwire check --processes 2`

    Example: `thinwire check --device cuda`
    """
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda found no GPU: {_why_no_gpu()}; Thinwire then uses the CPU, which takes many "
            "times as long: measure it with --device cpu"
        )
    if device is not None and "RANK" not in os.environ:
        processes = processes or 1  # measuring a device needs no job
    # Before joining a group: in the process that starts the others, this does not return.
    run_here(processes)
    with joined_job("check", backend, timeout_seconds=TIMEOUT_SECONDS) as job_device:
        if device not in (None, job_device.type):
            instead = "leave out --backend gloo" if device == "cuda" else "give --backend gloo"
            raise ConfigError(f"the job's device is {job_device.type}, got --device {device}; {instead}")
        is_well = _print_all(CheckContext(job_device), as_json=as_json, with_device=device is not None)
        if dist.get_rank() == 0:
            tell_without_numba()
    if not is_well:
        raise typer.Exit(1)


def _print_all(context: CheckContext, *, as_json: bool, with_device: bool) -> bool:
    """Check, measure and print, on the first process; return whether all is well on this one. Collective."""
    prints = context.transport.rank == 0
    failures = _failures(context, Console(stderr=True, quiet=as_json or not prints))
    machines, on = context.machines, ""
    if machines is not None:
        on = f"{machines.inter_node.size} machines of {machines.intra_node.size}, "
    title = f"{context.transport.size} processes, {on}{dist.get_backend()}, {context.device.type}"
    try:
        if prints and not as_json:
            lines = [f"{'FAILS' if count else 'works'}  {name}" for name, count in failures.items()]
            # Before measuring the device: if that hangs, this has been printed.
            print("\n".join([f"thinwire check: {title}", *lines]), flush=True)
        page = measure(context, gpt2_small()) if with_device else {}
        if prints and as_json:
            failed = {name: count for name, count in failures.items() if count}
            outcome = {"setting": title, "checks": len(failures), "failed_on_processes": failed}
            device = {"device": {"served by": _served_by(context.device), **page}} if page else {}
            print(json.dumps({**outcome, **device}), flush=True)
        elif prints and page:
            print(f"\n- {_served_by(context.device)}\n{_tables(page)}", flush=True)
    finally:
        # Wait until all is printed: a launcher ends every process once one has failed.
        gather_numbers([0.0], context.transport, "waiting until all is printed")
    return not (any(failures.values()) or page.get("failures"))


def _why_no_gpu() -> str:
    """Return torch's reason: no driver, an old one, or torch built without CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return str(error).partition(". ")[0].strip()
    return "torch sees none"


def _served_by(device: torch.device) -> str:
    """Return a device's name and versions, and why it uses slower kernels than Triton's, if it does."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "a CPU"
    versions = f"thinwire {__version__}, torch {torch.__version__}, Triton {limits.installed() or 'none'}"
    why = limits.why_not(device) if is_cuda else ""
    return f"{name}: {versions}" + (
        f"; {why}: PyTorch's kernels are used, {COST_WITHOUT_TRITON}" if why else ""
    )


def _tables(page: dict[str, list[Row]]) -> str:
    """Return tables in Markdown, to paste into an issue."""

    def cell(value: str | float) -> str:
        if isinstance(value, str):
            return value
        return f"{value:,.2f}" if value > 0.01 else f"{value:.1e}"  # milliseconds or copies, or an error

    lines = []
    for rows in filter(None, page.values()):
        table = [list(rows[0]), ["---"] * len(rows[0]), *(map(cell, row.values()) for row in rows)]
        lines += ["", *(f"| {' | '.join(line)} |" for line in table)]
    return "\n".join(lines)


def _failures(context: CheckContext, console: Console) -> dict[str, int]:
    """Return for each check the number of processes on which it fails, the same on all. Collective."""
    fails = []
    with console.status("") as status:
        # In the same order on all processes: each check makes collectives.
        for number, (name, run) in enumerate(CHECKS.items(), start=1):
            status.update(escape(f"check {number} of {len(CHECKS)}: {name}"))
            context.findings.clear()
            try:
                run(context)
            except Exception as error:
                # Any error: continue with the other checks, so that the processes stay together.
                context.findings.append(f"{type(error).__name__}: {error}")
            for finding in context.findings:
                # Print now: if a later check hangs, this may be why.
                context.say(f"{name}: {finding}")
            fails.append(float(bool(context.findings)))
    # A check may fail on some processes only; all end with the same exit code.
    everyone = gather_numbers(fails, context.transport, "the outcomes")
    return {name: round(sum(column)) for name, *column in zip(CHECKS, *everyone, strict=True)}
