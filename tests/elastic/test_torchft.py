"""Real members with a real lighthouse: killed, stopped, told to leave, refused, and joining again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import forked
from elastic import worker

pytest.importorskip("torchft")

PATIENCE_SECONDS = 60.0


class Job:
    """Members that meet at one lighthouse, and what they have told so far."""

    def __init__(self, folder: Path) -> None:
        self._lighthouse = import_module("torchft.coordination").LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1500
        )
        self.address = f"http://127.0.0.1:{self._lighthouse.address().rpartition(':')[2]}"
        self._path = folder / "told"
        self._path.touch()
        self.processes: list[forked.Process] = []

    def start(self, member: int, **options: Any) -> forked.Process:
        process = forked.process(_member, str(self._path), self.address, member, options)
        process.start()
        self.processes.append(process)
        return process

    def told(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return what was told so far, of that kind."""
        complete = self._path.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in complete.splitlines()]
        return [line for line in lines if wanted.items() <= line.items()]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "\n".join(map(str, self.told()[-30:]))
            time.sleep(0.02)

    def wait_for_averagings(self, member: int, number: int = 2) -> None:
        """Wait until a member has told of so many more."""
        before = len(self.told(event="averaged", member=member))
        self.wait(lambda: len(self.told(event="averaged", member=member)) >= before + number)

    def check_equal(self) -> int:
        """Check that the models after each averaging are one; return how many several members told of."""
        by_step: dict[int, list[str]] = {}
        for line in self.told():
            if line["event"] in ("joined", "averaged"):
                by_step.setdefault(line["step"], []).append(line["checksum"])
        assert all(len(set(each)) == 1 for each in by_step.values()), by_step
        return sum(len(each) > 1 for each in by_step.values())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._lighthouse.shutdown()


def _member(path: str, lighthouse: str, member: int, options: dict[str, Any]) -> None:
    worker.train(path, lighthouse, member, **{"steps": 100_000, "timeout_seconds": 2.0, **options})


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    running = Job(tmp_path)
    yield running
    running.close()


def test_members_are_killed_stopped_told_to_leave_and_join_again(job: Job) -> None:
    first, second = job.start(0, min_members=2), job.start(1, min_members=2)
    job.wait_for_averagings(0)
    third = job.start(2, min_members=2)
    job.wait_for_averagings(2)
    assert job.told(event="joined", member=2)[0]["step"] > 0

    second.kill()
    job.wait(lambda: job.told(event="averaged", member=0, losses=1))
    assert job.told(event="averaged", member=0)[-1]["lost_error"] > 0

    job.start(1, min_members=2)
    job.wait(lambda: len(job.told(event="joined", member=1)) == 2)
    job.wait_for_averagings(1)

    os.kill(third.pid, signal.SIGSTOP)
    job.wait(lambda: job.told(event="averaged", member=0, losses=2))
    job.wait_for_averagings(0)
    os.kill(third.pid, signal.SIGCONT)
    job.wait_for_averagings(2)

    os.kill(first.pid, signal.SIGTERM)
    job.wait(lambda: job.told(event="left", member=0))
    first.join(PATIENCE_SECONDS)
    assert first.exitcode == 0
    job.wait(lambda: job.told(event="averaged", member=2, leaves=1))
    assert job.check_equal() > 10


def test_a_member_with_other_settings_is_refused_and_the_others_go_on(job: Job) -> None:
    job.start(0, min_members=2), job.start(1, min_members=2)
    job.wait_for_averagings(0)
    stranger = job.start(2, width=24)
    job.wait(lambda: job.told(event="raised"))
    (told,) = job.told(event="raised")
    assert (told["member"], told["error"]) == (2, "AgreementError")
    assert "parameter 0.weight" in told["message"]
    stranger.join(PATIENCE_SECONDS)
    job.wait_for_averagings(0)
    assert job.told(event="averaged", member=0)[-1]["losses"] == 0
    assert job.check_equal() > 2
