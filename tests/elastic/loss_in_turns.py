"""What faults cost in loss: members of one process, of whom some are struck, beside the same undisturbed.

A member is struck every so many averagings on the average: "replaced" is killed, and another joins at once;
"away" stands still for three averagings of the others, and comes back.
"""

from __future__ import annotations

import argparse
import os
import random
from contextlib import suppress
from typing import Any

import torch

from elastic.in_turns import Killed, Reached
from elastic.learner import BATCH, EVERY, USUAL, Learner, diloco, heldout_loss
from thinwire.channel import run_members
from thinwire.channel.in_process import wait_for
from thinwire.elastic import InProcessGroup, InProcessLighthouse
from thinwire.errors import CommunicationError
from thinwire.localsgd.elastic import LocalSGD

STRIKE_EVERY = 13
DATA = 50  # apart are the members' numbers of two runs on other samples


class Training:
    """A run of `USUAL` members; `loss` is held out, of the model that all hold, after `samples`."""

    def __init__(
        self,
        *,
        averagings: int,
        seed: int,
        struck: str = "nobody",
        send_optimizer: bool = True,
        data: int = 0,
    ) -> None:
        self.num_steps, self.seed, self.struck, self.data = averagings * EVERY, seed, struck, data
        self.joins_at, self.strikes_at = [0] * USUAL, dict[int, list[int]]()
        self.draw_strikes(averagings, random.Random(seed + 17))
        self.lighthouse = InProcessLighthouse(1, 1e9, send_optimizer=send_optimizer)
        self.groups = {
            member: InProcessGroup(self.lighthouse) for member, at in enumerate(self.joins_at) if not at
        }
        self.fronts: dict[int, LocalSGD] = {}
        self.samples = 0
        losses = {each for each in run_members(len(self.joins_at), self.live) if each is not None}
        assert len(losses) == 1, losses
        self.loss = losses.pop()

    def draw_strikes(self, averagings: int, draw: random.Random) -> None:
        now, there = 10, list(range(USUAL))
        while self.struck != "nobody" and now < averagings - 10:
            member = draw.choice(there[1:])
            self.strikes_at.setdefault(member, []).append(now)
            if self.struck == "replaced":
                there.remove(member)
                there.append(len(self.joins_at))
                self.joins_at.append(now)
            now += draw.randint(STRIKE_EVERY - STRIKE_EVERY // 2, STRIKE_EVERY + STRIKE_EVERY // 2)

    def wait_until(self, averaging: int) -> None:
        reached = Reached(lambda: list(self.fronts.values()), averaging * EVERY)
        while not reached.is_complete:
            with suppress(CommunicationError):  # all wait for one that has been struck, and go on without it
                wait_for(reached)

    def live(self, member: int) -> float | None:
        if self.joins_at[member]:
            self.wait_until(self.joins_at[member])
            self.groups[member] = InProcessGroup(self.lighthouse)
        try:
            return self.train(member)
        except Killed:
            return None

    def train(self, member: int) -> float:
        steps, number = self.num_steps, member + DATA * self.data
        learner = Learner(os.devnull, number, steps=steps, seed=self.seed, dies_at=None)
        group, strikes_at = self.groups[member], self.strikes_at.get(member, [])
        local = self.fronts[member] = diloco(learner, group)
        with local:
            while local.steps < steps:
                averaging, rest = divmod(local.steps, EVERY)
                if strikes_at and not rest and averaging >= strikes_at[0]:
                    strikes_at.pop(0)
                    if self.struck == "replaced":
                        group.leave = lambda: None  # type: ignore[method-assign]
                        del self.fronts[member]
                        raise Killed
                    self.wait_until(averaging + 3)
                learner.learn(local.steps)
                self.samples += BATCH
        return heldout_loss(learner.model, learner.text)


def main() -> None:
    """Train undisturbed, on other samples, on fewer, and struck; a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--averagings", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument(
        "--equal-samples", action="store_true", help="undisturbed with as many as each struck run, too"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in given.seeds:
        calm = Training(averagings=given.averagings, seed=seed)
        print(f"seed {seed}, undisturbed: {calm.loss:.5f} after {calm.samples} samples", flush=True)
        kinds: list[tuple[str, int, dict[str, Any]]] = [
            ("on other samples", given.averagings, {"data": 1}),
            ("on 5 % fewer", round(0.95 * given.averagings), {}),
            ("away", given.averagings, {"struck": "away"}),
            ("replaced", given.averagings, {"struck": "replaced"}),
            ("replaced, optimizer anew", given.averagings, {"struck": "replaced", "send_optimizer": False}),
        ]
        for name, averagings, changed in kinds:
            run = Training(averagings=averagings, seed=seed, **changed)
            print(
                f"seed {seed}, {name}: {run.loss:.5f} after {run.samples} samples, "
                f"{100 * (run.loss / calm.loss - 1):+.2f} %",
                flush=True,
            )
            if given.equal_samples and "struck" in changed:
                same = Training(averagings=round(run.samples / (USUAL * EVERY * BATCH)), seed=seed)
                print(
                    f"seed {seed}, undisturbed: {same.loss:.5f} after {same.samples} samples; {name} beside "
                    f"it {100 * (run.loss / same.loss - 1):+.2f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
