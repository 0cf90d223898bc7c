"""A job of real elastic members and their lighthouse."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import forked
from elastic import worker

PATIENCE_SECONDS = 60.0
TIMEOUT_SECONDS = 4.0


class Job:
    """Members that meet at one lighthouse, and what they have told so far."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # the lighthouse logs every quorum
        self._port = 0
        self.light()
        self.address = f"http://127.0.0.1:{self._port}"
        self._path = folder / "told"
        self._path.touch()
        self.processes: list[forked.Process] = []

    def light(self) -> None:
        """Start the lighthouse, or start it again where it was."""
        self._lighthouse = import_module("torchft.coordination").LighthouseServer(
            bind=f"127.0.0.1:{self._port}", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=3000
        )
        self._port = int(self._lighthouse.address().rpartition(":")[2])

    def darken(self) -> None:
        """End the lighthouse."""
        self._lighthouse.shutdown()

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
        """Check that the models after each averaging are one; return how many several members told of.

        Not that of a member which was killed just then: if it alone knew that all had received everything,
        the others have repeated the averaging without it.
        """
        dead = {process.pid for process in self.processes if not process.is_alive()}
        last = {line["pid"]: line["time"] for line in self.told() if line["pid"] in dead}
        by_step: dict[int, list[dict[str, Any]]] = {}
        for line in self.told():
            if line["event"] in ("joined", "averaged") and line["time"] != last.get(line["pid"]):
                by_step.setdefault(line["step"], []).append(line)
        for lines in by_step.values():
            assert len({line["checksum"] for line in lines}) == 1, "\n".join(map(str, lines))
        return sum(len(lines) > 1 for lines in by_step.values())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._lighthouse.shutdown()


def _member(path: str, lighthouse: str, member: int, options: dict[str, Any]) -> None:
    worker.train(
        path, lighthouse, member, **{"steps": 100_000, "timeout_seconds": TIMEOUT_SECONDS, **options}
    )
