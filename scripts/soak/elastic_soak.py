"""Real elastic members, struck at random: one model after each averaging, and the loss at equal tokens."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from job import Job
from learner import BATCH, EVERY, USUAL
from thinwire.lab import Network

LEAST, MOST = 2, 6
LONGEST_GAP_SECONDS = 60.0  # timeouts of 4, 3 and 2 s, one behind the other, on a computer that may be busy
SAY_EVERY = 50
# "dark": the lighthouse dies, and comes back. Members that were lost come back as others.
KINDS = [
    "killed", "stopped", "slowed", "cut", "left", "killed in the all-to-all", "killed as it serves", "dark",
    "all but one killed", "joined", "joined", "joined",
]  # fmt: skip


class Soak:
    """A run of learners, and what they have told of it.

    `spare_lighthouse`: it never dies. `inside`: members of two processes, with "ddp" or "fsdp" inside.
    """

    def __init__(
        self,
        *,
        averagings: int,
        seed: int,
        peer: bool,
        network: Network,
        spare_lighthouse: bool = False,
        inside: str = "",
    ) -> None:
        self.inside, self.size = inside, 2 if inside else 1
        self.averagings, self.draw, self.network = averagings, random.Random(seed), network
        self.kinds = [kind for kind in KINDS if kind != "dark" or not spare_lighthouse]
        self.strikes: Counter[str] = Counter()
        self.alive: list[int] = []
        self.num_started = 0
        settings: dict[str, Any] = {"peer": peer, "seed": seed, "steps": averagings * EVERY}
        settings |= {"min_members": LEAST, "step_seconds": 0.005, "learning": {"inside": inside}}
        self.start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            # torchft's own has no other way to wait for enough.
            least = LEAST if peer else 1
            self.job = Job(
                Path(folder),
                network,
                learners=settings,
                least_at_lighthouse=least,
                processes_per_member=self.size,
            )
            try:
                self.add(USUAL)
                self.run()
                self.figures = self.result()
            finally:
                self.job.close()
        assert not [process for process in self.job.processes if process.is_alive()]

    def add(self, number: int = 1) -> None:
        for _ in range(number):
            self.alive.append(self.num_started)
            self.job.start(self.num_started)
            self.num_started += 1

    @property
    def averaged(self) -> int:
        return max((line["step"] // EVERY for line in self.job.told(event="averaged")), default=0)

    @property
    def holders(self) -> list[int]:
        """Who is alive and has taken part in one of the last averagings."""
        since = (self.averaged - 2) * EVERY
        lately = {line["member"] for line in self.job.told(event="averaged") if line["step"] >= since}
        return [member for member in self.alive if member in lately]

    def run(self) -> None:
        self.wait_for(1)
        # The end in peace: who is struck there has no averaging left to come back in.
        while self.averaged < self.averagings - 40:
            self.wait_for(min(self.averaged + self.draw.randint(6, 18), self.averagings - 40))
            self.alive = [member for member in self.alive if self.job.processes[member].is_alive()]
            self.strike()
        self.wait_for(self.averagings)
        for member in self.alive:
            self.job.processes[member].join(LONGEST_GAP_SECONDS)

    def wait_for(self, averaging: int) -> None:
        last, since = self.averaged, time.monotonic()
        while last < averaging:
            now = self.averaged
            if now // SAY_EVERY > last // SAY_EVERY:
                seconds = time.monotonic() - self.start
                print(
                    f"{seconds:.0f} s: {now} of {self.averagings} averagings, {len(self.alive)} members, "
                    f"struck {sum(self.strikes.values())} times",
                    flush=True,
                )
            if now > last:
                last, since = now, time.monotonic()
            for member in self.alive:
                self.job.processes[member].is_alive()  # ends those that have lost a process
            assert time.monotonic() < since + LONGEST_GAP_SECONDS, "\n".join(
                [f"stuck at {last}: {dict(self.strikes)}, {self.alive}", *map(str, self.job.told()[-12:])]
            )
            time.sleep(0.02)

    def strike(self) -> None:
        """Let a fault strike, and last as long as it does; the others go on meanwhile."""
        kind = self.draw.choice(self.kinds)
        lethal = kind in ("killed", "left", "killed in the all-to-all", "all but one killed")
        if len(self.alive) <= LEAST or (lethal and len(self.alive) < USUAL and self.draw.random() < 0.5):
            kind = "joined"
        if kind in ("joined", "killed as it serves") and len(self.alive) >= MOST:
            kind = "killed"
        holders = self.holders
        if len(holders) <= LEAST and kind not in ("joined", "dark"):
            kind = "slowed"  # what was learnt would be gone with the last who hold it
        self.strikes[kind] += 1
        struck = self.draw.choice(holders or self.alive)
        deadly = {
            "killed": signal.SIGKILL,
            "left": signal.SIGTERM,
            "killed in the all-to-all": signal.SIGUSR1,
        }
        if kind in deadly:
            self.end(struck, deadly[kind])
        elif kind == "joined":
            self.add()
        elif kind == "killed as it serves":
            self.end(self.alive[0], signal.SIGUSR2)
            self.add()
        elif kind == "all but one killed":
            others = [member for member in self.alive if member != struck]
            for member in others:
                self.end(member, signal.SIGKILL)
            self.add(len(others))
        else:
            self.last(kind, struck)

    def last(self, kind: str, struck: int) -> None:
        """Let a fault last that ends by itself."""
        if kind == "dark":
            self.job.darken_for(self.draw.uniform(0.5, 4))
        elif kind == "cut":
            self.job.cut(struck, self.draw.uniform(1, 8))
        else:
            times, shortest, longest = (3, 0.5, 1.5) if kind == "slowed" else (1, 1.0, 8.0)
            for _ in range(times):
                self.job.stop(struck, self.draw.uniform(shortest, longest), self.draw.randrange(self.size))
                time.sleep(0.2)

    def end(self, member: int, number: int) -> None:
        # With DDP inside, only the first process of a member sends.
        is_any = self.inside != "ddp" or number in (signal.SIGKILL, signal.SIGTERM)
        os.kill(self.job.processes[member].pids[self.draw.randrange(self.size) if is_any else 0], number)
        self.alive.remove(member)

    def check_equal(self) -> None:
        """Raise if members of one averaging held unlike models, or unlike parts of the same place."""
        self.job.check_compressed()
        has_parts = self.inside == "fsdp"
        told = self.job.told(event="averaged")
        assert {line["rank"] for line in told} == set(range(self.size))
        for kind, by in (("averaged", "lineage"), ("done", "event")):
            alike = defaultdict(set)
            for line in self.job.told(event=kind):
                alike[line[by], has_parts and line["rank"]].add(line["checksum"])
            unlike = [held for held, checksums in alike.items() if len(checksums) > 1]
            assert not unlike, unlike

    def result(self) -> dict[str, Any]:
        """Return the figures; raises as `check_equal`."""
        self.check_equal()
        lines, done = (self.job.told(event=event, rank=0) for event in ("averaged", "done"))
        by_lineage, by_step = defaultdict(list), defaultdict(set)
        for line in lines:
            by_lineage[line["lineage"]].append(line)
            by_step[line["step"]].add(line["lineage"])
        # Where the group was in two parts, one of them was kept: the larger, as a rule.
        kept = [max((by_lineage[each] for each in lineages), key=len) for lineages in by_step.values()]
        times = sorted(min(line["time"] for line in held) for held in kept)
        gaps = sorted(after - before for before, after in pairwise(times))
        last = lines[-1]
        return {
            "averagings": len(kept),
            "strikes": dict(self.strikes),
            "started": self.num_started,
            "compared": sum(len(held) > 1 for held in by_lineage.values()),
            "in_two_parts": sum(len(lineages) > 1 for lineages in by_step.values()),
            "members": sum(map(len, kept)) / len(kept),
            "samples": sum(map(len, kept)) * EVERY * BATCH,
            # By the counters of the interfaces: with headers, acknowledgements and what newcomers were sent.
            "sent_bytes": sum(map(self.network.sent_bytes, range(1, self.network.machines))),
            "loss": done[0]["loss"],
            "done": len(done),
            "raised": [f"{line['error']}: {line['message'][:120]}" for line in self.job.told(event="raised")],
            "longest_gap_seconds": round(gaps[-1], 1),
            "usual_gap_seconds": round(gaps[len(gaps) // 2], 3),
            "discarded_steps": last.get("discarded_steps", 0),
            "seconds": round(time.monotonic() - self.start),
        }


def soaked(path: Path, **key: Any) -> dict[str, Any]:
    """Return the figures of a run, whose options are those of `Soak`; of one in the file, from there."""
    if path.exists():
        for line in map(json.loads, path.read_text().splitlines()):
            if key.items() <= line.items():
                return dict(line)
    with Network(MOST + 2) as network:
        result = key | Soak(**key, network=network).figures
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)
    return result
