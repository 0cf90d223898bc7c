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

from launcher import started_python
from stand_ins import stand_ins

pytest.importorskip("torchft")

PATIENCE_SECONDS = 90.0
SCRIPT = str(Path(__file__).parents[1] / "machine_member.py")


class Told:
    """What the processes of all members have told so far."""

    def __init__(self, path: Path, output: Path) -> None:
        self.path, self.output = path, output

    def lines(self, **wanted: Any) -> list[dict[str, Any]]:
        said = map(json.loads, self.path.read_text().splitlines())
        return [line for line in said if wanted.items() <= line.items()]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            goes_on = "not started again" not in self.output.read_text() and time.monotonic() < deadline
            assert goes_on, self.path.read_text()[-4000:] + self.output.read_text()
            time.sleep(0.05)

    def wait_for(self, number: int, **wanted: Any) -> list[dict[str, Any]]:
        """Wait until so many lines of a kind are there; return them."""
        self.wait(lambda: len(self.lines(**wanted)) >= number)
        return self.lines(**wanted)

    def wait_for_averagings(self, member: int, number: int = 3) -> None:
        wanted = {"event": "averaged", "member": member, "rank": 0}
        self.wait_for(len(self.lines(**wanted)) + number, **wanted)

    def check_equal(self, *, of_rank: int | None = None) -> int:
        """Check that all models of a step are one; return how many steps several members told of."""
        alike: dict[int, list[dict[str, Any]]] = {}
        for line in self.lines(event="averaged"):
            if of_rank in (None, line["rank"]):
                alike.setdefault(line["step"], []).append(line)
        for lines in alike.values():
            assert len({line["checksum"] for line in lines}) == 1, "\n".join(map(str, lines))
        return sum(len({line["member"] for line in lines}) > 1 for lines in alike.values())


@contextmanager
def running(folder: Path, *options: str, processes: int = 2, **settings: Any) -> Iterator[Told]:
    told, output = folder / "told", folder / "output"
    told.touch()
    output.touch()
    with stand_ins() as stand_in:
        script = [*stand_in, SCRIPT, str(told), json.dumps({"steps": 100_000, **settings})]
        command = ["thinwire", "run", f"--processes-per-member={processes}", *options, *script]
        with started_python(*command, stdout=str(output), stderr=str(output)):
            yield Told(told, output)


@pytest.mark.parametrize("averages_gradients", [False, True], ids=["models", "gradients"])
def test_a_member_of_two_processes_ends_with_one_of_them_and_comes_back(
    tmp_path: Path, averages_gradients: bool
) -> None:
    with running(tmp_path, "--min=2", "--max=3", averages_gradients=averages_gradients) as told:
        told.wait_for_averagings(0)
        told.wait_for_averagings(2)
        pid = told.lines(event="joined", member=1, rank=1)[0]["pid"]
        other = told.lines(event="joined", member=1, rank=0)[0]["pid"]
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        first = told.wait_for(1, event="averaged", member=0, losses=1, rank=1)[0]
        assert first["time"] - killed_at < 12
        back = told.wait_for(4, event="joined", member=1)[2:]
        assert {line["rank"] for line in back} == {0, 1}
        assert all(line["step"] > 0 for line in back)
        told.wait_for_averagings(1)
        assert len(told.lines(event="joined")) == 8  # no other member was restarted
        assert {line["pid"] for line in told.lines(member=1, event="joined")} > {pid, other}
        assert told.check_equal() > 5
