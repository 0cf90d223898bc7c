"""`thinwire.auto`: what it chooses on a given link, that all choose alike, and that nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from catalog import buckets
from processes import in_each_process
from thinwire import AllReduce, ConfigError, PowerSGD, Watch
from thinwire.advice import automatic
from thinwire.advice.automatic import Auto, Rules
from thinwire.advice.losses import Training
from thinwire.advice.priced import priced
from thinwire.comm import run_members
from thinwire.simulation import Simulation
from thinwire.sync import Engine, engine_of
from thinwire.watch import read_run
from training import error_of, told_by_all
from watch.test_watch import train as train_on


class LinkClock:
    """The clock of a member: 20 ms of arithmetic a step, and a link of so many bytes per second."""

    def __init__(self, engine: Engine, rate: Callable[[], float]) -> None:
        self.engine, self.rate = engine, rate
        self.seconds = 0.0
        self.steps = self.sent = 0

    def __call__(self) -> float:
        steps, sent = self.engine.steps - self.steps, self.engine.traffic.message_bytes - self.sent
        self.steps, self.sent = self.engine.steps, self.engine.traffic.message_bytes
        self.seconds += 0.02 * steps + sent / self.rate()
        return self.seconds


TRAINING = Training("SGD", 2, 10**4, steps=400)
SLOW, FAST = 1e6, 1e12
TRIED = ["AllReduce()", 'Cast("bf16")', "PowerSGD(matrix_rank=4)"]
# Of two untimed and two timed steps each.
ALL_TRIALS = 3 * 4


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """Two members, who try few candidates."""
    few = {name: variant for name, variant in priced().items() if name in TRIED}
    monkeypatch.setattr(automatic, "priced", lambda: few)
    return Simulation(AllReduce(), buckets(), num_workers=2)


def test_members_choose_alike_again_when_the_link_changes(
    simulated: Simulation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was chosen hardly waits for the slow link, so the fast one is found by steps with 16 bits."""
    rate = SLOW
    caplog.set_level(logging.INFO, "thinwire")
    choosers = choosers_of(simulated, lambda: rate)
    used: list[str] = []
    with Watch(simulated.syncs[0], tmp_path / "run.jsonl"):
        for step in range(64):
            rate = FAST if 14 <= step < 40 else SLOW
            train_on(simulated, range(step, step + 1))
            assert simulated.syncs[0].algorithm == simulated.syncs[1].algorithm
            assert choosers[0].trials == choosers[1].trials
            used.append(str(simulated.syncs[0].algorithm))
    chosen = ["PowerSGD(matrix_rank=4)", "AllReduce()", "PowerSGD(matrix_rank=4)"]
    assert [used[step] for step in (ALL_TRIALS, 32, 60)] == chosen
    assert simulated.syncs[0].stats().compression_ratio > 1.5
    # All switches are in the record of the run, and choices are told once, by the first member.
    changes = [(step + 1, used[step]) for step in range(1, 64) if used[step] != used[step - 1]]
    plans = read_run(tmp_path / "run.jsonl").plans
    assert [(plan["step"], plan["algorithm"]) for plan in plans[1:]] == changes
    first, again, second, *others = caplog.messages
    assert len(others) == 2
    assert first.startswith(f"thinwire.auto: from step {ALL_TRIALS} on: Chosen: PowerSGD(matrix_rank=4)")
    assert again.endswith("choosing again")
    assert "Chosen: AllReduce() 20 ms a step." in second


def choosers_of(
    simulated: Simulation, rate: Callable[[], float] = lambda: SLOW, every_steps: int | None = 4
) -> list[Auto]:
    def chooser_of(rank: int) -> Auto:
        clock = LinkClock(simulated.engines[rank], rate)
        return Auto(simulated.syncs[rank], TRAINING, Rules(0.01, 0.05, 2, every_steps), [], clock)

    return run_members(len(simulated.syncs), chooser_of)


def test_a_step_that_is_dropped_is_no_measurement() -> None:
    simulated = Simulation(PowerSGD(matrix_rank=4), buckets(), num_workers=2, on_nonfinite="zero")
    chooser, _ = choosers_of(simulated)
    train_on(simulated, range(8), bad_steps=(3, 5))
    assert simulated.syncs[0].stats().nonfinite_steps == 2
    assert [trial.name for trial in chooser.trials] == ["AllReduce()"]


def test_after_a_single_choice_it_stays_with_what_it_has(simulated: Simulation) -> None:
    """Two processes of a machine send different parts, and a choice must not depend on whose they are."""
    on_machines = Simulation(AllReduce(), simulated.buckets, num_workers=4, workers_per_machine=2)
    choosers = choosers_of(on_machines, every_steps=None)
    train_on(on_machines, range(ALL_TRIALS + 6))
    assert [str(sync.algorithm) for sync in on_machines.syncs] == ["PowerSGD(matrix_rank=4)"] * 4
    assert len({tuple(trial.sent_bytes for trial in chooser.trials) for chooser in choosers}) == 1
    assert not choosers[0].is_choosing


def test_different_arguments_on_a_different_member_are_refused(simulated: Simulation) -> None:
    def body(rank: int) -> str:
        rules = Rules(0.01, 0.05, probe_steps=3 + rank, every_steps=4)
        return error_of(lambda: Auto(simulated.syncs[rank], TRAINING, rules, []))

    for message in run_members(2, body):
        assert message.startswith("AgreementError: auto(): process 0 has probe_steps 3, process 1 has probe")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("budget_loss", 50, "got 50; if that is meant as percent, write 0.01 for one percent"),
        ("probe_steps", 1, "probe_steps must be a whole number of at least 2, got 1"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_attached(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thinwire.auto(nn.Linear(2, 2), **{"optimizer": "SGD", name: value})


class Tuned(torch.optim.SGD):
    """One's own."""


@in_each_process(4)
def test_shards_and_replicas_choose_alike() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = Tuned(model.parameters(), lr=0.01)
    # The machine has to say which one is chosen.
    few: dict[str, Any] = {"probe_steps": 2, "budget_loss": 0.005, "least_gain": 0}
    chooser = thinwire.auto(model, optimizer, replicas=mesh, **few)
    assert engine_of(chooser.sync).settings.health_group is not None
    for _ in range(ALL_TRIALS):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((2, 32), dist.get_rank() + 1.0)).square().mean())
        optimizer.step()
    assert chooser.chosen is not None
    used = (str(chooser.sync.algorithm), chooser.chosen.name, chooser.is_choosing)
    found = (used, [(trial.name, trial.sent_bytes, trial.step_seconds) for trial in chooser.trials])
    assert told_by_all(found) == [found] * 4
    assert [trial.name for trial in chooser.trials] == [*TRIED[:2], "PowerSGD(matrix_rank=16)"]
    exact, half, _ = chooser.trials
    assert half.sent_bytes == pytest.approx(exact.sent_bytes / 2, rel=0.01)
    # Which algorithm was the fastest differs by machine, and so do the lines that tell it.
    lines = [line for line in str(chooser).splitlines() if line.startswith(("No loss gap", "Loss gaps"))]
    assert lines == [
        "No loss gap was measured with Tuned: those of SGD, its base class, count.",
        "Loss gaps of SGD were measured with momentum 0.9; yours has none.",
    ]
