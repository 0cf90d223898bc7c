"""The `thinwire demo` command: it starts the training processes, follows their records, and compares them."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median

import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.common import exit_if_stopped, tell_without_numba
from thinwire.cli.report import write_report
from thinwire.demo.model import GPT, SIZES
from thinwire.demo.train import ALGORITHMS, AVERAGED_EVERY_STEPS, LINES, DemoOptions
from thinwire.errors import ConfigError, ThinwireError
from thinwire.launch import ElasticJob, LocalJob
from thinwire.localsgd.members.torchft_group import torchft_module
from thinwire.plan import compression_ratio
from thinwire.probe.result import ring_share
from thinwire.watch import Run, read_run
from thinwire.watch.records import Growing, Record

ELASTIC_MEMBERS, ELASTIC_SIZE = 3, "tiny"
NAMES, USUAL_NAMES = ", ".join(ALGORITHMS), ", ".join(DemoOptions.algorithms)
LINKS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
FOOTNOTE = (
    "* Computed, not measured: the step without its waiting, plus 2(N-1)/N of its bytes at that rate, as a "
    "ring all-reduce of N processes sends; without overlap, latency ignored."
)


class JobError(ThinwireError, RuntimeError):
    """The training job failed; the message says where its log is."""


def demo(
    *,
    elastic: bool = typer.Option(
        False, "--elastic", help="Members that come and go, with DiLoCo: one is killed, and one joins."
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
        DemoOptions.matrix_rank, help="Rank of the low-rank factors: more bytes, more exact."
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
    usual_processes, usual_size = DemoOptions.processes, DemoOptions.model_size
    if elastic:
        usual_processes, usual_size = ELASTIC_MEMBERS, ELASTIC_SIZE
        torchft_module("torchft")  # before anything is announced that would not come
    # Checks everything, before anything starts.
    options = DemoOptions(
        processes=usual_processes if processes is None else processes,
        steps=steps,
        algorithms=algorithm or DemoOptions.algorithms,
        matrix_rank=matrix_rank,
        model_size=usual_size if model_size is None else model_size,
        seed=seed,
        output=output,
    )
    output.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    paths = (run_elastic if elastic else run_each)(options, console)
    page = output / "report.html"
    # From the files, as the user can do again with other runs beside them.
    write_report(paths, page)
    console.print(f"Compared at length: {page}", soft_wrap=True)
    tell_without_numba()


def run_each(options: DemoOptions, console: Console) -> list[Path]:
    """Train with every algorithm, and print the table; return the records."""
    paths = [options.record_path(name) for name in options.algorithms]
    for path in paths:
        path.unlink(missing_ok=True)  # a watch goes on in a file that is there, as after a resume
    log_path = Path(options.output, "processes.log")
    # Not on torch's meta device: what that imports takes longer than the largest model.
    parameters = sum(parameter.numel() for parameter in GPT(SIZES[options.model_size]).parameters())
    # Before processes start, which takes seconds.
    console.print(
        f"Training a byte-level GPT of {parameters / 1e6:.1f} M parameters on Python's standard library: "
        f"{options.processes} processes, {options.steps} steps with each of {', '.join(options.algorithms)}.",
        soft_wrap=True,
    )
    with log_path.open("wb") as log:
        job = LocalJob(options.command(), options.processes, errors=log)
        received = job.run()
    exit_if_stopped(received)
    if job.failure is not None:
        raise JobError(f"the training job failed: {job.failure}; see {log_path}")
    console.print(summary_table(list(map(read_run, paths))))
    console.print(FOOTNOTE, f"Every step is a line of {options.output}/*.jsonl", sep="\n", soft_wrap=True)
    return paths


def summary_table(runs: Sequence[Run]) -> Table:
    """Return a table with a column for each algorithm and a row for each figure."""
    table = Table(title="The same training, once per algorithm")
    table.add_column("per step of process 0")
    for run in runs:
        table.add_column(run.name, justify="right")
    of_each = [figures(run) for run in runs]
    for label in of_each[0]:
        table.add_row(label, *(found[label] for found in of_each))
    return table


def figures(run: Run) -> dict[str, str]:
    """Return what one algorithm did, by what it is: medians over the steps of process 0, and mean bytes."""
    heldout = run.points("heldout_loss")
    # Of the differences: medians of two numbers do not subtract to the median of their difference.
    working = median(step["step_seconds"] - step["waiting_seconds"] for step in run.steps)
    # The mean: some algorithms send much in one step of several, and links carry the sum.
    message_bytes = fmean(step["message_bytes"] for step in run.steps)
    ratio = compression_ratio(fmean(step["gradient_bytes"] for step in run.steps), message_bytes)
    wire_bits = 8 * message_bytes * ring_share(run.processes)
    return {
        "held-out loss, nats/byte": f"{heldout[-1].value:.3f}" if heldout else "not finite",
        "ms (median)": f"{1e3 * median(step['step_seconds'] for step in run.steps):.1f}",
        "ms waiting (median)": f"{1e3 * median(step['waiting_seconds'] for step in run.steps):.1f}",
        "MB sent": f"{message_bytes / 1e6:.3f}",
        "compression ratio": f"{ratio:.1f}",
        **{f"ms at {link} *": f"{1e3 * (working + wire_bits / rate):.1f}" for link, rate in LINKS.items()},
    }


def run_elastic(options: DemoOptions, console: Console) -> list[Path]:
    """Train with DiLoCo; kill a member after a quarter of the steps; let a new one join when it was missed.

    Returns:
        The records of the members, in the order in which they were started.
    """
    output = Path(options.output)
    for path in [options.may_join, *output.glob("member-*.jsonl")]:
        path.unlink(missing_ok=True)  # a watch goes on in a file that is there, as after a resume
    file, log_path = Growing(options.record_path(0)), output / "members.log"
    console.print(
        f"{options.processes} members train a byte-level GPT with DiLoCo, {options.steps} steps; one will be "
        "killed, and one will join.",
        soft_wrap=True,
    )
    members = options.processes
    with log_path.open("wb") as log:
        # Nobody is started again, and those who are left go on: the scene says when the last one joins.
        job = ElasticJob(options.command(), members + 1, min_members=members - 1, max_restarts=0, out=log)
        scene = _Scene(options, job, lambda line: console.print(line, soft_wrap=True))

        def play_new() -> None:
            for record in file.new_records():
                scene.play(record)

        received = job.run(play_new)
    exit_if_stopped(received)
    if job.exit_code:
        raise JobError(f"too few members came to the end; see {log_path}")
    runs = [read_run(path) for path in sorted(output.glob("member-*.jsonl"))]
    held = [point.value for run in runs for point in run.points("checksum")]
    if len(set(held)) != 1:
        raise JobError(
            f"all members must end with one model, and have ended with {len(set(held))}; see {log_path}"
        )
    console.print(f"in the end {len(held)} members hold one model, the same to the bit", soft_wrap=True)
    # None of one that came too late to take part.
    return [run.path for run in runs if run.points("loss")]


class _Scene:
    """What is done to the members, and what the first one's records tell of it."""

    def __init__(self, options: DemoOptions, job: ElasticJob, say: Callable[[str], None]) -> None:
        self._options, self._job, self._say = options, job, say
        self._is_killed = self._has_joined = False
        self._struck_at = 0.0
        self._losses = deque[float](maxlen=AVERAGED_EVERY_STEPS)
        self._seen: Record = {"members": 0, "losses": 0, "joins": 0}

    def play(self, record: Record) -> None:
        """Tell what a record says, and strike if it is time; nobody is struck once all have ended."""
        if record["kind"] != "log":
            return
        options, job, step = self._options, self._job, record["step"]
        killed, joining = options.processes - 1, options.processes
        if "members" in record:
            self._tell_changes(record)
        if "heldout_loss" in record:
            self._say(f"held-out loss {record['heldout_loss']:.3f} nats/byte")
            if not self._has_joined:
                job.processes[joining].send(signal.SIGKILL)  # it would wait for others that do not come
        if record.get("loss") is None:
            return
        self._losses.append(record["loss"])
        if step % max(1, options.steps // LINES) == 0:
            members = f"{self._seen['members']:.0f} members"
            self._say(f"step {step}/{options.steps}, {members}: loss {fmean(self._losses):.3f}")
        if not job.is_running:
            return
        if step >= options.steps // 4 and not self._is_killed:
            self._is_killed, self._struck_at = True, time.monotonic()
            job.processes[killed].send(signal.SIGKILL)
            self._say(f"step {step}: member {killed} is killed (SIGKILL)")
        elif self._is_killed and self._seen["losses"] and not options.may_join.exists():
            self._struck_at = time.monotonic()
            options.may_join.touch()
            self._say(f"step {step}: member {joining}, which was waiting, joins")

    def _tell_changes(self, now: Record) -> None:
        when = f"step {now['step']}"
        later = f"{time.monotonic() - self._struck_at:.1f} s later"
        members = f"{now['members']:.0f}"
        if now["losses"] > self._seen["losses"] and self._is_killed:
            self._say(
                f"{when}: the other {members} have averaged without it, {later}; lost are its own last steps"
            )
        # Those that are there from the beginning may find each other one by one.
        if now["joins"] > self._seen["joins"] and self._options.may_join.exists():
            self._has_joined = True
            self._say(
                f"{when}: it has taken the others' model, {later}, and trains on with them: {members} members"
            )
        self._seen = now
