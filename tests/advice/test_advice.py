"""`thinwire.advise` and the command: predictions, what follows from them, and bad input."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from advice.ways import advice_of, network, only_priced, way
from processes import in_each_process
from thinwire import AttachError, ConfigError
from thinwire.advice import Advice
from thinwire.advice.losses import BASELINE, EXACT_LOSS, ExpectedLoss
from thinwire.advice.prediction import Prediction
from thinwire.advice.priced_steps import Sent, Timeline
from thinwire.probe.measured_link import MeasuredLink, Transfer
from thinwire.sync import Engine
from thinwire.wire import Collective
from training import told_by_all


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ((), 1.0),
        ((Sent(0.2, 100, 0.9),), 1.0),  # hidden
        ((Sent(0.8, 100, 0.9),), 1.1),  # 0.8 + 0.2 against 0.9
        ((Sent(0.2, 300, 0.9), Sent(0.3, 300, 0.9)), 1.5),  # one after the other: there at 1.4
        ((Sent(0.8, 100, 0.9), Sent(0.9, 100, 0.95)), 1.25),  # the second starts late, as the first was
        ((Sent(0.8, 100, 0.9, "all_gather"),), 1.5),  # each kind has its price
    ],
)
def test_a_step_on_a_network(sent: tuple[Sent, ...], expected: float) -> None:
    """A byte takes 2 ms, of a gather 6."""
    prices: dict[Collective, float] = {"all_reduce": 0.002, "all_gather": 0.006}
    seconds = Timeline(sent, 1.0).step_seconds(lambda kind, num_bytes: Transfer(prices[kind] * num_bytes))
    assert seconds == pytest.approx(expected)


def test_messages_that_wait_for_each_other_are_late_one_after_the_other() -> None:
    def late(*sent: Sent) -> float:
        return Timeline(sent, 1.0).step_seconds(lambda kind, num_bytes: Transfer(0.001 * num_bytes, 0.5))

    side_by_side = Sent(0.9, 100, 1.0), Sent(0.9, 100, 1.0)
    in_turn = Sent(0.8, 100, 0.9), Sent(0.95, 100, 1.0)
    assert (Timeline(side_by_side, 1.0).rounds, Timeline(in_turn, 1.0).rounds) == (1, 2)
    assert late(*side_by_side) == pytest.approx(0.9 + 0.2 + 0.5)
    assert late(*in_turn) == pytest.approx(0.8 + 0.1 + 0.5 + 0.05 + 0.1 + 0.5)


def new_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))


def one_step(model: nn.Module) -> None:
    torch.autograd.backward(model(torch.ones(32, 256)).square().mean())


def predicted(name: str, low_ms: float, high_ms: float, order: int, sent_bytes: int = 1000) -> Prediction:
    return way(
        name,
        low_ms,
        high_ms,
        ExpectedLoss("measured", float(order), order - 0.2, order + 0.2),
        code=f"use({name})",
        sent_bytes=sent_bytes,
        is_lossy=order > 0,
    )


def advised(*predictions: Prediction, compute_ms: float = 1.0) -> Advice:
    return advice_of(*predictions, careful=(predicted("16 bits", 99, 101, 0),), compute_ms=compute_ms)


def test_of_a_tie_the_smallest_loss_gap_is_advised_and_the_tie_is_told() -> None:
    one, four = predicted("rank 1", 49, 51, 3, 10), predicted("rank 4", 50, 54, 2, 40)
    advice = advised(one, four, predicted("rank 8", 60, 64, 1))
    assert [prediction.name for prediction in advice.tied] == ["rank 1", "rank 4"]
    assert advice.best is four
    assert advice.compress
    lines = str(advice).splitlines()
    assert lines[:3] == [
        "Do this: use(rank 4)",
        "A step takes 52.0 ms, with 16 bits 100.0 ms, without any averaging 1.0 ms.",
        "It may lose 2.0 %: compare losses.",
    ]
    # Less is better everywhere: half the time is 50, not 2.00.
    rows = [line.split()[:7] for line in lines]
    assert ["rank", "1", "50.0", "49.0", "–", "51.0", "50"] in rows
    assert advised(one, predicted("rank 4", 52, 54, 2)).best is one


def test_what_ties_is_what_is_chosen_from() -> None:
    def tied(*predictions: Prediction) -> list[str]:
        return [prediction.name for prediction in advised(*predictions).tied]

    assert tied(predicted("rank 1", 89, 97, 3), predicted("rank 4", 95, 98, 2)) == ["rank 1"]  # 4 wins 3.5 %
    # Of noise wide enough to tie with half the speed, no smaller gap is worth it.
    assert tied(predicted("rank 1", 30, 70, 3), predicted("rank 4", 50, 70, 2)) == ["rank 1"]
    # What is not faster for sure ties with nothing that is advised, whatever its median.
    assert tied(predicted("rank 1", 60, 99.5, 3, 10), predicted("rank 4", 79, 81, 2)) == ["rank 4"]
    noisy = advised(predicted("rank 1", 80, 99.5, 3, 10))
    assert noisy.best is noisy.baseline
    # Of ties in time and loss the most bits win, and DDP as it is before 16 bits.
    four, two = predicted("4 bits", 70, 74, 1, 140), predicted("2 bits", 70, 73, 1, 70)
    assert advised(two, four).best is four
    assert not advised(predicted("rank 1", 101, 102, 3, 10)).nothing_to_win


def test_what_users_have_is_what_is_advised_if_16_bits_do_not_beat_it() -> None:
    """Of a model with small gradients: 16 bits and low rank tie with each other, and DDP is faster."""
    plain = replace(predicted("AllReduce()", 99, 101, 0, 1000), loss=EXACT_LOSS)
    bits, low = predicted("16 bits", 95, 115, 0, 500), predicted("rank 1", 94, 104, 3, 10)
    advice = advice_of(low, careful=(plain, bits), compute_ms=98)
    assert advice.best is plain
    assert str(advice).startswith("Do this: leave DDP as it is\nA step takes 100.0 ms, without any averaging")
    # As large as 16 bits' in a model of bf16: there is no reason to add anything.
    small = replace(plain, sent_bytes=500)
    assert advice_of(low, careful=(small, bits)).best is small
    # Where computing alone takes as long, what seems faster is chance.
    quick = replace(bits, low_seconds=0.05, step_seconds=0.06, high_seconds=0.07)
    assert advice_of(low, careful=(plain, quick), compute_ms=98).best is plain
    faster = advice_of(low, careful=(plain, quick))
    assert faster.best is quick
    assert "Another optimizer, Muon in LocalSGD(" in str(faster)
    assert "Another optimizer" not in str(replace(faster, optimizer="SGD"))


def test_messages_are_priced_by_what_carries_them() -> None:
    """A ring sends 2 (N − 1) / N of it, a gather receives N − 1 of them, an exchange sends (N − 1) / N."""
    found, num_bytes = network(8e6, 0.0, world_size=4), 1 << 20
    kinds: tuple[Collective, ...] = ("all_reduce", "all_gather", "all_to_all", "broadcast")
    seconds = [MeasuredLink(found, 4).transfer(kind, num_bytes).seconds / (num_bytes / 1e6) for kind in kinds]
    assert seconds == pytest.approx([1.5, 3, 0.75, 1], rel=1e-3)
    slow = MeasuredLink(replace(found, wire_factors={"all_to_all": 2.0, "all_gather": 1.0}), 4)
    assert slow.transfer("all_to_all", num_bytes).seconds == pytest.approx(1.5 * num_bytes / 1e6)


FEW = ("AllReduce()", BASELINE, "Quantize(bits=8)", "TopK(density=0.03125)", "PowerSGD(matrix_rank=4)")


@in_each_process(2)
def test_on_slow_links_approximations_are_advised_and_on_fast_ones_not() -> None:
    model, alive = new_model(), list[list[str]]()
    made: weakref.WeakSet[Engine] = weakref.WeakSet()
    new_engine = Engine.__init__

    def noted(engine: Engine, *args: Any, **settings: Any) -> None:
        new_engine(engine, *args, **settings)
        made.add(engine)

    def step(model: nn.Module) -> None:
        alive.append([str(engine.algorithm) for engine in made if engine.state.memory_bytes()])
        one_step(model)

    gc.disable()  # it does not know how much memory a device has left
    try:
        with only_priced(*FEW), patch.object(Engine, "__init__", noted):
            # This machine may be busy: only a gain of half counts.
            advise = partial(thinwire.advise, model, step, budget_seconds=0.1, least_gain=0.5)
            slow, fast = advise(network(1e6), budget_loss=math.inf), advise(network(1e12, 1e-6))
    finally:
        gc.enable()
    for parameter, before in zip(model.parameters(), new_model().parameters(), strict=True):
        assert torch.equal(parameter, before)
        assert parameter.grad is None
    seconds = [prediction.step_seconds for prediction in slow.predictions]
    assert told_by_all(seconds) == [seconds] * 2
    num_bytes = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    assert slow.compress
    assert slow.best in slow.tied
    assert slow.best.step_seconds < slow.baseline.step_seconds / 2
    assert slow.best.code == f"thinwire.attach(ddp_model, thinwire.{slow.best.name})"
    assert "Loss gaps are the largest of AdamW, Lion, Muon, SGD" in slow.notes[0]
    assert not fast.best.is_lossy
    seconds = [prediction.step_seconds for prediction in fast.predictions]
    assert seconds == sorted(seconds)
    by_name = {prediction.name: prediction for prediction in slow.predictions}
    assert sorted(by_name) == sorted(FEW)
    for prediction in by_name.values():
        assert list(prediction.seconds_at) == [0, 5, 20, 80]
        assert sorted(prediction.seconds_at.values()) == list(prediction.seconds_at.values())
    exact, low_rank = by_name["AllReduce()"], by_name["PowerSGD(matrix_rank=4)"]
    assert (exact.rounds, low_rank.rounds) == (1, 2)
    # The model is one bucket, and its messages wait for nothing: half a round trip for each round.
    assert low_rank.seconds_at[80] - low_rank.seconds_at[0] == pytest.approx(0.08, rel=0.3)
    # A ring of two sends each byte once.
    assert exact.sent_bytes == 2 * by_name[BASELINE].sent_bytes == num_bytes
    assert low_rank.sent_bytes < num_bytes / 20
    # fp32 of what is compressed: the matrices.
    assert low_rank.memory_bytes > low_rank.residual_bytes == 4 * 2 * 256 * 512
    assert exact.memory_bytes == exact.residual_bytes == by_name["Quantize(bits=8)"].residual_bytes == 0
    # One algorithm alone takes memory at a time, and all that remember something were there.
    assert (max(map(len, alive)), len(set().union(*alive))) == (1, 2)


def test_a_process_alone_needs_no_group() -> None:
    """And what saving costs is told of what keeps a residual."""
    probe = network(1e4, 0.001, world_size=4)
    with only_priced("AllReduce()", BASELINE, "PowerSGD(matrix_rank=1)"):
        advice = thinwire.advise(new_model(), one_step, probe, budget_seconds=0.1, budget_loss=math.inf)
    assert advice.best.residual_bytes == 4 * 2 * 256 * 512
    residual = f"Saving (state_dict) averages the residual of {advice.best.name}, 1.05 MB, over the link"
    assert any(note.startswith(residual) for note in advice.notes)
    with pytest.raises(ConfigError, match="probe measures between processes: start at least 2, got 1"):
        thinwire.advise(new_model(), one_step)
    assert not dist.is_initialized()


def test_what_can_not_be_advised() -> None:
    frozen, broken = new_model().requires_grad_(False), {"one_step": lambda model: None}
    for options, message in (
        (broken, "must run a backward pass on the model that it is given"),
        ({"budget_seconds": 0.0}, "budget_seconds must be above 0"),
        ({"total_steps": 0}, "total_steps must be a whole number of at least 1, got 0"),
        ({"budget_loss": 50}, "budget_loss must be a share of at most 0.2, or math.inf for any, got 50"),
        ({"optimizer": 7}, 'optimizer must be a torch optimizer, or the name of one such as "AdamW", got 7'),
        ({"probe": "p.json"}, "probe must be what thinwire.probe or Probe.load returned, or None, got 'p"),
        ({"model": frozen}, "no parameter of the model is trained, so there is nothing to average"),
        ({"replicas": object()}, "replicas is for models of fully_shard; leave it out"),
    ):
        given: dict[str, Any] = {"model": new_model(), "one_step": one_step, "probe": network(1e8), **options}
        with pytest.raises(AttachError if given["model"] is frozen else ConfigError) as caught:
            thinwire.advise(**given)
        assert message in str(caught.value)
