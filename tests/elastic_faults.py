"""Faults of real elastic members, one kind after the other, then many at random.

After every averaging all members must hold one model, nothing may hang beyond its timeout, and no process
may be left behind. The time is from the fault to the next but one averaging of the others.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from elastic import job as elastic_job
from elastic.job import Job
from thinwire.lab.layout import Layout
from thinwire.lab.network import Network

NUM_STEPS = 100_000
LEAST = 3  # members of the soak


def killed(job: Job, members: int) -> str:
    """A member is killed between two averagings."""
    job.processes[-1].kill()
    return "losses"


def stopped(job: Job, members: int) -> str:
    """A member stands still for longer than the timeout, and goes on."""
    os.kill(job.processes[-1].pid, signal.SIGSTOP)
    job.wait(lambda: job.told(event="averaged", member=0, losses=1))
    os.kill(job.processes[-1].pid, signal.SIGCONT)
    job.wait_for_averagings(members - 1)
    return "losses"


def told_to_leave(job: Job, members: int) -> str:
    """A member gets SIGTERM."""
    os.kill(job.processes[-1].pid, signal.SIGTERM)
    return "leaves"


def all_but_one_killed(job: Job, members: int) -> str:
    """All are killed but one."""
    for process in job.processes[1:]:
        process.kill()
    return "losses"


def cut_off(job: Job, members: int) -> str:
    """The link of a member is cut for eight seconds, longer than the timeout, and mended."""
    job.set_link(members - 1, "down")
    time.sleep(8)
    job.wait(lambda: job.told(event="averaged", member=0, losses=1))
    job.set_link(members - 1, "up")
    job.wait_for_averagings(members - 1)
    return "losses"


def slowed(job: Job, members: int) -> str:
    """A member stands still again and again, each time for less than the timeout; the others wait for it."""
    for _ in range(3):
        os.kill(job.processes[-1].pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(job.processes[-1].pid, signal.SIGCONT)
        time.sleep(0.5)
    return ""


def dark(job: Job, members: int) -> str:
    """The lighthouse dies, and comes back after three seconds."""
    job.darken()
    time.sleep(3)
    job.light()
    return ""


def served_by_the_dying(job: Job, members: int) -> str:
    """The member that serves a newcomer dies as it begins to."""
    job.start(members)
    job.wait(lambda: job.told(event="joined", member=members))
    return "losses"


def dying_in(words: str) -> Callable[[Job, int], str]:
    """Return a fault: a member dies as it sends a certain message."""

    def fault(job: Job, members: int) -> str:
        job.wait(lambda: not job.processes[-1].is_alive())
        return "losses"

    fault.__doc__ = f"A member dies as it sends: {words}."
    return fault


MATRIX: list[tuple[Callable[[Job, int], str], str]] = [
    (cut_off, ""),
    (slowed, ""),
    (dark, ""),
    (dying_in("who takes part"), "who takes part"),
    (dying_in("round 1"), "round 1"),
    (dying_in("round 2"), "round 2"),
    (dying_in("whether all have received"), "whether all have received"),
    (served_by_the_dying, "handing"),
    (killed, ""),
    (stopped, ""),
    (told_to_leave, ""),
    (all_but_one_killed, ""),
]


def run_one(fault: Callable[[Job, int], str], words: str, members: int) -> None:
    """Start members, let the fault strike, and see that the others go on."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        # Only here: a network of the lab's needs root, or user namespaces.
        network = opened.enter_context(Network(Layout(members + 1))) if fault is cut_off else None
        job = Job(Path(folder), network)
        try:
            # The first in the order of names serves newcomers, and must die there; else the last dies.
            deadly = 0 if words == "handing" else members - 1
            for member in range(members):
                dies_at = (words, 6) if words and member == deadly else None
                # A lighthouse that comes back has forgotten who was there: of fewer than most, two parts
                # could each go on by themselves for an averaging.
                least = members // 2 + 1 if fault is dark else 1
                job.start(member, min_members=least, dies_at=dies_at)
            watched = 1 if words == "handing" else 0
            job.wait(lambda: len(job.told(event="averaged", members=members)) >= members)
            start = time.monotonic()
            counted = fault(job, members)
            if counted:
                job.wait(lambda: any(each[counted] for each in job.told(event="averaged", member=watched)))
            job.wait_for_averagings(watched)
            seconds = time.monotonic() - start
            compared = job.check_equal()
            retries = job.told(event="averaged", member=watched)[-1]["retries"]
            print(
                f"{members} members. {fault.__doc__} Went on within {seconds:.1f} s, {retries} averagings "
                f"repeated, models equal at {compared} steps",
                flush=True,
            )
        finally:
            job.close()


def soak(averagings: int, seed: int) -> None:
    """Let faults strike at random until so many averagings have been."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        counts = {"killed": 0, "stopped": 0, "left": 0, "joined": 0}
        # Of up to six, with one struck at a time: no two parts of the group can both be enough.
        alive = {member: job.start(member, min_members=LEAST) for member in range(LEAST + 2)}
        start, started = time.monotonic(), max(alive)
        try:
            # Member 0 stays, to count; it is stopped now and then, too.
            while (len(job.told(event="averaged", member=0))) < averagings:
                # By averagings and not by the clock: a busy computer gets as many faults as an idle one.
                target = len(job.told(event="averaged", member=0)) + draw.randint(5, 25)
                job.wait(lambda target=target: len(job.told(event="averaged", member=0)) >= target)  # type: ignore[misc]
                others = [member for member in alive if member]
                kind = draw.choice(list(counts))
                if kind == "joined" or (kind != "stopped" and len(alive) <= LEAST + 1):
                    if len(alive) < 6:
                        started += 1
                        alive[started] = job.start(started, min_members=LEAST)
                        counts["joined"] += 1
                elif kind == "stopped":
                    pid = alive[draw.choice(list(alive))].pid
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(draw.uniform(0.5, 5))
                    os.kill(pid, signal.SIGCONT)
                    counts["stopped"] += 1
                else:
                    struck = alive.pop(draw.choice(others))
                    os.kill(struck.pid, signal.SIGKILL if kind == "killed" else signal.SIGTERM)
                    counts[kind] += 1
            told = job.told(event="averaged", member=0)
            loss = statistics.mean(line["loss"] for line in told[-20:])
            print(
                f"{len(told)} averagings in {time.monotonic() - start:.0f} s with {counts}: models equal at "
                f"{job.check_equal()} steps, {len(job.told(event='left'))} have told that they left, "
                f"{len(job.told(event='raised'))} raised, loss {loss:.4f}, "
                f"member 0: { {key: told[-1][key] for key in ('retries', 'joins', 'leaves', 'losses')} }",
                flush=True,
            )
        finally:
            job.close()
        assert not [process for process in job.processes if process.is_alive()]


def main() -> None:
    """Run the matrix, then the soak."""
    elastic_job.PATIENCE_SECONDS = 600.0  # on a busy computer, a member may be late by minutes
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="*", default=[2, 3, 4, 6])
    parser.add_argument("--averagings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    for members in given.members:
        for fault, words in MATRIX:
            if given.only in (fault.__doc__ or ""):
                run_one(fault, words, members)
    if given.averagings:
        soak(given.averagings, given.seed)


if __name__ == "__main__":
    main()
