"""A member that is half as fast as the other: how much of its time the fast one computes, and the loss.

Both average by the clock. Beside them, two equal members that make as many steps together.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import job as elastic_job
from by_hand import said_if_interrupted
from job import Job
from thinwire.lab import LinkSpec, Network

RATE, EVERY_SECONDS = "100mbit", 10.0
FAST, SLOW = 0.02, 0.05  # seconds that a step pauses for
STEPS = 3_000  # of the fastest


def trained(steps: int, pauses: list[float], seed: int) -> dict[str, Any]:
    """Return the loss, the steps of each, and the share of its time in which the first member computed."""
    settings: dict[str, Any] = {"seed": seed, "steps": steps, "min_members": 2}
    settings |= {"learning": {"every_seconds": EVERY_SECONDS}}
    with tempfile.TemporaryDirectory() as folder, Network(len(pauses) + 1, LinkSpec(RATE)) as network:
        job = Job(Path(folder), network, learners=settings, least_at_lighthouse=2)
        try:
            for member, pause in enumerate(pauses):
                job.start(member, step_seconds=pause)
            job.wait(lambda: len(job.told(event="done")) == len(pauses))
            done = sorted(job.told(event="done"), key=lambda line: int(line["member"]))
        finally:
            job.close()
    assert len({line["checksum"] for line in done}) == 1, done
    assert min(line["ratio"] for line in done) > 4
    seconds = done[0]["step_seconds"]
    return {
        "loss": done[0]["loss"],
        "steps": [len(line["step_seconds"]) for line in done],
        # A step in which models are averaged takes longer by that.
        "utilisation": median(seconds) * len(seconds) / sum(seconds),
        "averagings": done[0]["averagings"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    elastic_job.PATIENCE_SECONDS = 600.0
    with said_if_interrupted("nothing is kept of it"):
        for seed in given.seeds:
            unequal = trained(STEPS, [FAST, SLOW], seed)
            pause = 2 / (1 / FAST + 1 / SLOW)
            equal = trained(sum(unequal["steps"]) // 2, [pause, pause], seed)
            gap = 100 * (unequal["loss"] / equal["loss"] - 1)
            print(f"seed {seed}: unequal {unequal}, equal {equal}: loss {gap:+.2f} %", flush=True)


if __name__ == "__main__":
    main()
