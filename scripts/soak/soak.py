"""A long run with faults of every kind, by seed: `make soak`.

Four processes train a byte model on real text, with loss scaling. Some steps overflow, some processes
are slow or stand still for a moment; others die, raise, or stall for too long, and all start again from
the last checkpoint. At the end all processes must have the same parameters, to the bit, and what was
applied plus what is still owed must be the sum of the true mean gradients.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import thinwire
from by_hand import said_if_interrupted
from processes import Setting, run_fresh
from thinwire import CommunicationError, PowerSGD
from thinwire.testing import Fault, InjectedError, Kind, fail_at, faults
from thinwire.testing.faults import RESTART_COUNT

BATCH, CONTEXT = 4, 8
TIMEOUT_SECONDS = 3.0
SAY_EVERY_SECONDS = 10.0
PASSING: tuple[Kind, ...] = ("non-finite", "stall", "slow")  # those that need no restart
LOSSES: tuple[Kind, ...] = ("kill", "raise", "stall")  # those that need a restart


@dataclass(frozen=True)
class Told:
    """What a process tells when it ends, if it can; norms are relative to the sum of true means."""

    error: str  # the kind that ended it, "" at the end of training
    struck: list[Fault]
    step: int  # of the job, lost and repeated ones once
    skipped: int  # of these steps, those that overflowed
    checksum: str  # of its parameters
    gap: float  # by which the identity is missed
    owed: float  # the norm of what is still owed
    ratio: float  # the compression ratio


class ByteModel(nn.Module):
    """The next byte from those before it."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.recur(self.embed(tokens))[0]))


@dataclass(frozen=True)
class Soak:
    """A job, and how many faults strike it."""

    seed: int
    steps: int
    num_faults: int
    num_losses: int
    processes: int = 4
    save_every: int = 20
    log: bool = False

    def schedule(self) -> list[Fault]:
        """Faults that pass, and one loss of a process for each incarnation but the last."""
        draw = random.Random(self.seed)
        passing = []
        for step in sorted(draw.sample(range(self.steps), self.num_faults)):
            kind = draw.choice(PASSING)
            seconds = None if kind == "non-finite" else 0.05
            passing.append(fail_at(draw.randrange(self.processes), step, kind, seconds=seconds, restart=None))
        draw = random.Random(self.seed + 1)
        losses = []
        lost_at = sorted(draw.sample(range(self.steps // 20, self.steps), self.num_losses))
        for restart, step in enumerate(lost_at):
            struck, kind = draw.randrange(self.processes), LOSSES[restart % len(LOSSES)]
            seconds = 3 * TIMEOUT_SECONDS if kind == "stall" else None
            after = {"after_messages": draw.randrange(3)}
            losses.append(fail_at(struck, step, kind, **after, seconds=seconds, restart=restart))
        return passing + losses

    def run(self) -> tuple[list[Told], Counter[str], int]:
        """Run the job to its end; the last words of all processes, the faults that struck, the restarts."""
        given, struck = self.schedule(), Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            for restart in range(self.num_losses + 1):
                ended = run_fresh(
                    incarnation,
                    self,
                    Path(folder, "checkpoint.pt"),
                    restart,
                    processes=self.processes,
                    timeout_seconds=TIMEOUT_SECONDS,
                    limit_seconds=max(60.0, self.steps),
                )
                told = [each.told for each in ended]
                alive = [each for each in told if isinstance(each, Told)]
                killed = [fault for fault in given if (fault.kind, fault.restart) == ("kill", restart)]
                assert len(alive) == self.processes - len(killed), told
                struck.update(fault.kind for each in alive for fault in each.struck)
                struck.update(fault.kind for fault in killed)
                if self.log:
                    print(f"restart {restart}: ended at step {alive[0].step}, {alive[0].error}", flush=True)
                if not alive[0].error:
                    return alive, struck, restart
        raise AssertionError(f"the job did not end: {told}")


def incarnation(setting: Setting, soak: Soak, checkpoint: Path, restart: int) -> Told:
    os.environ[RESTART_COUNT] = str(restart)
    setting.join_group()
    job = Job(checkpoint, soak.save_every)
    error, begun, first = "", time.monotonic(), job.sync.steps
    shown = begun
    with faults(job.sync, soak.schedule()) as struck:
        try:
            while job.sync.steps < soak.steps:
                job.step()
                now, done = time.monotonic(), job.sync.steps
                if soak.log and setting.process_rank == 0 and now > shown + SAY_EVERY_SECONDS:
                    shown, left = now, (now - begun) / (done - first) * (soak.steps - done)
                    print(
                        f"step {done} of {soak.steps}, about {left:.0f} s left", file=sys.stderr, flush=True
                    )
        except (CommunicationError, InjectedError) as raised:
            error = type(raised).__name__
    told = job.told() if not error else ("", 0.0, 0.0)
    stats = job.sync.stats()
    return Told(error, list(struck), stats.steps, stats.nonfinite_steps, *told, stats.compression_ratio)


class Job:
    """What is trained, and the sums that the identity is about."""

    def __init__(self, checkpoint: Path, save_every: int) -> None:
        torch.manual_seed(0)
        files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
        data = bytearray(b"".join(map(Path.read_bytes, files)))
        self.text = torch.frombuffer(data, dtype=torch.uint8).long()
        self.checkpoint, self.save_every = checkpoint, save_every
        self.module = ByteModel()
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=30)
        self.ddp_model = DistributedDataParallel(self.module, bucket_cap_mb=0.05)
        self.sync = thinwire.attach(self.ddp_model, PowerSGD(matrix_rank=2), grad_scaler=self.scaler)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.2, momentum=0.9)
        self.applied = [torch.zeros(p.shape, dtype=torch.float64) for p in self.module.parameters()]
        self.true = [torch.zeros(p.shape, dtype=torch.float64) for p in self.module.parameters()]
        if checkpoint.exists():
            self.load()

    def step(self) -> None:
        if self.sync.steps % self.save_every == 0:
            self.save()
        own = torch.autograd.grad(self.loss(self.module), list(self.module.parameters()))
        means = [gradient.double() for gradient in own]
        for mean in means:
            dist.all_reduce(mean)
        self.optimizer.zero_grad()
        skipped, scale = self.sync.stats().nonfinite_steps, self.scaler.get_scale()
        torch.autograd.backward(self.scaler.scale(self.loss(self.ddp_model)))
        if self.sync.stats().nonfinite_steps == skipped:
            for place, parameter in enumerate(self.module.parameters()):
                assert parameter.grad is not None
                self.applied[place] += parameter.grad.double() / scale
                self.true[place] += means[place] / dist.get_world_size()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def loss(self, model: nn.Module) -> Tensor:
        draws = torch.Generator().manual_seed(1000 * self.sync.steps + dist.get_rank())
        starts = torch.randint(len(self.text) - CONTEXT - 1, (BATCH,), generator=draws)
        window = self.text[starts[:, None] + torch.arange(CONTEXT + 1)]
        return nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizer, "scaler": self.scaler, "sync": self.sync}

    def save(self) -> None:
        state: dict[str, Any] = {name: part.state_dict() for name, part in self.parts.items()}
        if dist.get_rank() == 0:
            part = self.checkpoint.with_suffix(".part")
            torch.save(state | {"applied": self.applied, "true": self.true}, part)
            part.replace(self.checkpoint)

    def load(self) -> None:
        saved = torch.load(self.checkpoint, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self.applied, self.true = saved["applied"], saved["true"]

    def told(self) -> tuple[str, float, float]:
        """Checksum of the parameters, and how far the identity is missed."""
        owed = dict(self.sync.state_dict()["error"])
        names = [name for name, _ in self.module.named_parameters()]
        missed = [
            applied + owed.get(name, torch.zeros(())) - true
            for name, applied, true in zip(names, self.applied, self.true, strict=True)
        ]
        total = norm(self.true)
        raw = torch.cat([p.detach().view(-1) for p in self.module.parameters()]).numpy().tobytes()
        return f"{len(raw)} {hash_of(raw)}", norm(missed) / total, norm(list(owed.values())) / total


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([tensor.double().reshape(-1) for tensor in tensors]).norm())


def hash_of(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--faults", type=int, default=200, dest="num_faults")
    parser.add_argument("--losses", type=int, default=6, dest="num_losses")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    with said_if_interrupted("nothing is kept: a soak can't be resumed"):
        told, struck, restarts = Soak(**vars(options), log=True).run()
    same = len({each.checksum for each in told}) == 1
    gap = max(each.gap for each in told)
    print(f"{told[0].step} steps, {told[0].skipped} skipped, {restarts} restarts, faults {dict(struck)}")
    print(f"{len(told)} processes bit-equal: {same}; identity missed by {gap:.1e} of the sum of true means")
    print(f"still owed {told[0].owed:.2f} of it; compression ratio {told[0].ratio:.1f}")
    print(f"{time.monotonic() - start:.0f} s")
    assert set(struck) == {"non-finite", "slow", "stall", "kill", "raise"}
    assert restarts == options.num_losses
    for each in told:
        assert each.step == options.steps
        assert each.owed > 1e-3  # a loss of this residual would show
        assert each.ratio > 5
    sys.exit(0 if same and gap < 1e-5 else 1)


if __name__ == "__main__":
    main()
