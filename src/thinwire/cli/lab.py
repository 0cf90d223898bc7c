"""The `thinwire lab` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from thinwire.checks import number, processes_here
from thinwire.cli.job import check_output, write_output
from thinwire.errors import ConfigError
from thinwire.lab import LinkSpec, Network, check_machine
from thinwire.launch import Job, Output, Process


def lab(
    command: list[str] = typer.Argument(metavar="-- COMMAND…", help="What to run in every process."),
    *,
    machines: int = typer.Option(2, help="The number of machines."),
    rate: str | None = typer.Option(
        None, metavar="RATE", help="Rate of each slow link, such as 100mbit.", show_default="as fast as here"
    ),
    processes_per_machine: int = typer.Option(1, help="Processes per machine, which share its slow link."),
    latency: str = typer.Option("0ms", metavar="TIME", help="Round trip between two machines, such as 20ms."),
    jitter: str = typer.Option("0ms", metavar="TIME", help="Variation of the round trip, such as 2ms."),
    loss: str = typer.Option("0%", metavar="SHARE", help="Packets lost each way, such as 0.1%."),
    slow_machine: list[str] | None = typer.Option(
        None, metavar="M:RATE", help="The rate of machine M (from 0), such as 2:10mbit; may be repeated."
    ),
    grace_seconds: float = typer.Option(
        30.0, help="Seconds that the others may continue after one has failed, before they are asked to end."
    ),
    report: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="JSON of the exit code, seconds of each process and bytes of each machine.",
    ),
) -> None:
    """Run a training script on several machines with slow links, all on this computer.

    Each machine is a network namespace with its own address, and sends no faster than `--rate`. With latency,
    jitter or loss the link is measured first, and refused if it is more than a tenth from what you asked for.
    Each process has torchrun's environment variables (RANK, WORLD_SIZE, MASTER_ADDR …), and
    Gloo uses the slow link.

    Example: `thinwire lab --machines 4 --rate 100mbit --latency 20ms -- python train.py --epochs 1`

    Needs Linux, iproute2 and util-linux, and root or unprivileged user namespaces. The machines share the
    processors of this computer: compare runs with each other, not with a real cluster.
    """
    rates = {}
    for option in slow_machine or []:
        number_text, _, slow_rate = option.partition(":")
        if not number_text.isdecimal() or not slow_rate:
            raise ConfigError(
                f"--slow-machine must be a machine and its rate, such as 2:10mbit; got {option[:40]!r}"
            )
        rates[int(number_text)] = slow_rate
    link = LinkSpec(rate, latency, jitter, loss)
    network = Network(machines, link, processes_per_machine=processes_per_machine, slow_machines=rates)
    name = "machines" if processes_per_machine == 1 else "machines × processes_per_machine"
    processes_here(name, network.processes, minimum=1)
    number("grace_seconds", grace_seconds, minimum=0)
    # First: a missing tool or folder should not be found half-way.
    check_machine()
    check_output("--report", report)
    # Bytes: processes may print anything, not only text.
    output = Output(sys.stdout.buffer)

    def start(rank: int) -> Process:
        # Unbuffered, to show lines as soon as they are printed.
        variables = {"PYTHONUNBUFFERED": "1", **network.environment(rank)}
        machine, local_rank = divmod(rank, processes_per_machine)
        prefix = f"machine {machine:>{len(str(machines - 1))}}"
        prefix += f", process {local_rank}" if processes_per_machine > 1 else ""
        contained = network.contained_command(machine, *command)
        return Process(contained, variables, output, f"[{prefix}] ", as_group=True)

    job = Job(
        start,
        network.processes,
        output=output,
        grace_seconds=grace_seconds,
        end_within_seconds=grace_seconds,
        passes_signals_on=True,
    )
    with network:
        if network.has_relay and machines > 1:
            print(f"thinwire lab: {network.check_link()}", file=sys.stderr)
        job.run()
        # Before the network is closed, and its counters with it.
        sent_bytes = [network.sent_bytes(machine) for machine in range(machines)]
    seconds = [process.seconds or 0.0 for process in job.processes]
    if report is not None:
        outcome = {"exit_code": job.exit_code, "seconds": seconds, "sent_bytes": sent_bytes}
        write_output(report, json.dumps(outcome) + "\n")
    # If the output can't be written, `main` reports it.
    for machine, sent in enumerate(sent_bytes if output.error is None else []):
        first = machine * processes_per_machine
        took = max(seconds[first : first + processes_per_machine])
        # To stderr: stdout belongs to the processes, and may be parsed.
        print(f"thinwire lab: machine {machine} sent {sent / 1e6:.3f} MB in {took:.1f} s", file=sys.stderr)
    # The processes' own exit code, as with torchrun.
    raise typer.Exit(job.exit_code)
