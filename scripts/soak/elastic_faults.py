"""Faults of real elastic members, one kind after the other, then many at random; of torchft's own, too.

After every averaging all members must hold one model, nothing may hang beyond its timeout, and no process
may be left behind. The time is from the fault to the next but one averaging of the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import job as elastic_job
from by_hand import said_if_interrupted
from elastic_soak import soaked
from job import Job
from learner import BATCH, EVERY, USUAL
from loss_in_turns import Training
from thinwire.lab import Network

ROOT = Path(__file__).parents[2]


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
        job.stop(members - 1, 1.5)
        time.sleep(0.5)
    return ""


def dark(job: Job, members: int) -> str:
    """The lighthouse dies, and comes back after three seconds."""
    job.darken_for(3)
    return ""


def served_by_the_dying(job: Job, members: int) -> str:
    """The member that serves a newcomer dies as it begins to."""
    # The first in the order of names serves newcomers. Only now: it has served those that it began with.
    os.kill(job.processes[0].pid, signal.SIGUSR2)
    job.start(members)
    job.wait(lambda: job.told(event="averaged", member=members))
    return "losses"


def joined_by_two(job: Job, members: int) -> str:
    """Two members join at once."""
    newcomers = members, members + 1
    for newcomer in newcomers:
        job.start(newcomer)
    job.wait(lambda: all(job.told(event="averaged", member=newcomer) for newcomer in newcomers))
    return "joins"


def dying_as_it_receives(job: Job, members: int) -> str:
    """A newcomer dies as it receives what the others hold."""
    newcomer = job.start(members, dies_at=("receiving", 1))
    job.wait(lambda: not newcomer.is_alive())
    return ""


def last_one_dying_as_it_serves(job: Job, members: int) -> str:
    """The only member that is left dies as it serves two newcomers, which begin from their own."""
    for process in job.processes[1:]:
        process.kill()
    job.wait(lambda: job.told(event="averaged", member=0, members=1))
    os.kill(job.processes[0].pid, signal.SIGUSR2)
    for newcomer in (members, members + 1):
        job.start(newcomer)
    job.wait(lambda: job.told(event="averaged", member=members, members=2))
    return ""


def dying_in(moment: str) -> Callable[[Job, int], str]:
    """Return a fault: a member dies in a certain moment of an averaging."""

    def fault(job: Job, members: int) -> str:
        job.wait(lambda: not job.processes[-1].is_alive())
        return "losses"

    fault.__doc__ = f"A member dies in the {moment}."
    return fault


MATRIX: list[tuple[Callable[[Job, int], str], str]] = [
    (cut_off, ""),
    (slowed, ""),
    (dark, ""),
    (dying_in("asking"), "asking"),
    (dying_in("all-to-all"), "all-to-all"),
    (dying_in("all-gather"), "all-gather"),
    (dying_in("vote"), "vote"),
    (served_by_the_dying, ""),
    (killed, ""),
    (stopped, ""),
    (told_to_leave, ""),
    (all_but_one_killed, ""),
    (joined_by_two, ""),
    (dying_as_it_receives, ""),
    (last_one_dying_as_it_serves, ""),
]


def run_one(fault: Callable[[Job, int], str], moment: str, members: int, *, peer: bool) -> None:
    """Start members, let the fault strike, and see that the others go on."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        # Only here: a network of the lab's needs root, or user namespaces.
        network = opened.enter_context(Network(members + 1)) if fault is cut_off else None
        # A lighthouse that comes back has forgotten who was there: of fewer than most, two parts could each
        # go on by themselves for an averaging.
        least = members // 2 + 1 if fault is dark else 1
        settings = {"peer": peer, "min_members": least, "step_seconds": 0.01}
        job = Job(Path(folder), network, learners=settings, least_at_lighthouse=least if peer else 1)
        # Whom the fault does not kill.
        watched = 1 if fault is served_by_the_dying else 0
        watched = members if fault is last_one_dying_as_it_serves else watched
        went_on = "did not go on"
        try:
            for member in range(members):
                job.start(member, dies_at=(moment, 6) if moment and member == members - 1 else None)
            job.wait(lambda: len(job.told(event="averaged", members=members)) >= members)
            start = time.monotonic()
            counted = fault(job, members)
            if peer and counted == "leaves":
                counted = "losses"  # it knows no other
            if counted:
                job.wait(lambda: any(each[counted] for each in job.told(event="averaged", member=watched)))
            job.wait_for_averagings(watched)
            went_on = f"went on within {time.monotonic() - start:.1f} s"
        except AssertionError:
            if not peer:
                raise
        finally:
            compared = job.check_equal(by="lineage" if fault is last_one_dying_as_it_serves else "step")
            told = job.told(event="averaged", member=watched)
            again = {key: told[-1].get(key, 0) for key in ("retries", "discarded_steps")} if told else {}
            raised = {(each["member"], each["message"][:60]) for each in job.told(event="raised")}
            job.close()
    print(
        f"{'torchft' if peer else 'thinwire'}, {members} members. {fault.__doc__} {went_on}; {again}, raised "
        f"{raised or 'nothing'}, models equal at {compared} steps",
        flush=True,
    )


def main() -> None:
    """Run the matrix, then the soaks; what a file has of these already is read there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="*", default=[2, 3, 4, 6])
    parser.add_argument("--averagings", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--peer", action="store_true", help="torchft's DiLoCo in the place of Thinwire's")
    parser.add_argument(
        "--spare-lighthouse", action="store_true", help="in the soaks: torchft's members wait 120 s for one"
    )
    parser.add_argument(
        "--inside", choices=("ddp", "fsdp"), default="", help="in the soaks: 2 processes each"
    )
    parser.add_argument("--patience-seconds", type=float, default=600.0, help="of a busy computer")
    parser.add_argument("--file", type=Path, default=ROOT / "build" / "elastic-soaks.jsonl")
    given = parser.parse_args()
    given.file.parent.mkdir(exist_ok=True)
    elastic_job.PATIENCE_SECONDS = given.patience_seconds
    with said_if_interrupted(
        f"the matrix begins anew, --members and --only choose from it; soaks that ended are in {given.file}"
    ):
        _run_all(given)


def _run_all(given: argparse.Namespace) -> None:
    wanted = [
        (fault, moment, members)
        for members in given.members
        for fault, moment in MATRIX
        if given.only in (fault.__doc__ or "")
        and not (given.peer and fault is dying_as_it_receives)
        and not (moment == "all-gather" and (given.peer or members == 2))  # two send each other all codes
    ]
    begun = time.monotonic()
    for number, (fault, moment, members) in enumerate(wanted):
        gone = time.monotonic() - begun
        left = f"about {gone / number * (len(wanted) - number):.0f} s left" if number else "of seconds each"
        print(f"fault {number + 1} of {len(wanted)}, {left}", file=sys.stderr, flush=True)
        run_one(fault, moment, members, peer=given.peer)
    for seed in given.seeds if given.averagings else []:
        struck = soaked(
            given.file,
            averagings=given.averagings,
            seed=seed,
            peer=given.peer,
            spare_lighthouse=given.spare_lighthouse,
            inside=given.inside,
        )
        if given.inside:
            continue
        # At equal tokens: of as many members as there are at the beginning.
        calm = Training(averagings=round(struck["samples"] / (USUAL * EVERY * BATCH)), seed=seed).loss
        print(
            f"seed {seed}: held-out loss {struck['loss']:.4f}, undisturbed {calm:.4f} nats a byte: "
            f"{100 * (struck['loss'] / calm - 1):+.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
