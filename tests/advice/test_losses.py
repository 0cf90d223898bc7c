"""The table of loss gaps, what is told of it, and what a loss budget allows."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from advice.ways import EVERYTHING, ONE, ROUGH, SIXTEEN, TWO, UNKNOWN, advice_of, row, way
from thinwire.advice.losses import (
    ExpectedLoss,
    Training,
    expected_loss,
    expected_losses,
    known_optimizers,
    loss_gaps,
)
from thinwire.advice.planned_steps import LEAST_GAIN, planned_steps
from thinwire.advice.prediction import SHARDING, choose, contenders
from thinwire.advice.priced import priced
from thinwire.advice.trained import optimizer_name, training_of
from thinwire.plan import ParameterSpec
from thinwire.probe.measured_link import MeasuredLink

ROOT = Path(__file__).parents[2]


def test_every_row_has_a_source_that_is_there() -> None:
    for gap in loss_gaps():
        assert (ROOT / gap.source).is_file()
        assert gap.low_percent <= gap.percent <= gap.high_percent
    assert known_optimizers() == ["AdamW", "Lion", "Muon", "SGD"]


TABLE = (
    row("few", "AdamW", 2, 1.0),
    row("few", "AdamW", 16, 3.0),
    row("few", "SGD", 2, 0.25),
    row("few", "AdamW", 2, 9.0, steps=10),
    row("rare", "AdamW", 4, 7.0),
)


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.advice.losses.loss_gaps", lambda: TABLE)


@pytest.mark.usefixtures("small_table")
def test_the_nearest_training_tells_and_an_unknown_optimizer_gets_the_worst() -> None:
    def few(optimizer: str | None, members: int) -> float | None:
        return expected_loss("few", Training(optimizer, members, 10**6, 5000)).percent

    assert [few("AdamW", 2), few("AdamW", 64), few("SGD", 64)] == [1.0, 3.0, 0.25]
    assert few("Sophia", 2) == few(None, 2) == 1.0
    assert expected_loss("rare", Training("SGD", 2, 10**6, 5000)).kind == "unknown"  # known with AdamW only
    assert expected_loss("nothing", Training(None, 2, 10**6)).short == "?"
    assert optimizer_name(" adamw ") == "AdamW"
    assert optimizer_name(torch.optim.SGD([torch.ones(1)], lr=0.1)) == "SGD"


@pytest.mark.usefixtures("small_table")
def test_a_longer_run_promises_nothing_for_a_shorter_one() -> None:
    def few(steps: int | None, optimizer: str | None = "AdamW") -> ExpectedLoss:
        return expected_loss("few", Training(optimizer, 2, 10**6, steps))

    assert [few(steps).percent for steps in (2001, 2000, 1999, 10)] == [1.0, 1.0, 9.0, 9.0]
    # Without a length, what the shortest run lost.
    assert few(None).percent == few(None, None).percent == 9.0
    for shorter in (few(9), few(1999, "SGD"), few(1999, None)):
        assert (shorter.kind, shorter.short, shorter.order) == ("unknown", "?", math.inf)
    assert advice_of(way("few", 10, 11, few(9)), budget=0.2).best is SIXTEEN


def test_the_shipped_table_knows_how_far_its_trainings_reach() -> None:
    """16 bits lose nothing, however short the run."""
    for steps in (1, None):
        losses = expected_losses(Training("AdamW", 2, 85_000_000, steps))
        assert losses['Cast("bf16")'].order == losses["AllReduce()"].order == 0
    # An LSTM of as many parameters lost more than a transformer, whose losses count where it has none.
    recurrent = training_of(nn.LSTM(8, 8), "AdamW", 4, 400)
    assert recurrent == Training("AdamW", 4, parameters=576, steps=400, is_recurrent=True)
    assert expected_loss("Quantize(bits=2)", recurrent).short == "+4.8"
    assert not training_of(nn.Linear(8, 8), "AdamW", 4).is_recurrent
    # Low rank that was measured in a small model tells nothing of a far larger one, but with SGD.

    def rank_16(optimizer: str, numel: int) -> str:
        return expected_loss("PowerSGD(matrix_rank=16)", Training(optimizer, 2, numel, 2000)).short

    assert [rank_16("AdamW", numel) for numel in (6_700_000, 6_700_001)] == ["+1.0", "?"]
    assert [rank_16(optimizer, 350_000_000) for optimizer in ("SGD", "Sophia")] == ["-0.1", "?"]


# Budget


def test_the_fastest_within_the_budget_is_advised() -> None:
    for budget, best in ((0.0, TWO), (0.005, TWO), (0.05, ONE), (0.2, ROUGH), (math.inf, UNKNOWN)):
        assert advice_of(*EVERYTHING, budget=budget).best is best


# One rule, and the pages


STEP_SECONDS, HIDDEN_SECONDS = 0.1, 0.06


def on_links(training: Training, budget_loss: float = 0.01) -> list[str]:
    """The rule's choices from the fastest link to the slowest, for a step that hides 60 of its 100 ms."""
    # The trainings of the table were as wide: there matrix rank 16 sends 6 times fewer bytes.
    specs = [ParameterSpec.of("weight", torch.zeros(192, 192))]
    losses, ways = expected_losses(training), []
    for name, variant in priced().items():
        routes = variant.algorithm.prepare(specs, num_members=4).routes
        sent_bytes = sum(route.message_bytes for route in routes)
        kept = {"is_lossy": not variant.keeps_16_bits, "sent_bytes": sent_bytes}
        ways.append(way(name, 0, 0, losses[name], **kept))
    found: list[str] = []
    for exponent in range(400):
        timed = []
        for prediction in ways:
            exposed_seconds = max(0.0, 1.05**exponent * 1e-11 * prediction.sent_bytes - HIDDEN_SECONDS)
            seconds = STEP_SECONDS + exposed_seconds
            timed.append(replace(prediction, step_seconds=seconds, low_seconds=seconds, high_seconds=seconds))
        best = choose(contenders(timed, 0.05, budget_loss)).name
        if best not in found[-1:]:
            found.append(best)
    return found


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("column", "optimizer"), [(0, "SGD"), (1, "AdamW")])
def test_the_pages_tell_what_is_advised(column: int, optimizer: str) -> None:
    """docs/choosing.md line by line; the other pages where they name one."""
    rows = page("docs/choosing.md").partition("| messages |")[2].partition("| why |")[0].splitlines()[2:]
    cells = [code for row in rows for code in re.findall("`(.+?)`", row.split("|")[2 + column])[:1]]
    named = [name.replace("TopK()", str(thinwire.TopK())) for name in cells]
    training = Training(optimizer, 4, 140_000, 3000)
    assert on_links(training) == ["AllReduce()", *named[:-1]]
    # Averaging models less often is not priced.
    attached = [name for name in named if not name.startswith("LocalSGD")]
    assert on_links(training, 0.03) == ["AllReduce()", *attached]
    if optimizer == "AdamW":
        lines = re.findall(r"\| `(.+?)` \| [\d.]+ \|", page("docs/optimizers.md").partition("## Which")[2])
        assert lines[:5] == on_links(training)[1:]
    for name in ("README.md", "docs/quickstart.md"):
        assert "thinwire.attach(model, thinwire.Quantize(bits=4))" in page(name)


@pytest.mark.parametrize(
    ("row", "training"),
    [
        ("AdamW, a GPT of up to 3 M, at least 1,500 steps", Training("AdamW", 2, 3_300_000, 1500)),
        ("AdamW, 11 M in 1,125 steps, 25 M in 750, or more", Training("AdamW", 2, 11_000_000, 1125)),
        ("AdamW, 11 M in 1,125 steps, 25 M in 750, or more", Training("AdamW", 2, 25_600_000, 750)),
        ("AdamW, 85 M or more, at least 1,800 steps", Training("AdamW", 2, 85_600_000, 1800)),
        ("AdamW, 85 M or more, at least 1,800 steps", Training("AdamW", 2, 350_000_000, 20_000)),
        ("AdamW, 375 steps or some more", Training("AdamW", 2, 85_600_000, 450)),
        ("AdamW, fewer steps", Training("AdamW", 2, 11_000_000, 300)),
        ("AdamW, an LSTM", Training("AdamW", 4, 1_184_000, 400, is_recurrent=True)),
        ("Lion", Training("Lion", 4, 140_000, 2000)),
        ("Muon", Training("Muon", 4, 140_000, 2000)),
    ],
    ids=str,
)
def test_the_page_takes_the_bits_that_the_rule_takes_on_a_slow_link(row: str, training: Training) -> None:
    (bits,) = re.findall(rf"^\| {row} \| (\d+) bits", page("docs/choosing.md"), re.M)
    best = 'Cast("bf16")' if bits == "16" else f"Quantize(bits={bits})"
    assert on_links(training)[-1] == best


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_the_page_of_slow_links_takes_what_is_advised(optimizer: str) -> None:
    text, parameters, compute_seconds = page("docs/wide-area.md"), 350_000_000, 0.8
    heading = text.partition("sending 16 bits, over computing |")[2].partition("more")[0]
    cells = text.partition(f"\n| {optimizer} | ")[2].splitlines()[0].split(" | ")
    training = Training(optimizer, 2, parameters, 20_000)
    steps = planned_steps(compute_seconds, training)

    def best(ratio: float, budget_loss: float = 0.01) -> str:
        link = MeasuredLink.of_rate(16 * parameters / (ratio * compute_seconds), 2e-4, 2)
        return steps.advice(link, LEAST_GAIN, budget_loss, ()).best.name

    for ratio, cell in zip(map(float, re.findall(r"[\d.]+", heading)), cells, strict=False):
        (name, *_) = re.findall("`(.+?)`|leave DDP as it is|2 or 4 bits", cell)
        assert best(ratio) == (name or {"2": "Quantize(bits=2)"}.get(cell[0], "AllReduce()")), ratio
        assert "4 bits" not in cell or best(ratio, 0.005) == "Quantize(bits=4)"


def test_there_are_lines_to_paste_for_every_framework() -> None:
    advice = advice_of(*EVERYTHING, budget=0.005)
    lines = advice.lines
    assert "    thinwire attach --algorithm 'Quantize(bits=2)' -- " in str(advice)
    assert lines.keys() == {"DDP", "FSDP2", "Accelerate", "Lightning", "Trainer"}
    assert all("thinwire.Quantize(bits=2)" in text for text in lines.values())
    attached = 'thinwire.attach(model, thinwire.Quantize(bits=2), replicas=mesh["replicate"])'
    assert lines["FSDP2"] == f"import thinwire\n{SHARDING}{attached}"
