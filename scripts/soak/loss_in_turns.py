"""What faults cost in loss: members of one process, of whom some are struck, beside the same undisturbed.

A member is struck every so many averagings on the average: "replaced" is killed, and another joins at once;
"away" stands still for three averagings of the others, and comes back; "in every way" it may also leave or
miss a message, and others join. After each averaging all who took part must hold one model.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from typing import Any

import torch

from elastic.in_turns import VOTE, Faulty, InTurns
from learner import BATCH, EVERY, USUAL, Learner, checksum, diloco, heldout_loss
from thinwire.elastic import InProcessLighthouse
from thinwire.local_sgd.elastic_members import Member

STRIKE_EVERY = 13
FEWEST, MOST = 2, 6
DATA = 50  # apart are the members' numbers of two runs on other samples
KINDS = ["killed", "left", "away", "cut", "joined"]
CUT = ["who takes part", "round 1", "round 2", VOTE]


class Training(InTurns[Member]):
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
        self.joins_at, self.strikes = [0] * USUAL, dict[int, list[tuple[int, str]]]()
        self.draw, self.counts = random.Random(seed + 17), Counter[str]()
        self.draw_strikes(averagings)
        self.samples, self.checksums = 0, dict[int, list[str]]()
        super().__init__(self.joins_at, lighthouse=InProcessLighthouse(1, 1e9, send_optimizer=send_optimizer))
        losses = {each for each in self.results if isinstance(each, float)}
        assert len(losses) == 1, self.results
        self.loss = losses.pop()
        unlike = {step: held for step, held in self.checksums.items() if len(set(held)) > 1}
        assert not unlike, unlike

    def draw_strikes(self, averagings: int) -> None:
        now, there = 10, list(range(USUAL))
        while self.struck != "nobody" and now < averagings - 10:
            member = self.draw.choice(there[1:])  # the first stays, to be looked at
            kind = self.draw.choice(KINDS) if self.struck == "in every way" else self.struck
            is_too_many = kind == "joined" and len(there) == MOST
            if is_too_many or (kind in ("killed", "left") and len(there) == FEWEST):
                kind = "cut"
            self.counts[kind] += 1
            if kind != "joined":
                self.strikes.setdefault(member, []).append((now, kind))
            if kind in ("replaced", "killed", "left"):
                there.remove(member)
            if kind in ("replaced", "joined"):
                there.append(len(self.joins_at))
                self.joins_at.append(now * EVERY)
            now += self.draw.randint(STRIKE_EVERY - STRIKE_EVERY // 2, STRIKE_EVERY + STRIKE_EVERY // 2)

    def train(self, member: int) -> float | None:
        steps, number = self.num_steps, member + DATA * self.data
        learner = Learner(os.devnull, number, steps=steps, seed=self.seed)
        group, strikes = self.groups[member], self.strikes.get(member, [])
        faulty = group.transport = Faulty(group.transport, "", -1)  # fails nothing until it is told to
        local = self.adapters[member] = diloco(learner, group)
        with local:
            while local.steps < steps:
                averaging, rest = divmod(local.steps, EVERY)
                # As soon as it is there: who was away meanwhile is struck when it is back.
                if strikes and not rest and averaging >= strikes[0][0]:
                    _, kind = strikes.pop(0)
                    if kind == "cut":
                        faulty.words, faulty.place = self.draw.choice(CUT), 1
                    elif kind == "away":
                        self.wait_until((averaging + 3) * EVERY)
                    else:
                        self.end("leave" if kind == "left" else kind, member)
                learner.learn(local.steps)
                self.samples += BATCH
                if not local.steps % EVERY:
                    self.checksums.setdefault(local.steps, []).append(checksum(learner.model))
        return None if local.is_leaving else heldout_loss(learner.model, learner.text)


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
            ("replaced, optimizer reset", given.averagings, {"struck": "replaced", "send_optimizer": False}),
            ("in every way", given.averagings, {"struck": "in every way"}),
        ]
        for name, averagings, changed in kinds:
            run = Training(averagings=averagings, seed=seed, **changed)
            equal = sum(len(held) > 1 for held in run.checksums.values())
            print(
                f"seed {seed}, {name}: {run.loss:.5f} after {run.samples} samples, "
                f"{100 * (run.loss / calm.loss - 1):+.2f} %; struck {dict(run.counts)}, {equal} models equal",
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
