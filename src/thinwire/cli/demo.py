"""The `thinwire demo` command: it starts the training processes, follows their records, and compares them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.common import exit_if_stopped, tell_without_numba
from thinwire.cli.report import write_report
from thinwire.demo.model import GPT, SIZES
from thinwire.demo.train import ALGORITHMS, LINES, DemoOptions
from thinwire.elastic_job import ElasticJob
from thinwire.errors import ConfigError, ThinwireError
from thinwire.launch import LocalJob
from thinwire.local_sgd.groups.torchft_client import torchft_module
from thinwire.watch import read_run

ELASTIC_MEMBERS, ELASTIC_SIZE = 3, "tiny"
NAMES, USUAL_NAMES = ", ".join(ALGORITHMS), ", ".join(DemoOptions.algorithms)


class JobError(ThinwireError, RuntimeError):
    """The training job failed; the message says where its log is."""


def demo(
    *,
    elastic: bool = typer.Option(
        False, "--elastic", help="Show members that come and go, with DiLoCo: one is killed, and one joins."
    ),
    processes: int | None = typer.Option(
        None,
        help="Training processes on this machine.",
        show_default=f"{DemoOptions.processes}; with --elastic, {ELASTIC_MEMBERS}",
    ),
    steps: int = typer.Option(DemoOptions.steps, help="Training steps of each algorithm."),
    algorithm: list[str] | None = typer.Option(
        None,
        metavar="NAME",
        help=f"One of {NAMES}; repeat the option to compare.",
        show_default=USUAL_NAMES,
    ),
    matrix_rank: int = typer.Option(
        DemoOptions.matrix_rank, help="Matrix rank of PowerSGD: a higher one sends more bytes, more exactly."
    ),
    model_size: str | None = typer.Option(
        None,
        metavar="NAME",
        help="One of tiny, small, medium; medium, of 10.9 M parameters, is 5 times slower.",
        show_default=f"{DemoOptions.model_size}; with --elastic, {ELASTIC_SIZE}",
    ),
    seed: int = typer.Option(DemoOptions.seed, help="Seed of the initial model and the batches."),
    output: Path = typer.Option(
        DemoOptions.output, help="Folder for the records, one line of JSON for each step, and the log."
    ),
) -> None:
    """Train a small GPT on Python's own standard library, once per algorithm, and compare them.

    Every algorithm starts from the same model and sees the same batches. The training processes run on this
    machine and exchange gradients with Gloo over its loopback interface. At the end, a page of HTML compares
    them.

    With `--elastic`, members train with DiLoCo instead; one is killed and one joins while you look, and the
    others go on.

    Example: `thinwire demo --steps 100 --algorithm exact --algorithm powersgd`
    """
    if elastic and algorithm:
        raise ConfigError("--elastic trains with DiLoCo in 4 bits; leave --algorithm out")
    if elastic:
        torchft_module("torchft")  # before anything is announced that would not come
    # Checks everything, before anything starts.
    usual_processes = ELASTIC_MEMBERS if elastic else DemoOptions.processes
    options = DemoOptions(
        processes=usual_processes if processes is None else processes,
        steps=steps,
        algorithms=algorithm or DemoOptions.algorithms,
        matrix_rank=matrix_rank,
        model_size=model_size or (ELASTIC_SIZE if elastic else DemoOptions.model_size),
        seed=seed,
        output=output,
    )
    output.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    paths = (run_elastic if elastic else run_algorithms)(options, console)
    # From the files, as the user can do again with other runs beside them.
    write_report(paths, page := output / "report.html")
    console.print(f"Compared at length: {page}")
    tell_without_numba()


def run_algorithms(options: DemoOptions, console: Console) -> list[Path]:
    """Train with every algorithm, and print the table; return the records."""
    paths = [options.record_path(name) for name in options.algorithms]
    for path in paths:
        path.unlink(missing_ok=True)  # a watch goes on in a file that is there, as after a resume
    log_path = Path(options.output, "processes.log")
    parameters = sum(parameter.numel() for parameter in GPT(SIZES[options.model_size]).parameters())
    # Before processes start, which takes seconds.
    console.print(
        f"Training a byte-level GPT of {parameters / 1e6:.1f} M parameters on Python's standard library: "
        f"{options.processes} processes, {options.steps} steps with each of {', '.join(options.algorithms)}."
    )
    with log_path.open("wb") as log:
        job = LocalJob(options.command(), options.processes, errors=log)
        exit_if_stopped(job.run())
    if job.failure is not None:
        raise JobError(f"the training job failed: {job.failure}; see {log_path}")
    from thinwire.watch.report import summary  # noqa: PLC0415 - slow to import

    table = Table("", title="The same training, once per algorithm")
    columns = [summary(read_run(path), ["heldout_loss"]) for path in paths]
    for column in columns:
        table.add_column(column["run"], justify="right")
    for label in list(columns[0])[2:]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table, f"Every step is a line of {options.output}/*.jsonl", sep="\n")
    return paths


def run_elastic(options: DemoOptions, console: Console) -> list[Path]:
    """Train with DiLoCo; kill one of all members after a quarter of the steps, and let a new one join.

    Returns the records of the members, in the order in which they were started.
    """
    output, members = Path(options.output), options.processes
    log_path = output / "members.log"
    for path in [options.may_join, *output.glob("member-*.jsonl")]:
        path.unlink(missing_ok=True)  # a watch goes on in a file that is there, as after a resume
    training = f"{members} members train a byte-level GPT with DiLoCo, {options.steps} steps"
    console.print(f"{training}; one will be killed, and one will join.")
    with log_path.open("wb") as log:
        # No one is started again, and those who are left go on: the scene says when the last one joins.
        job = ElasticJob(options.command(), members + 1, min_members=members - 1, max_restarts=0, out=log)
        play = scene(options, job, console.print)
        exit_if_stopped(job.run(lambda: next(play)))
    if job.exit_code:
        raise JobError(f"too few members came to the end; see {log_path}")
    runs = [read_run(path) for path in sorted(output.glob("member-*.jsonl"))]
    checksums = [point.value for run in runs for point in run.points("checksum")]
    if len(set(checksums)) != 1:
        ended = f"all members must end with one model, and have ended with {len(set(checksums))}"
        raise JobError(f"{ended}; see {log_path}")
    console.print(f"in the end {len(checksums)} members hold one model, the same to the bit")
    # None of one that came too late to take part.
    return [run.path for run in runs if run.points("loss")]


def scene(options: DemoOptions, job: ElasticJob, say: Callable[[str], None]) -> Iterator[None]:
    """Read the first member's records again and again, and act on them: each `next` is one look.

    One member is killed, and when the others have averaged without it, the last one may join.
    """
    killed, joining, path = options.processes - 1, options.processes, options.record_path(0)
    now = {"step": 0.0, "members": 0.0, "losses": 0.0, "joins": 0.0}
    num_read, has_joined = 0, False

    def look() -> None:
        nonlocal num_read
        logs = read_run(path).logs if path.exists() and path.stat().st_size else []
        for log in logs[num_read:]:
            now.update(log)
            if "heldout_loss" in log:
                say(f"held-out loss {log['heldout_loss']:.3f} nats/byte")
                if not has_joined:
                    job.processes[joining].send(signal.SIGKILL)  # it would wait for others that do not come
            elif "loss" in log and log["step"] % max(1, options.steps // LINES) == 0:
                members = f"{now['members']:.0f} members"
                say(f"step {log['step']}/{options.steps}, {members}: loss {log['loss']:.3f}")
        num_read = len(logs)

    def wait_until(comes: Callable[[], bool]) -> Iterator[None]:
        look()
        while not comes():
            yield
            look()

    yield from wait_until(lambda: now["step"] >= options.steps // 4 and now["members"] == options.processes)
    job.processes[killed].send(signal.SIGKILL)
    say(f"step {now['step']:.0f}: member {killed} is killed (SIGKILL)")
    yield from wait_until(lambda: now["losses"] > 0)
    joins_before = now["joins"]  # those of the beginning may find each other one by one
    options.may_join.touch()
    left = f"the other {now['members']:.0f} have averaged without it; lost are its last steps"
    say(f"step {now['step']:.0f}: {left}; member {joining}, which was waiting, joins")
    yield from wait_until(lambda: now["joins"] > joins_before)
    has_joined = True
    members = f"{now['members']:.0f} members"
    say(f"step {now['step']:.0f}: it has taken the others' model and trains on: {members}")
    yield from wait_until(lambda: False)
