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

PATIENCE_SECONDS = 90.0
SCRIPT = str(Path(__file__).parents[1] / "machine_member.py")


class Told:
    """What the processes of all members have told so far."""

    def __init__(self, path: Path, output: Path) -> None:
        self.path, self.output = path, output

    def lines(self, **wanted: Any) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines(keepends=True)
        said = [json.loads(line) for line in lines if line.endswith("\n")]  # one may be half written
        return [line for line in said if wanted.items() <= line.items()]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            goes_on = "member 0 ended with" not in self.output.read_text() and time.monotonic() < deadline
            assert goes_on, self.path.read_text()[-4000:] + self.output.read_text()
            time.sleep(0.05)

    def wait_for(self, number: int, **wanted: Any) -> list[dict[str, Any]]:
        """Wait until so many lines of a kind are there; return them."""
        self.wait(lambda: len(self.lines(**wanted)) >= number)
        return self.lines(**wanted)

    def wait_for_averagings(self, member: int, number: int = 3) -> None:
        wanted = {"event": "averaged", "member": member, "rank": 0}
        self.wait_for(len(self.lines(**wanted)) + number, **wanted)

    def check_equal(self, *, have_parts: bool) -> int:
        """Check that all models of a step, or parts of one, are alike; return how many several told of.

        A test waits until they are enough: on a busy machine some tell late.
        """
        told = self.lines(event="averaged")
        assert {line["processes"] for line in told} == {2}
        assert min(line["ratio"] for line in told) > 2
        # Not what a process said last that was killed then: perhaps it alone had committed.
        living = {line["pid"] for line in {(each["member"], each["rank"]): each for each in told}.values()}
        last = {line["pid"]: line for line in told if line["pid"] not in living}
        alike: dict[Any, list[dict[str, Any]]] = {}
        for line in (line for line in told if line != last.get(line["pid"])):
            alike.setdefault((line["step"], have_parts and line["rank"]), []).append(line)
        for lines in alike.values():
            assert len({line["checksum"] for line in lines}) == 1, "\n".join(map(str, lines))
        return sum(len({line["member"] for line in lines}) > 1 for lines in alike.values())


@contextmanager
def running(folder: Path, *options: str, processes: int = 2, **settings: Any) -> Iterator[Told]:
    told, output = folder / "told", folder / f"output-{processes}"
    told.touch()
    output.touch()
    with stand_ins() as stand_in:
        script = [*stand_in, SCRIPT, str(told), json.dumps({"steps": 100_000, **settings})]
        command = ["thinwire", "run", f"--processes-per-member={processes}", *options, *script]
        with started_python(*command, stdout=str(output), stderr=str(output)):
            yield Told(told, output)


@pytest.mark.parametrize(("inside", "averages_gradients"), [("ddp", True), ("fsdp", False)])
def test_a_member_of_two_processes_ends_with_one_of_them_and_comes_back(
    tmp_path: Path, averages_gradients: bool, inside: str
) -> None:
    settings: dict[str, Any] = {"inside": inside, "width": 15, "averages_gradients": averages_gradients}
    with running(tmp_path, "--min=2", "--max=3", **settings) as told:
        for member in range(3):  # two may begin without the third
            told.wait_for_averagings(member)
        pid = told.lines(event="joined", member=1, rank=1)[0]["pid"]
        other = told.lines(event="joined", member=1, rank=0)[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        told.wait_for(1, event="averaged", member=0, losses=1, rank=1)
        back = told.wait_for(4, event="joined", member=1)[2:]
        assert {line["rank"] for line in back} == {0, 1}
        assert all(line["step"] > 0 for line in back)
        told.wait_for_averagings(1)
        assert len(told.lines(event="joined")) == 8  # no other member was restarted
        assert {line["pid"] for line in told.lines(member=1, event="joined")} > {pid, other}
        told.wait(lambda: told.check_equal(have_parts=inside == "fsdp") > 5)


def test_a_member_of_another_layout_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    options = ["--min=2", "--max=3", "--max-restarts=0"]
    with running(tmp_path, *options, starts_last=2, of_member={"2": {"inside": "fsdp"}}) as told:
        refused = told.wait_for(1, event="raised", member=2)
        assert {line["error"] for line in refused} == {"AgreementError"}
        assert all("processes of a member" in line["message"] for line in refused)
        told.wait_for_averagings(0)
        assert told.lines(event="averaged", member=0)[-1]["losses"] == 0
        told.wait(lambda: told.check_equal(have_parts=False) > 3)


@pytest.mark.parametrize("inside", ["tensor", "experts"])
def test_a_member_leaves_in_order_when_one_of_its_processes_is_asked_to(tmp_path: Path, inside: str) -> None:
    with running(tmp_path, "--min=2", "--max=3", inside=inside) as told:
        for member in range(3):  # two may begin without the third
            told.wait_for_averagings(member)
        os.kill(told.lines(event="joined", member=1, rank=1)[0]["pid"], signal.SIGTERM)
        told.wait_for(2, event="left", member=1)
        after = {"event": "averaged", "member": 0, "leaves": 1, "losses": 0, "lost_error": 0.0}
        second = told.wait_for(1, rank=1, **after)[0]
        first = told.wait_for(1, rank=0, step=second["step"], **after)[0]
        assert first["checksum"] != second["checksum"]
        told.wait_for_averagings(0)
        assert not told.lines(event="raised")
        told.wait(lambda: told.check_equal(have_parts=True) > 3)


def test_a_member_whose_tensors_do_not_say_that_they_are_parts_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, "--min=2", "--max-restarts=0", inside="local experts") as told:
        refused = told.wait_for(1, event="raised")[0]
    assert refused["error"] == "AttachError"
    assert "but the model spans 1" in refused["message"]


@pytest.mark.parametrize(
    ("inside", "moment"), [("fsdp", "whether all have received everything"), ("ddp", "step")]
)
def test_others_repeat_an_averaging_in_which_a_member_dies(tmp_path: Path, inside: str, moment: str) -> None:
    of_member = {"1": {"dies_at": (moment, 7)}}
    with running(tmp_path, "--min=2", "--max=3", inside=inside, of_member=of_member) as told:
        told.wait_for(4, event="joined", member=1)
        told.wait_for_averagings(0)
        assert not told.lines(event="raised", member=0)
        assert len(told.lines(event="joined")) == 8
        told.wait(lambda: told.check_equal(have_parts=inside == "fsdp") > 3)


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_members_of_several_processes_resume_and_make_the_same_models(tmp_path: Path, inside: str) -> None:
    settings: dict[str, Any] = {"inside": inside, "steps": 16}
    with running(tmp_path, "--min=2", saves_at=8, **settings) as told:
        told.wait_for(4, event="done")
    with running(tmp_path, "--min=2", resumes=True, **settings) as told:
        told.wait_for(8, event="done")
    assert [line["step"] for line in told.lines(event="joined")] == [0] * 4 + [8] * 4
    assert told.check_equal(have_parts=inside == "fsdp") >= 4
    assert len(told.lines(event="averaged", step=16)) == 8


def test_a_member_whose_first_process_stands_still_goes_on_later_from_the_others(tmp_path: Path) -> None:
    with running(tmp_path, "--min=2", "--max=3", inside="fsdp") as told:
        told.wait_for_averagings(2)
        pid = told.lines(event="joined", member=1, rank=0)[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        told.wait_for(1, event="averaged", member=0, losses=1)
        os.kill(pid, signal.SIGCONT)
        told.wait_for_averagings(1)
        assert len(told.lines(event="joined")) == 6
        assert not told.lines(event="raised")
        told.wait(lambda: told.check_equal(have_parts=True) > 3)


def test_a_member_of_another_number_of_processes_is_refused_by_name(tmp_path: Path) -> None:
    with running(tmp_path, "--min=2", inside="fsdp") as told:
        told.wait_for_averagings(0)
        lighthouse = told.output.read_text().partition("lighthouse ")[2].partition(";")[0]
        others = ["--max=1", "--min=2", "--max-restarts=0", f"--lighthouse={lighthouse}"]
        with running(tmp_path, *others, processes=3, inside="fsdp", first_member=7):
            refused = told.wait_for(1, event="raised")[0]
        assert (refused["member"], refused["error"]) == (7, "AgreementError")
        assert "processes of a member 2, each" in refused["message"]
        told.wait_for_averagings(0)
        assert told.lines(event="averaged", member=0)[-1]["losses"] == 0
