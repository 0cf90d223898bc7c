"""The elastic demo: members train, one is killed, one joins, and the others go on.

`run_elastic` starts this module as each member, with its options as JSON.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch

import thinwire
from thinwire import elastic
from thinwire.demo.model import (
    GPT,
    SIZES,
    batch_generator,
    heldout_loss,
    load_text,
    next_byte_loss,
    sample_batch,
)
from thinwire.demo.train import DemoOptions, JobError, JobInterruptedError
from thinwire.elastic_job import ElasticJob
from thinwire.launch import LOOK_EVERY_SECONDS, python_module
from thinwire.localsgd.members.torchft_group import MEMBER
from thinwire.watch import read_run
from thinwire.watch.records import Growing, Record

LINES = 10
EVERY_STEPS = 10
BATCH_SIZE = 8
LEARNING_RATE = 2e-3
TIMEOUT_SECONDS = 30.0  # of a message; longer than a busy computer lets any member stand still
WAIT_SECONDS = 120.0


def run_elastic(options: DemoOptions, say: Callable[[str], None]) -> list[Path]:
    """Train with DiLoCo; kill a member after a quarter of the steps, and let another join when it was missed.

    Returns:
        The records of the members, in the order in which they were started.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    for path in options.output.glob("member-*.jsonl"):
        path.unlink()  # a watch goes on in a file that is there, as after a resume
    may_join(options).unlink(missing_ok=True)
    log_path = options.output / "members.log"
    scene = _Scene(options, say)
    file = Growing(options.output / "member-0.jsonl")
    command = [*python_module("thinwire.demo.elastic"), options.to_json()]
    with (
        log_path.open("wb") as log,
        # Nobody is started again, and those who are left go on: the scene says when the last one joins.
        ElasticJob(
            command, options.processes + 1, min_members=options.processes - 1, max_restarts=0, out=log
        ) as job,
    ):

        def play() -> None:
            for record in file.new_records():
                scene.play(record, job if job.is_running else None)

        received = job.run(play)
    if received is not None:
        raise JobInterruptedError(received)
    if job.exit_code:
        raise JobError(f"too few members came to the end; see {log_path}")
    numbers = [number for number in range(options.processes + 1) if number != scene.killed]
    paths = [options.output / f"member-{number}.jsonl" for number in numbers]
    # None of one that came too late to take part.
    held = [point.value for path in paths if path.exists() for point in read_run(path).points("checksum")]
    if len(set(held)) != 1:
        raise JobError(
            f"the members must hold one model in the end, and have told of {len(set(held))}; see {log_path}"
        )
    say(f"in the end {len(held)} members hold one model, the same to the bit")
    return [path for path in sorted(options.output.glob("member-*.jsonl")) if read_run(path).points("loss")]


class _Scene:
    """What is done to the members, and what the first one tells.

    Attributes:
        killed: The number of the member that was killed; None before.
    """

    def __init__(self, options: DemoOptions, say: Callable[[str], None]) -> None:
        self.killed: int | None = None
        self._may_join, self._has_joined = may_join(options), False
        self._steps, self._last, self._say = options.steps, options.processes - 1, say
        self._kill_at = options.steps // 4
        self._struck_at = 0.0
        self._losses: list[float] = []
        self._seen = {"members": 0.0, "losses": 0.0, "joins": 0.0}

    def play(self, record: Record, job: ElasticJob | None) -> None:
        """Take a record of the first member; without a job, which has ended then, strike nobody."""
        if record["kind"] != "log":
            return
        if "members" in record:
            self._tell_changes(record)
            return
        if "heldout_loss" in record:
            self._say(f"held-out loss {record['heldout_loss']:.3f} nats/byte")
            if job is not None and not self._has_joined:
                job.kill(self._last + 1)  # it would wait for others that do not come any more
        if record.get("loss") is None:
            return
        step = record["step"]
        self._losses.append(record["loss"])
        if step % max(1, self._steps // LINES) == 0:
            members = int(self._seen["members"])
            loss = fmean(self._losses[-EVERY_STEPS:])
            self._say(f"step {step}/{self._steps}, {members} members: loss {loss:.3f}")
        if job is None:
            return
        if step >= self._kill_at and self.killed is None:
            self.killed, self._struck_at = self._last, time.monotonic()
            job.kill(self.killed)
            self._say(f"step {step}: member {self.killed} is killed (SIGKILL)")
        elif self.killed is not None and self._seen["losses"] and not self._may_join.exists():
            self._struck_at = time.monotonic()
            self._may_join.touch()
            self._say(f"step {step}: member {self._last + 1}, which was waiting, joins")

    def _tell_changes(self, now: Record) -> None:
        seconds, members = time.monotonic() - self._struck_at, int(now["members"])
        if now["losses"] > self._seen["losses"] and self.killed is not None:
            self._say(
                f"step {now['step']}: the other {members} have averaged without it, {seconds:.1f} s later; "
                "lost are its own last steps"
            )
        # Those that are there from the beginning may find each other one by one.
        if now["joins"] > self._seen["joins"] and self._may_join.exists():
            self._has_joined = True
            self._say(
                f"step {now['step']}: it has taken the others' model, {seconds:.1f} s later, and trains on "
                f"with them: {members} members"
            )
        self._seen = {name: now[name] for name in self._seen}


def may_join(options: DemoOptions) -> Path:
    """Return the file that is there once the last member may join."""
    return options.output / "may-join"


def main() -> None:
    """Train with whoever is there, and record every step; the first member measures the held-out loss."""
    options, member = DemoOptions.from_json(sys.argv[1]), int(os.environ[MEMBER])
    torch.set_num_threads(1)  # they share the cores of one machine
    text = load_text()
    # Each from a seed of its own: all start from the first one's model, or from that of those who are there.
    torch.manual_seed(options.seed + member)
    model = GPT(SIZES[options.model_size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    # Started with the others, though it joins later: what a process loads first takes longer than they train.
    # Before its group, which announces it to the others.
    while member == options.processes and not may_join(options).exists():
        time.sleep(LOOK_EVERY_SECONDS)
    group = elastic.TorchftGroup(timeout_seconds=TIMEOUT_SECONDS, wait_seconds=WAIT_SECONDS)
    path = options.output / f"member-{member}.jsonl"
    with (
        elastic.DiLoCo(model, optimizer, every_steps=EVERY_STEPS, group=group) as local,
        thinwire.Watch(local, path, name=f"member {member}") as watch,
    ):
        while local.steps < options.steps:
            inputs, targets = sample_batch(
                text.train,
                batch_size=BATCH_SIZE,
                context_length=model.config.context_length,
                generator=batch_generator(seed=options.seed, step=local.steps, process_rank=member),
            )
            optimizer.zero_grad()
            loss = next_byte_loss(model, inputs, targets)
            torch.autograd.backward(loss)
            optimizer.step()
            watch.log(loss=loss.item())
        with local.averaged():
            held = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            logged = {"checksum": float(zlib.crc32(held.numpy().tobytes()))}
            if member == 0:
                logged["heldout_loss"] = heldout_loss(model, text.heldout)
            watch.log(**logged)


if __name__ == "__main__":
    main()
