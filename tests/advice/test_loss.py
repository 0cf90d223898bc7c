"""The table of loss gaps, what is told of it, and what a loss budget allows."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

import thinwire
from advice.ways import (
    ALSO_ONE,
    EVERYTHING,
    EXACT,
    LOCAL,
    ONE,
    SIXTEEN,
    TWO,
    UNKNOWN,
    advice_of,
    measured,
    row,
    way,
)
from thinwire import Streaming
from thinwire.advice.automatic import Trial
from thinwire.advice.bench import Bench, Replicated, Timed, local_seconds
from thinwire.advice.loss import (
    ExpectedLoss,
    Training,
    expected_loss,
    known_optimizers,
    loss_gaps,
    optimizer_name,
    optimizer_notes,
    published_gap,
)
from thinwire.advice.result import Prediction, choose, tied
from thinwire.advice.timeline import Sent, Stopwatch, Timeline, Transfer
from thinwire.advice.variants import (
    LOCAL_VARIANTS,
    OVERFLOWING,
    SHARDING,
    LocalVariant,
    expected_losses,
    lines_to_paste,
    priced,
)
from thinwire.advice.words import losses_of, notes_on, sources, verdict
from thinwire.algorithms import Algorithm
from thinwire.comm import Collective, InProcessTransport
from thinwire.plan import ParameterSpec
from thinwire.probe import Probe, Timing
from thinwire.sync import Engine

ROOT = Path(__file__).parents[2]


def test_what_is_shipped_is_what_the_script_makes_of_the_result_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If not: `python benchmarks/loss_gaps.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import loss_gaps as script  # noqa: PLC0415 - of a folder that is no package

    assert script.SHIPPED.read_text(encoding="utf-8") == script.text()
    assert len(loss_gaps()) > 50


def test_every_row_has_a_source_that_is_there_or_is_published() -> None:
    for gap in loss_gaps():
        interval = gap.low_percent, gap.high_percent
        assert gap.source.startswith("arXiv ") if gap.is_published else (ROOT / gap.source).is_file()
        if gap.is_single:  # of one seed there is no interval; only of models that took hours
            assert interval == (None, None)
            assert gap.parameters > 5e6
        elif not gap.is_published:
            low, high = (each for each in interval if each is not None)
            assert low <= gap.percent <= high
    assert known_optimizers() == ["AdamW", "Lion", "Muon", "SGD"]


TABLE = (
    row("few", "AdamW", 2, 1.0),
    row("few", "AdamW", 16, 3.0),
    row("few", "SGD", 2, 0.25),
    row("few", "AdamW", 2, 9.0, steps=10),
    row("rare", "AdamW", 4, 7.0),
    row("rare", "AdamW", 4, 0.5, parameters=10**9, is_published=True, steps=None, seeds=1),
    row("rare", "AdamW", 4, 2.0, parameters=10**7, is_published=True, steps=None, seeds=1),
    row("rarer", "AdamW", 4, 2.5, is_published=True, steps=None, low_percent=None, high_percent=None),
)


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.advice.loss.loss_gaps", lambda: TABLE)


@pytest.mark.usefixtures("small_table")
def test_the_nearest_training_tells_and_an_unknown_optimizer_gets_the_worst() -> None:
    def few(optimizer: str | None, members: int) -> float | None:
        return expected_loss("few", Training(optimizer, members, 10**6, 5000)).percent

    assert few("AdamW", 2) == 1.0
    assert few("AdamW", 64) == 3.0
    assert few("SGD", 64) == 0.25
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
        assert (shorter.kind, shorter.short, shorter.order) == ("shorter", "?", math.inf)
        assert "so short a run is not known" in shorter.in_words
    advised = advice_of(way("few", 10, 11, few(9)), budget=0.2)
    assert advised.best is SIXTEEN
    assert "none was measured in so short a run" in "\n".join(verdict(advised))


def test_size_length_and_members_tell_which_is_nearest_and_a_single_training_counts_if_it_lost_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = {"seeds": 1, "low_percent": None, "high_percent": None}
    table = (
        row("few", "AdamW", 2, 1.0),
        row("few", "AdamW", 2, -3.0, parameters=10**7, **once),
        row("few", "AdamW", 2, 4.0, parameters=10**8, **once),
        row("four", "AdamW", 2, 1.0),
        row("four", "AdamW", 2, 1.6, parameters=10**8, **once),
        row("alone", "AdamW", 2, 0.1, parameters=10**8, **once),
        row("two", "AdamW", 4, -0.5),
        row("two", "AdamW", 2, 0.2, parameters=10**8),
        row("two", "AdamW", 2, 3.0, parameters=10**8, steps=500),
        row("two", "AdamW", 2, -0.1, parameters=10**7),
    )
    monkeypatch.setattr("thinwire.advice.loss.loss_gaps", lambda: table)
    sizes = (10**6, 10**7, 4 * 10**7, 10**8, 10**10)
    found = [expected_loss("few", Training("AdamW", 2, size, 2000)) for size in sizes]
    assert [each.percent for each in found] == [1.0, 1.0, 4.0, 4.0, 4.0]
    once_of_a_large_one = (
        "measured once with AdamW, 2 members, a transformer of 100 M parameters, 2,000 steps"
    )
    assert str(found[-1].gaps[0]) == f"+4.0 %, {once_of_a_large_one} (here)"
    # Within what chance does: told, and not counted.
    four = expected_loss("four", Training("AdamW", 2, 10**8, 2000))
    assert (four.percent, [gap.percent for gap in four.gaps]) == (1.0, [1.0, 1.6])
    # Of several seeds the mean decides, though of fewer members.
    two = [expected_loss("two", Training("AdamW", 4, size, 2000)).percent for size in (10**6, 10**7, 10**8)]
    assert two == [-0.5, -0.1, 0.2]
    assert expected_loss("two", Training("AdamW", 4, 10**8, 1900)).percent == 3.0
    # By itself it is no proof that there is no harm.
    assert expected_loss("alone", Training("AdamW", 2, 10**8, 2000)).kind == "unknown"


@pytest.mark.usefixtures("small_table")
def test_own_measurements_come_before_bounds_and_those_before_what_was_published() -> None:
    own = expected_loss("rare", Training("AdamW", 4, 10**9))
    assert (own.kind, own.short) == ("measured", "+7.0")
    beside = published_gap("rare", Training("AdamW", 4, 10**9))
    assert beside is not None
    assert beside.percent == 0.5
    assert str(beside).startswith(
        "+0.5 % (+0.3 to +0.7), published with AdamW, 4 members, a transformer of 1 B"
    )
    between = expected_loss(
        "x", Training("AdamW", 2, 10**6, 2000), loses_more_than="few", loses_less_than="rare"
    )
    assert (between.kind, between.short, between.low_percent) == ("between", "≤ +7.0", 1.0)
    above = expected_loss("x", Training("AdamW", 2, 10**6, 2000), loses_more_than="few")
    assert (above.kind, above.percent, above.short) == ("above", None, "> +1.0")
    published = expected_loss("rarer", Training("AdamW", 2, 10**6), loses_more_than="few")
    assert (published.kind, published.short) == ("published", "p +2.5")


def test_the_shipped_table_tells_what_the_pages_tell() -> None:
    """docs/optimizers.md, docs/choosing.md."""

    def gap(name: str, optimizer: str, numel: int, steps: int | None, members: int = 2) -> ExpectedLoss:
        return expected_loss(name, Training(optimizer, members, numel, steps))

    two_bits, four_bits = (gap(f"Quantize(bits={bits})", "AdamW", 10**7, 2000, 4) for bits in (2, 4))
    assert (two_bits.short, four_bits.short) == ("-0.1", "-0.2")
    assert two_bits.order == four_bits.order == 0
    assert not two_bits.is_tied_with(gap("DiLoCo(every_steps=30)", "AdamW", 10**7, 2000))
    # The length of the run decides; if it is not known, it may be short.
    by_length = [gap("Quantize(bits=2)", "AdamW", 85_000_000, steps) for steps in (130, 1799, 1800, None)]
    assert [each.short for each in by_length] == ["?", "+3.5", "+0.9", "+3.0"]
    assert [gap("Quantize(bits=2)", "AdamW", 3_300_000, steps).short for steps in (400, 1500)] == [
        "+3.0",
        "-2.4",
    ]
    assert gap("Quantize(bits=4)", "AdamW", 85_000_000, 450).short == "+0.4"
    assert gap("Quantize(bits=4)", "AdamW", 85_000_000, 130).short == "?"
    # 8 bits, measured in long runs only, lose less than 4 in short ones.
    bits = expected_losses(Training("AdamW", 2, 85_000_000, 450))["Quantize(bits=8)"]
    assert (bits.kind, bits.order) == ("between", 0)
    # 16 bits lose nothing, however short the run.
    for steps in (1, None):
        losses = expected_losses(Training("AdamW", 2, 85_000_000, steps))
        assert losses['Cast("bf16")'].order == losses["AllReduce()"].order == 0
    assert gap("Quantize(bits=1)", "Lion", 10**5, 2000, 4).short == "+19.3"
    assert gap("PowerSGD(matrix_rank=2)", "SGD", 10**7, 2000).short == "+2.9"
    recurrent = Training.of(nn.LSTM(8, 8), "AdamW", 4, 400)
    assert recurrent == Training("AdamW", 4, parameters=576, steps=400, is_recurrent=True)
    assert expected_loss("Quantize(bits=2)", recurrent).short == "+4.8"
    assert expected_loss("Quantize(bits=4)", recurrent).order == 0
    # An LSTM of as many parameters lost more, and tells a transformer nothing.
    assert gap("Quantize(bits=3)", "AdamW", 6 * 10**5, 2000, 4).short == "-0.3"
    # Of transformers, for want of its own.
    assert expected_loss("PowerSGD(matrix_rank=2)", recurrent).short == "+7.5"
    assert not Training.of(nn.Linear(8, 8), "AdamW", 4).is_recurrent
    convolutional = Training.of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8)), "AdamW", 4, 2000)
    (of_text,) = convolutional.notes()
    assert of_text.startswith("The model has convolutions, and all gaps are of models of text.")
    assert list(Training("AdamW", 4, 10**6, 2000).notes()) == []
    scaling_law = published_gap("DiLoCo(every_steps=30)", Training("AdamW", 4, 10**8))
    assert scaling_law is not None
    assert (scaling_law.percent, scaling_law.parameters) == (1.5, 90_000_000)


class OwnKind(torch.optim.AdamW):
    """One's own."""


class Adan(torch.optim.Optimizer):
    """Of no package that this project knows."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})


TRAINED = [torch.ones(2, 2)]
NOT_MEASURED = (
    "No loss gap was measured with {}, only with AdamW, Lion, Muon, SGD: the largest of them counts."
)


@pytest.mark.parametrize(
    ("optimizer", "name", "notes"),
    [
        ("torch.optim.AdamW", "AdamW", []),
        (torch.optim.AdamW(TRAINED), "AdamW", []),
        (torch.optim.SGD(TRAINED, momentum=0.9), "SGD", []),
        (torch.optim.SGD(TRAINED), "SGD", ["measured with momentum 0.9; yours has none"]),
        (OwnKind(TRAINED), "AdamW", ["No loss gap was measured with OwnKind: those of AdamW"]),
        *(
            (kind(TRAINED), kind.__name__, [NOT_MEASURED.format(kind.__name__)])
            for kind in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, Adan)
        ),
        ("Sophia", "Sophia", [NOT_MEASURED.format("Sophia")]),
    ],
)
def test_what_other_optimizers_are_counted_as_is_told(optimizer: object, name: str, notes: list[str]) -> None:
    assert optimizer_name(optimizer) == name
    told = optimizer_notes(optimizer)
    assert len(told) == len(notes)
    assert all(note in each for note, each in zip(notes, told, strict=True))


# Budget, frontier, ties


@pytest.mark.parametrize(
    ("budget", "best"),
    [(0.0, TWO), (0.005, TWO), (0.05, ONE), (0.2, LOCAL), (math.inf, UNKNOWN)],
)
def test_the_fastest_within_the_budget_is_advised(budget: float, best: Prediction) -> None:
    advice = advice_of(*EVERYTHING, budget=budget)
    assert advice.best is best
    assert advice.is_within_budget(best)


# One rule: `choose`, the run's own choice, and the pages


STEP_SECONDS, HIDDEN_SECONDS = 0.1, 0.06


def test_of_ties_in_time_and_loss_the_most_bits_win_in_advice_and_in_the_run() -> None:
    """Two bits' gap in the table is −0.3 %, and that of four bits +0.1 %."""
    ways = [SIXTEEN]
    for name, ms, size in (("Quantize(bits=4)", 72.7, 140), ("Quantize(bits=2)", 72.3, 70)):
        loss = expected_loss(name, Training("AdamW", 4, 140_000, 2000))
        ways.append(way(name, ms - 2, ms + 2, loss, message_bytes=size))
    assert best_names(ways) == {"Quantize(bits=4)"}
    # On a quiet machine too: what wins no more than `least_gain` is not worth rougher messages.
    quiet = [replace(e, low_seconds=e.step_seconds, high_seconds=e.step_seconds) for e in ways]
    assert best_names(quiet) == {"Quantize(bits=4)"}
    faster = [*quiet[:2], replace(quiet[2], step_seconds=0.069, low_seconds=0.069, high_seconds=0.069)]
    assert best_names(faster) == {"Quantize(bits=2)"}


def best_names(ways: list[Prediction]) -> set[str]:
    """What is advised, and what a run goes on with that has measured the same."""
    trials = [Trial(**vars(each)) for each in ways]
    return {choose(ways, 0.05).name, choose(trials, 0.05).name}


def on_links(optimizer: str, budget_loss: float) -> list[str]:
    """What the rule says from the fastest link to the slowest, for a step that hides 60 of its 100 ms."""
    training = Training(optimizer, 4, 140_000, 3000)
    # As wide as in the trainings of the table: there matrix rank 16 sends 6 times fewer bytes.
    specs = [ParameterSpec.of("weight", torch.zeros(192, 192))]
    group = InProcessTransport.group(4)[0]

    def bytes_of(algorithm: Algorithm) -> float:
        return Engine(algorithm, group, specs).plan.message_bytes

    sent = {code: bytes_of(variant.algorithm) for code, variant in priced().items() if code != OVERFLOWING}
    for local in LOCAL_VARIANTS:
        algorithm = local.options.get("algorithm", thinwire.Quantize(bits=4))
        sent[local.name] = bytes_of(algorithm) / local.every_steps
    losses = expected_losses(training)
    ways = [
        way(name, 0, 0, losses[name], is_lossy=name not in (EXACT.name, SIXTEEN.name), message_bytes=size)
        for name, size in sent.items()
    ]
    found: list[str] = []
    for exponent in range(400):
        seconds_per_byte = 1.05**exponent * 1e-11
        timed = []
        for each in ways:
            hidden = 0.0 if "every_steps" in each.name else HIDDEN_SECONDS
            seconds = STEP_SECONDS + max(0.0, seconds_per_byte * each.message_bytes - hidden)
            timed.append(replace(each, step_seconds=seconds, low_seconds=seconds, high_seconds=seconds))
        best = choose(timed, 0.05, budget_loss).name
        if best not in found[-1:]:
            found.append(best)
    return found


def test_the_pages_tell_what_is_advised() -> None:
    """docs/choosing.md line by line; the other pages where they name one."""
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    rows = choosing.partition("| messages |")[2].partition("| why |")[0].splitlines()[2:]
    cells = [[re.findall("`(.+?)`", cell)[:1] for cell in row.split("|")[2:4]] for row in rows]
    for column, optimizer in enumerate(("SGD", "AdamW")):
        told = [name.replace("TopK()", str(thinwire.TopK())) for (name,) in (row[column] for row in cells)]
        assert on_links(optimizer, 0.01) == ["AllReduce()", *told[:-1]]
        assert on_links(optimizer, 0.03) == ["AllReduce()", *told]
    adamw = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8").partition("## Which")[2]
    assert re.findall(r"\| `(.+?)` \| [\d.]+ \|", adamw)[:4] == on_links("AdamW", 0.01)[1:]
    for page in ("README.md", "docs/quickstart.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "thinwire.attach(model, thinwire.Quantize(bits=4))" in text


def test_the_frontier_and_ties_on_it() -> None:
    advice = advice_of(*EVERYTHING, budget=0.005)
    # Four bits are slower than two, and a gap of 0.1 can't be told from one of 0.3.
    assert advice.frontier == (LOCAL, ONE, TWO)
    assert advice.ties_of(ONE) == [ALSO_ONE]
    assert advice.ties_of(TWO) == []  # nearly the same loss, but not the same time
    told = "\n".join(verdict(advice))
    assert "Its loss gap: +0.3 % (+0.1 to +0.5), measured with AdamW, 4 members" in told
    assert "Beyond a loss budget of 0.5 %, TopK() takes 20% of a step with 16 bits (loss gap: not kn" in told


def test_where_nothing_meets_the_budget_the_nearest_is_told() -> None:
    told, of_none = ("\n".join(verdict(advice_of(*ways, budget=0.01))) for ways in ((ONE, LOCAL), (UNKNOWN,)))
    assert "known to lose at most 1 %: the nearest is Quantize(bits=1) (+4.5 % loss)." in told
    assert "to lose at most 1 %: no gap is known." in of_none


def test_what_is_known_of_a_loss_names_its_sources() -> None:
    both = replace(LOCAL, published=row("it", "AdamW", 4, 1.5, is_published=True, source="arXiv 1"))
    assert losses_of(both).count("; ") == 1
    assert "published with AdamW" in losses_of(both)
    assert losses_of(EXACT) == "none: it is exact averaging"
    assert sources(advice_of(both, TWO, UNKNOWN, budget=0.005)) == [
        "measured with AdamW, 4 members, a transformer of 1 M parameters, 2,000 steps (here): "
        "it +12.0 %; it +0.3 %; it -0.1 %",
        "published with AdamW, 4 members, a transformer of 1 M parameters, 2,000 steps (arXiv 1): it +1.5 %",
    ]
    above = ExpectedLoss("above", low_percent=1.0, gaps=(row("few", "AdamW", 2, 1.0),))
    assert losses_of(replace(TWO, loss=above)).startswith("more than few: +1.0 %")


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (measured(0.3), "We could measure no loss: between +0.1 and +0.5 %."),
        (measured(4.5), "It may lose 4.5 %: compare losses."),
        (ExpectedLoss("between", 4.4, 1.0, 4.4), "It may lose up to 4.4 %: compare losses."),
        (ExpectedLoss("published", 1.5), "It may lose 1.5 %, as others have published: compare losses."),
        (
            ExpectedLoss("above", low_percent=12.0),
            "What it loses is not known, but more than 12.0 %: compare losses.",
        ),
        (ExpectedLoss("unknown"), "What it loses is not known: compare losses."),
    ],
)
def test_what_may_be_lost_is_told_in_a_sentence(loss: ExpectedLoss, told: str) -> None:
    assert loss.in_words == told


def test_there_are_lines_to_paste_for_every_adapter() -> None:
    adapters = {"DDP", "FSDP2", "Accelerate", "Lightning", "Trainer"}
    lines = lines_to_paste(advice_of(*EVERYTHING, budget=0.005))
    assert lines.keys() == adapters
    assert all("thinwire.Quantize(bits=2)" in each for each in lines.values())
    local = lines_to_paste(advice_of(*EVERYTHING, budget=0.2))
    assert local.keys() == adapters
    assert local["DDP"] == f"import thinwire\n{LOCAL.code}"
    assert "unwrap_model(model), optimizer.optimizer, every_steps=30):" in local["Accelerate"]
    assert "ThinwireStrategy(partial(thinwire.DiLoCo, every_steps=30))" in local["Lightning"]
    assert "attach(trainer, partial(thinwire.DiLoCo, every_steps=30))" in local["Trainer"]
    around = 'with thinwire.DiLoCo(model, optimizer, every_steps=30, replicas=mesh["replicate"]):'
    assert local["FSDP2"] == f"import thinwire\n{SHARDING}{around}"


def test_what_makes_it_less_certain_is_said() -> None:
    def told(training: Training, probe: Probe, num_processes: int, device: str = "cpu") -> list[str]:
        return list(notes_on(training, probe, num_processes, torch.device(device)))

    adamw, here = Training("AdamW", 8, 9), Probe(8, "gloo", "cpu", [], [], [], hosts=[gethostname()] * 8)
    on_gpus = replace(here, device="cuda", hosts=[])
    of_another_world, of_another_device = told(adamw, on_gpus, 2)
    assert "The probe is of 8 processes, this job has 2: what is predicted is for 8." in of_another_world
    assert "messages on cuda" in of_another_device
    assert told(adamw, replace(here, hosts=[]), 1) == told(adamw, here, 8) == []
    (of_length, of_kind) = replace(adamw, is_recurrent=True).notes()
    assert "The length of the run decides" in of_length
    assert "has the gap of transformers" in of_kind
    (of_one_machine,) = told(adamw, here, 1)
    assert f"All processes of the probe ran on one machine, {gethostname()}; for a training" in of_one_machine
    (elsewhere,) = told(adamw, replace(here, hosts=["a", "b"] * 4), 1)
    assert "The probe is of other machines (a, b): their links, and the arithmetic of this one" in elsewhere
    (of_time,) = told(adamw, replace(here, timings=[Timing(4, [0.1]), Timing(16384, [0.15])]), 8)
    assert "16,384 bytes, took less than twice as long as one of nothing" in of_time
    noisy = replace(here, timings=[Timing(4, [0.1] * 4 + [9.0] * 3), Timing(1 << 20, [11.0])])
    (doubt,) = told(adamw, noisy, 8)
    assert doubt.startswith("The probe is doubtful: averagings of 4 bytes had a spread of")
    (of_buckets,) = told(adamw, on_gpus, 8, "cuda:3")
    assert "bucket_cap_mb=10_000" in of_buckets


# Averaging now and then


@pytest.mark.parametrize(
    ("streaming", "expected"),
    [
        (Streaming(), (0.5 + 2.0) / 10),
        (Streaming(fragments=2), (0.5 + 2.0) / 10),
        (Streaming(delay_steps=1), (0.5 + 1.0) / 10),  # one step of a second hides half of it
        (Streaming(fragments=2, delay_steps=1), 0.5 / 10),
        (Streaming(delay_steps=9), 0.5 / 10),
    ],
)
def test_what_an_averaging_adds_to_a_step(streaming: Streaming, expected: float) -> None:
    """Half a second of arithmetic, and two of messages: 1 000 bytes at 2 ms each."""
    timed = Timed([Timeline((Sent(0.4, 600, 0.4), Sent(0.4, 400, 0.4)), 0.5)])
    local = LocalVariant(thinwire.LocalSGD, 10, {"streaming": streaming})

    def network(_: Collective, num_bytes: int) -> Transfer:
        return Transfer(0.002 * num_bytes)

    assert local_seconds(local, timed, network, (1.0, 1.0, 1.0)) == pytest.approx(3 * (1 + expected,))


def test_between_averagings_the_noise_of_single_steps_evens_out() -> None:
    """Two ways that differ by a tenth tie if their steps' own quartiles, equally far apart, count."""
    ways = []
    for every_steps, fragments in ((36, 4), (9, 1)):
        local = LocalVariant(thinwire.LocalSGD, every_steps, {"streaming": Streaming(fragments=fragments)})
        timed = Timed([Timeline((), 0.0125 * 36)])
        middle, low, high = local_seconds(
            local, timed, lambda kind, handed_bytes: Transfer(0.0), (1.0, 0.95, 1.05)
        )
        ways.append(way(local.name, 1e3 * low, 1e3 * high, measured(1.0), step_seconds=middle))
    few, often = ways
    assert (few.low_seconds, few.step_seconds, few.high_seconds) == pytest.approx(
        (1.0125 - 0.05 / 3, 1.0125, 1.0125 + 0.05 / 3)
    )
    assert often.low_seconds == pytest.approx(1.05 - 0.05 / 3)
    assert tied(ways, 0.0) == [few]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_averaging_is_timed_by_the_adapter_itself_and_changes_nothing(dtype: torch.dtype) -> None:
    """A model of one layer can't be averaged in two fragments: that way is not offered."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32, dtype=dtype))
    before = [parameter.clone() for parameter in model.parameters()]
    subject = cast(Replicated, SimpleNamespace(module=model, shards=None))
    bench = Bench(subject, lambda model: None, Stopwatch(4), Training("SGD", 4, 10**4))
    for alike, timed in bench.averagings.items():
        bench._local_turn(timed, *alike)
        assert len(timed.timelines) == 3
    found = {name: timed for name, local, timed in bench.ways if local is not None}
    assert len(found) == len(LOCAL_VARIANTS) - 1
    assert not any("fragments" in name for name in found)
    plain, few = found["LocalSGD(every_steps=10)"], found["DiLoCo(every_steps=30)"]
    numel = 64 * 32 + 32
    assert 1 <= plain.timelines[-1].message_bytes(4) / (numel * dtype.itemsize) < 1.1
    assert few.timelines[-1].message_bytes(4) < 4 * numel / 5
    # In fp32 whatever the parameters are in.
    assert plain.memory_bytes == 4 * numel
    assert few.memory_bytes == 2 * 4 * numel
    assert found["DiLoCo(every_steps=30, outer=Nesterov(lr=1.0, momentum=0.5))"] is few
    assert all(map(torch.equal, before, model.parameters()))
