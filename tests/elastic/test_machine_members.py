"""Elastic members of several processes each: one dies and its whole member is restarted, others go on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import stand_ins, started_python

pytest.importorskip("torchft")
pytestmark = pytest.mark.timeout(300)

PATIENCE_SECONDS = 90.0
# A user types this; but here a member is lost after two silent seconds instead of five.
RUN = """
import sys
from thinwire import cli, elastic_job
elastic_job.HEARTBEAT_TIMEOUT_MS = 2_000
sys.argv.insert(1, "run")
cli.main()
"""
SCRIPT = str(Path(__file__).parents[1] / "machine_member.py")


class Events:
    """What the processes of all members have written so far."""

    def __init__(self, path: Path, output: Path) -> None:
        self.path, self.output = path, output

    def lines(self, **wanted: Any) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines(keepends=True)
        written = [json.loads(line) for line in lines if line.endswith("\n")]  # not one half written
        return [line for line in written if wanted.items() <= line.items()]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            goes_on = "member 0 ended with" not in self.output.read_text() and time.monotonic() < deadline
            assert goes_on, self.path.read_text()[-4000:]
            time.sleep(0.05)

    def wait_for(self, number: int, **wanted: Any) -> list[dict[str, Any]]:
        """Wait until so many lines of a kind are there; return them."""
        self.wait(lambda: len(self.lines(**wanted)) >= number)
        return self.lines(**wanted)

    def wait_for_averagings(self, member: int, number: int = 3) -> None:
        wanted = {"event": "averaged", "member": member, "rank": 0}
        self.wait_for(len(self.lines(**wanted)) + number, **wanted)

    def wait_for_losses(self, number: int) -> None:
        """Wait until the first member has lost so many others."""
        self.wait(
            lambda: [line for line in self.lines(event="averaged", member=0) if line["losses"] >= number]
        )

    def check_equal(self, *, have_parts: bool) -> int:
        """Check that all models of a step, or parts of one, are alike; return how many several wrote.

        A test waits until they are enough: on a busy machine some tell late.
        """
        averagings = self.lines(event="averaged")
        assert {line["processes"] for line in averagings} == {2}
        assert min(line["ratio"] for line in averagings) > 2
        # Not the last line of a process that was killed then: perhaps it alone had committed.
        living = {line["pid"] for line in {(it["member"], it["rank"]): it for it in averagings}.values()}
        last = {line["pid"]: line for line in averagings if line["pid"] not in living}
        alike: dict[Any, list[dict[str, Any]]] = {}
        for line in (line for line in averagings if line != last.get(line["pid"])):
            alike.setdefault((line["step"], have_parts and line["rank"]), []).append(line)
        for lines in alike.values():
            assert len({line["checksum"] for line in lines}) == 1, "\n".join(map(str, lines))
        return sum(len({line["member"] for line in lines}) > 1 for lines in alike.values())


@contextmanager
def running(folder: Path, *options: str, processes: int = 2, **settings: Any) -> Iterator[Events]:
    events, output = folder / "events", folder / f"output-{processes}"
    events.touch()
    output.touch()
    with stand_ins() as stand_in:
        script = [*stand_in, SCRIPT, str(events), json.dumps({"steps": 100_000, **settings})]
        command = ["-u", "-c", RUN, f"--processes-per-member={processes}", *options, *script]
        with started_python(*command, stdout=str(output), stderr=str(output)):
            yield Events(events, output)


def test_a_member_ends_as_a_whole_comes_back_stands_still_and_leaves(tmp_path: Path) -> None:
    """Each of its processes has a part of the model; what befalls one befalls the member, and no other."""
    dies = {"1": {"dies_at": ("whether all have received everything", 4)}}
    with running(tmp_path, "--min=2", "--max=3", inside="fsdp", of_member=dies) as events:
        *dead, one, other = events.wait_for(4, event="joined", member=1)
        assert {one["rank"], other["rank"]} == {0, 1}
        assert min(one["step"], other["step"]) > 0
        events.wait_for_losses(1)
        for member in (1, 2):
            events.wait_for_averagings(member)

        still = events.lines(event="joined", member=2, rank=0)[0]["pid"]
        os.kill(still, signal.SIGSTOP)
        events.wait_for_losses(2)
        os.kill(still, signal.SIGCONT)
        events.wait_for_averagings(2)
        assert len(events.lines(event="joined")) == 8  # only the one that died was restarted

        os.kill(one["pid"] if one["rank"] == 1 else other["pid"], signal.SIGTERM)
        events.wait_for(2, event="left", member=1)
        checksums = []
        for rank in (0, 1):
            events.wait_for(1, event="averaged", member=0, rank=rank, leaves=1)
            lines = events.lines(event="averaged", member=0, rank=rank)
            after = next(number for number, line in enumerate(lines) if line["leaves"])
            # It has handed over, and not lost, what it owed.
            assert lines[after - 2]["lost_error"] == lines[after]["lost_error"] > 0
            checksums.append(lines[after]["checksum"])
        assert checksums[0] != checksums[1]
        events.wait_for_averagings(0)
        assert {line["pid"] for line in events.lines(event="raised")} <= {line["pid"] for line in dead}
        events.wait(lambda: events.check_equal(have_parts=True) > 5)


def test_a_killed_member_averages_gradients_again_and_one_of_another_layout_is_refused(
    tmp_path: Path,
) -> None:
    """All processes of a member have the whole model; of the stranger, each of three has a part."""
    options: dict[str, Any] = {"width": 15, "averages_gradients": True}
    with running(tmp_path, "--min=1", "--max=2", inside="ddp", **options) as events:
        for member in range(2):
            events.wait_for_averagings(member)
        killed = {line["pid"] for line in events.lines(event="joined", member=1)}
        os.kill(events.lines(event="joined", member=1, rank=1)[0]["pid"], signal.SIGKILL)
        events.wait_for_losses(1)
        back = events.wait_for(4, event="joined", member=1)[2:]
        assert all(line["step"] > 0 and line["pid"] not in killed for line in back)
        events.wait_for_averagings(1)
        assert len(events.lines(event="joined")) == 6

        lighthouse = events.output.read_text().partition("lighthouse ")[2].partition(";")[0]
        others = ["--max=1", "--min=1", "--max-restarts=0", f"--lighthouse={lighthouse}"]
        with running(tmp_path, *others, processes=3, inside="fsdp", first_member=7, **options):
            refused = events.wait_for(1, event="raised", member=7)[0]  # its others may end before they tell
        assert refused["error"] == "AgreementError"
        assert "a member of 2 processes, each with the whole" in refused["message"]
        events.wait_for_averagings(0)
        events.wait(lambda: events.check_equal(have_parts=False) > 5)


@pytest.mark.nightly
def test_members_that_were_killed_resume_and_make_the_same_models(tmp_path: Path) -> None:
    """Some parameters are whole in each process, and others a part of what the member has."""
    with running(tmp_path, "--min=2", inside="experts", saves_at=4) as events:
        events.wait_for(4, event="averaged", step=10)
    with running(tmp_path, "--min=2", inside="experts", resumes=True) as events:
        events.wait_for(8, event="averaged", step=10)
    assert [line["step"] for line in events.lines(event="joined")] == [0] * 4 + [4] * 4
    assert len(events.lines(event="averaged", step=8)) == 8
    assert events.check_equal(have_parts=True) > 5
