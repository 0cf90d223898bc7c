"""Elastic members of one process, struck at random: one model after each averaging, and the loss."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from elastic.in_turns import Faulty, Killed, Reached, Turn
from thinwire.algorithms import Quantize
from thinwire.channel import run_members
from thinwire.channel.in_process import wait_for
from thinwire.elastic import DiLoCo, InProcessGroup, InProcessLighthouse
from thinwire.errors import CommunicationError

EVERY, BATCH = 2, 32
MOST, FEWEST, FIRST = 6, 2, 4
CUT = ["who takes part", "round 1", "round 2", "whether all have received everything"]


@dataclass
class Life:
    """A member from when it joins to its end.

    `ends`: by averaging, what it does: "killed", "left", "away" (it stands still, and comes back). `cuts`: by
    averaging, the words of a message that does not come.
    """

    joins_at: int = 0
    ends: dict[int, str] = field(default_factory=dict)
    cuts: dict[int, str] = field(default_factory=dict)


def drawn_lives(averagings: int, seed: int) -> tuple[list[Life], Counter[str]]:
    """Lives of members struck every 5 to 15 averagings, and how many strikes of each kind there are."""
    draw, counts = random.Random(seed), Counter[str]()
    lives = [Life() for _ in range(FIRST)]
    there, now = list(lives), 10
    while now < averagings - 20:
        # The first stays, to be looked at.
        struck = draw.choice(there[1:])
        kind = draw.choice(["killed", "left", "away", "cut", "joined"])
        is_too_many = kind == "joined" and len(there) == MOST
        if is_too_many or (kind in ("killed", "left") and len(there) == FEWEST):
            kind = "cut"
        counts[kind] += 1
        if kind == "joined":
            lives.append(Life(joins_at=now))
            there.append(lives[-1])
        elif kind == "cut":
            struck.cuts[now] = draw.choice(CUT)
        else:
            struck.ends[now] = kind
        if kind in ("killed", "left"):
            there.remove(struck)
        now += draw.randint(5, 15)
    return lives, counts


class Soak:
    """A run of such lives; the loss is of the first one's model."""

    def __init__(self, lives: list[Life], averagings: int) -> None:
        self.lives, self.num_steps = lives, averagings * EVERY
        self.lighthouse = InProcessLighthouse(1, 1e6)
        self.groups = {
            number: InProcessGroup(self.lighthouse) for number, life in enumerate(lives) if not life.joins_at
        }
        self.fronts: dict[int, DiLoCo] = {}
        self.model_at: dict[int, torch.Tensor] = {}
        self.num_compared = self.num_samples = 0
        self.loss = 0.0
        generator = torch.Generator().manual_seed(0)
        self.teacher = torch.randn(32, 4, generator=generator)
        self.held_out = torch.randn(4096, 32, generator=generator)
        self.results = Counter(run_members(len(lives), self.body))

    def body(self, number: int) -> str:
        life = self.lives[number]
        if life.joins_at:
            self.wait_until(life.joins_at)
            self.groups[number] = InProcessGroup(self.lighthouse)
        try:
            return self.train(number, life)
        except Killed:
            return "killed"

    def wait_until(self, averaging: int) -> None:
        reached = Reached(self.fronts.values, averaging * EVERY)
        while not reached.is_complete:
            with suppress(CommunicationError):  # all wait for one that has been struck, and go on without it
                wait_for(reached)

    def loss_of(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        error: torch.Tensor = model(inputs) - (inputs @ self.teacher).tanh()
        return error.square().mean()

    def train(self, number: int, life: Life) -> str:
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        draws = torch.Generator().manual_seed(1000 + number)
        group = self.groups[number]
        group.transport = Faulty(group.transport, "", -1)  # strikes nothing until it is told to
        algorithm = Quantize(bits=4, block=16, error_feedback=True)
        local = DiLoCo(model, optimizer, every_steps=EVERY, algorithm=algorithm, group=group)
        self.fronts[number] = local
        with local:
            while local.steps < self.num_steps:
                averaging = local.steps // EVERY
                if not local.steps % EVERY:
                    self.strike(life, averaging, local, group)
                # To zero, so that the end does not depend on the last batches.
                optimizer.param_groups[0]["lr"] = 1e-2 * (1 - local.steps / self.num_steps)
                optimizer.zero_grad()
                loss = self.loss_of(model, torch.randn(BATCH, 32, generator=draws))
                torch.autograd.backward(loss)
                self.num_samples += BATCH
                optimizer.step()
                wait_for(Turn())
                if not local.steps % EVERY:
                    self.compare(local.steps, model)
        if number == 0:
            self.loss = float(self.loss_of(model, self.held_out).detach())
        return "left" if local.is_leaving else "done"

    def strike(self, life: Life, averaging: int, local: DiLoCo, group: InProcessGroup) -> None:
        # As soon as it is there: who was away meanwhile is struck when it is back.
        for at in [at for at in life.cuts if at <= averaging]:
            assert isinstance(group.transport, Faulty)
            group.transport.words, group.transport.place = life.cuts.pop(at), 1
        for at in [at for at in life.ends if at <= averaging]:
            how = life.ends.pop(at)
            if how == "killed":
                group.leave = lambda: None  # type: ignore[method-assign]
                raise Killed
            if how == "left":
                local.leave()
            else:
                self.wait_until(averaging + 3)

    def compare(self, step: int, model: nn.Module) -> None:
        held = torch.cat([each.detach().flatten() for each in model.parameters()])
        first = self.model_at.setdefault(step, held)
        assert torch.equal(first, held), f"step {step}"
        self.num_compared += first is not held


def main() -> None:
    """Soak, and train as much without any strike."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--averagings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lives, counts = drawn_lives(given.averagings, given.seed)
    start = time.process_time()
    soak = Soak(lives, given.averagings)
    stats = soak.fronts[0].membership()
    print(
        f"{len(soak.model_at)} averagings with {dict(counts)}: {dict(soak.results)}; "
        f"{soak.num_compared} models compared, all equal; of the first member {stats}; "
        f"{time.process_time() - start:.0f} s of CPU",
        flush=True,
    )
    calm = Soak([Life() for _ in range(FIRST)], soak.num_samples // (FIRST * BATCH * EVERY))
    print(
        f"held-out loss after {soak.num_samples} samples {soak.loss:.5f}, without strikes {calm.loss:.5f}: "
        f"{100 * (soak.loss / calm.loss - 1):+.2f} %"
    )


if __name__ == "__main__":
    main()
