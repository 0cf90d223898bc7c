"""The `thinwire run` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from thinwire.checks import processes_here
from thinwire.elastic_job import ElasticJob
from thinwire.errors import ConfigError
from thinwire.local_sgd.groups.torchft_group import ASKED


def run(
    script: Path = typer.Argument(metavar="SCRIPT", help="A script with thinwire.elastic."),
    arguments: list[str] | None = typer.Argument(None, metavar="ARGUMENTS…", help="Arguments of the script."),
    *,
    minimum: int = typer.Option(
        1, "--min", metavar="N", help="Members that an averaging needs, on all machines together."
    ),
    maximum: int | None = typer.Option(
        None, "--max", metavar="N", help="Members to start.", show_default="as --min; with --lighthouse, 1"
    ),
    processes_per_member: int = typer.Option(
        1, metavar="N", help="Processes of each member, which train one DDP or FSDP2 model together."
    ),
    lighthouse: str | None = typer.Option(
        None, metavar="URL", help="One that runs, such as http://10.0.0.1:29510.", show_default="start one"
    ),
    host: str | None = typer.Option(
        None,
        help="The address at which members on other machines reach this one.",
        show_default="they can't join; with --lighthouse, this machine's name",
    ),
    port: int = typer.Option(0, help="Port of the lighthouse to start.", show_default="a free one"),
    max_restarts: int = typer.Option(3, help="How often a member that dies is restarted."),
    grace_seconds: float = typer.Option(
        30.0, help="Seconds to leave, after Ctrl-C, SIGTERM, or if others have finished and too few remain."
    ),
) -> None:
    """Start members that come and go: a script with `thinwire.elastic`, several times on this machine.

    Members find each other through a lighthouse. Without `--lighthouse` this command starts and ends one. A
    member that dies is restarted, and gets the model of the others. On Ctrl-C or SIGTERM all members leave
    cleanly; a second signal kills them. Each member's number on this machine, from 0, is in
    THINWIRE_MEMBER, and its lines begin with it, such as [1].

    With `--processes-per-member 2` each member is two processes, as if torchrun had started them, and their
    lines begin with [1.0] and [1.1]. If one of them dies, its member ends, and is restarted as a whole.

    The exit code is 0 if no member died for good, or if at least `--min` (with `--lighthouse`: one) ended
    well; otherwise that of the first that died for good (128 + the signal that ended it). It is 1 if no
    member has asked the lighthouse: an ordinary script would train one model per member.

    Example: `thinwire run --min 2 --max 8 train.py --epochs 1`
    """
    if not script.is_file():
        raise ConfigError(f"there is no script {script}; give the path of one that uses thinwire.elastic")
    members = maximum if maximum is not None else (minimum if lighthouse is None else 1)
    processes_here("min" if maximum is None else "max", members, minimum=1)
    processes_here("processes-per-member", processes_per_member, minimum=1)
    job = ElasticJob(
        [sys.executable, str(script), *(arguments or [])],
        members,
        processes_per_member=processes_per_member,
        min_members=minimum,
        lighthouse=lighthouse,
        host=host,
        port=port,
        max_restarts=max_restarts,
        end_within_seconds=grace_seconds,
        say=_say,
        out=sys.stdout.buffer,
    )
    with TemporaryDirectory(prefix="thinwire-run-") as folder:
        os.environ[ASKED] = folder
        job.run()
        has_asked = any(Path(folder).iterdir())
    if job.exit_code == 0 and not has_asked:
        processes = members * processes_per_member
        start = " ".join(["torchrun", "--nproc-per-node", str(processes), str(script), *(arguments or [])])
        _say(
            f"no member contacted the lighthouse, so nothing was averaged: {script} does not use "
            "thinwire.elastic. Wrap its training loop in thinwire.elastic.DiLoCo; or, if it averages in a "
            f"process group, run {start}"
        )
        raise typer.Exit(1)
    raise typer.Exit(job.exit_code)


def _say(line: str) -> None:
    # To stderr: stdout belongs to the members, and may be parsed.
    print(f"thinwire run: {line}", file=sys.stderr, flush=True)
