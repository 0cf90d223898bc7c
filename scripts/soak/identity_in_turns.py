"""A long run of members that come, leave and miss messages: movement and residuals are all changes."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import Any

from elastic.test_membership import EVERY, Run

MESSAGES = ["round 1", "round 2", "who takes part"]


def lives(averagings: int, seed: int) -> dict[str, Any]:
    """Draw who joins when, who leaves when, and who misses which message."""
    draw, steps, now = random.Random(seed), averagings * EVERY, 10
    joins_at, ends, faults = [0, 0, 0], dict[int, tuple[int, str]](), dict[int, tuple[str, int]]()
    while now < steps - 10 * EVERY:
        member, leaves_at = len(joins_at), now + draw.randint(4, 30) * EVERY
        joins_at.append(now)
        if leaves_at < steps - 3 * EVERY:
            ends[member] = (leaves_at, "leave")
        if draw.random() < 0.4:
            faults[member] = (draw.choice(MESSAGES), draw.randint(1, 6))
        now += draw.randint(6, 20)
    return {"joins_at": joins_at, "ends": ends, "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--averagings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run = Run(**lives(given.averagings, given.seed), steps=given.averagings * EVERY, wait_seconds=1e9)
    run.check_equal()
    assert set(run.results) == {"done", "left"}, run.errors
    stats = run.adapters[0].membership()
    lost = run.lost(least_owed=0.005)  # of one averaging, and the changes of all
    print(f"{Counter(run.results)}, {stats}: relative difference {lost:.1e}")
    assert lost < 1e-5


if __name__ == "__main__":
    main()
