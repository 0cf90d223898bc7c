"""Real elastic members, struck at random times: how many take part, and what it costs in steps and loss.

python scripts/soak/kills.py --peer    # 2 members, killed every 30 s
python scripts/soak/kills.py --members 8 --mean-seconds 3.6 --seconds 480 --kinds all  # 125 faults an hour
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from by_hand import said_if_interrupted
from job import Job
from thinwire.lab import LinkSpec, Network

EVERY_STEPS = 20
RATE = "100mbit"
CALM_SECONDS = 30.0  # without faults, by which the rest is measured
# Longer than a message's timeout.
LONG_STOP_SECONDS = 6.0
KINDS = {"kills": ("killed",), "all": ("killed", "killed", "left", "slowed", "stopped")}


@dataclass
class Kills:
    """Members one of whom is struck every so often, by the exponential distribution, until time is over.

    Who has died is replaced by a fresh member, after a pause. A member that alone holds what was learnt is
    spared: the next fault finds a different one.
    """

    members: int
    mean_seconds: float
    restart_seconds: float
    seconds: float
    peer: bool
    kinds: tuple[str, ...]
    step_seconds: float
    rate: float
    seed: int = 0
    strikes: Counter[str] = field(default_factory=Counter)

    def run(self) -> dict[str, Any]:
        """Return the figures."""
        self.draw = random.Random(self.seed)
        network = Network(self.members + 1, LinkSpec(RATE))
        learning = {"width": 512, "every_steps": EVERY_STEPS, "heldout_batches": 8, "rate": self.rate}
        settings: dict[str, Any] = {"peer": self.peer, "seed": self.seed, "steps": 1_000_000}
        settings |= {"min_members": 1, "step_seconds": self.step_seconds, "learning": learning}
        with tempfile.TemporaryDirectory() as folder, network:
            self.job = Job(Path(folder), network, learners=settings)
            try:
                self.alive, self.died_at = list[int](), dict[int, float]()
                for _ in range(self.members):
                    self.add()
                self.job.wait(lambda: self.job.told(event="averaged", members=self.members))
                self.began = time.time()
                self.until(self.began + CALM_SECONDS)
                self.struck_since = time.time()
                self.strike_until(self.struck_since + self.seconds)
                return self.result()
            finally:
                self.job.close()

    def add(self) -> None:
        member = len(self.job.processes)
        self.job.start(member)
        self.alive.append(member)

    def until(self, when: float) -> None:
        """Wait; replace members as they end."""
        while time.time() < when:
            for member in self.alive:
                if not self.job.processes[member].is_alive():
                    self.died_at.setdefault(member, time.time())
            for member in [each for each in self.alive if each in self.died_at]:
                if time.time() > self.died_at[member] + self.restart_seconds:
                    self.alive.remove(member)
                    self.add()
            time.sleep(0.02)

    def strike_until(self, end: float) -> None:
        while (now := time.time()) < end:
            self.until(min(end, now + self.draw.expovariate(1 / self.mean_seconds)))
            if time.time() < end:
                self.strike()

    def strike(self) -> None:
        since = time.time() - 10 * self.step_seconds * EVERY_STEPS
        there = [each for each in self.alive if each not in self.died_at]
        holders = {line["member"] for line in self.job.told(event="averaged") if line["time"] > since}
        holders &= set(there)
        kind = self.draw.choice(self.kinds)
        candidates = [each for each in there if len(holders) > 1 or each not in holders]
        if not candidates:
            self.strikes["spared"] += 1
            return
        self.strikes[kind] += 1
        pid = self.job.processes[struck := self.draw.choice(candidates)].pid
        with suppress(ProcessLookupError):  # it has left since
            self.let_strike(kind, struck, pid)

    def let_strike(self, kind: str, struck: int, pid: int) -> None:
        if kind == "killed":
            os.kill(pid, signal.SIGKILL)
            self.died_at[struck] = time.time()
        elif kind == "left":
            os.kill(pid, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGSTOP)
            lasting = LONG_STOP_SECONDS if kind == "stopped" else self.draw.uniform(0.5, 1.5)
            self.until(time.time() + lasting)
            os.kill(pid, signal.SIGCONT)

    def result(self) -> dict[str, Any]:
        """Return the figures; raises if members of one averaging held unlike models."""
        self.job.check_compressed()
        lineages: dict[str, list[dict[str, Any]]] = {}
        for line in self.job.told(event="averaged"):
            lineages.setdefault(line["lineage"], []).append(line)
        for held in lineages.values():
            assert len({line["checksum"] for line in held}) == 1, held
        firsts = [min(held, key=lambda line: line["time"]) for held in lineages.values()]
        firsts.sort(key=lambda line: line["time"])
        calm = [each for each in firsts if self.began <= each["time"] <= self.struck_since]
        later = [each for each in firsts if each["time"] > self.struck_since]
        seconds = time.time() - self.struck_since
        calm_share = len(calm) / (self.struck_since - self.began)
        losses = [each["loss"] for each in firsts]
        above_best = [loss / best - 1 for loss, best in zip(losses, accumulate(losses, min), strict=True)]
        return {
            "strikes": dict(self.strikes),
            "averagings": len(later),
            "step_efficiency": round(len(later) / seconds / calm_share, 4),
            "mean_living": round(fmean(map(self.living, later)), 2),
            # Who is killed when it has sent has taken part, and is dead when this is told.
            "taking_part": round(fmean(min(1.0, each["members"] / self.living(each)) for each in later), 4),
            "most_above_best": round(max(above_best), 4),
            "steps_set_back": sum(after["step"] < before["step"] for before, after in pairwise(firsts)),
            "best_loss": round(min(losses), 4),
            "curve": [(each["step"], each["members"], round(each["loss"], 4)) for each in firsts],
            "raised": sorted(
                {f"{each['error']}: {each['message'][:99]}" for each in self.job.told(event="raised")}
            ),
        }

    def living(self, averaged: Mapping[str, Any]) -> int:
        """Return how many had made their model before an averaging was told of, and not died, or left."""
        told = [line for line in self.job.told() if line["time"] < averaged["time"]]
        ready, left = (
            {line["member"] for line in told if line["event"] == event} for event in ("ready", "left")
        )
        return len(ready - left - {member for member, at in self.died_at.items() if at < averaged["time"]})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--mean-seconds", type=float, default=30.0, help="between two faults of the group")
    parser.add_argument("--restart-seconds", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument(
        "--rate", type=float, default=1e-3, help="AdamW's; at 3e-3 losses vary by 2 %% without faults"
    )
    parser.add_argument("--kinds", choices=tuple(KINDS), default="kills")
    parser.add_argument("--peer", action="store_true", help="torchft's DiLoCo in the place of Thinwire's")
    given = vars(parser.parse_args())
    kinds = KINDS[given.pop("kinds")]
    with said_if_interrupted("nothing is kept of it"):
        kills = Kills(**given, kinds=kinds)
        print(json.dumps(asdict(kills) | kills.run()))


if __name__ == "__main__":
    main()
