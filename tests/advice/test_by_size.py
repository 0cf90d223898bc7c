"""`thinwire advise --parameters …`: the answer is that of a real model of that shape, and wrong input."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from advice.ways import network
from processes import Typed
from thinwire import advise
from thinwire.advice import Advice
from thinwire.advice.losses import BASELINE
from thinwire.advice.planned_steps import advise_by_size, gradient_shapes, in_buckets
from thinwire.advice.priced import TABLE, InBlocks, Priced
from thinwire.comm.metered import message_bytes_of
from thinwire.launch import group_of_one
from thinwire.plan import ParameterSpec
from thinwire.probe.measured_link import MeasuredLink

# Two blocks of width 64, and an embedding.
PARAMETERS = 64 * 1881


def one_step(model: nn.Module) -> None:
    torch.autograd.backward(model(torch.tensor([[0, 1]])).square().mean())


def by_name(advice: Advice) -> dict[str, Any]:
    return {prediction.name: prediction for prediction in advice.predictions}


@pytest.mark.parametrize("members", [2, 3, 8])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_bytes_are_those_of_the_algorithms_plans(row: Priced, members: int) -> None:
    assert eval(row.name, {name: getattr(thinwire, name) for name in thinwire.__all__}) == row.algorithm
    assert str(row.algorithm) == row.measured_as
    assert row.keeps_16_bits == (row.name in ("AllReduce()", BASELINE))
    for parameters in (1, 70, 5_000_000, 123_456_789):
        shapes = gradient_shapes(parameters)
        assert sum(map(math.prod, shapes)) == parameters
        for bucket in in_buckets(shapes):
            tensors = [torch.empty(shape, device="meta") for shape in bucket]
            specs = [ParameterSpec.of(f"{index}", tensor) for index, tensor in enumerate(tensors)]
            routes = row.algorithm.prepare(specs, num_members=members).routes
            sent = row.format.sent(bucket, members)
            counted = map(message_bytes_of, row.format.collectives, sent.handed_bytes, [members] * 2)
            assert sum(counted) == sum(route.message_bytes for route in routes)
            at_once = members == 2 and isinstance(row.format, InBlocks)
            assert len(sent.handed_bytes) == max(route.rounds for route in routes) + at_once
            kept = sum(route.gradient_bytes for route in routes if route.is_compressed)
            assert sent.residual_bytes == row.algorithm.remembers * kept


def test_the_answer_is_that_of_a_real_model_of_this_shape() -> None:
    """On a link so slow that the arithmetic of this machine, and its noise, count for nothing."""
    link = MeasuredLink.of_rate(1e3, 0.5, 3)
    blocks = [nn.TransformerEncoderLayer(64, 1, 256, dropout=0.0, batch_first=True) for _ in range(2)]
    with group_of_one():
        model = nn.Sequential(nn.Embedding(1881 - 2 * 781, 64), *blocks)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        assert shapes[::-1] == gradient_shapes(PARAMETERS)
        timed = advise(model, one_step, link.probe, budget_seconds=0.1, optimizer="AdamW", total_steps=2000)
    planned = advise_by_size(
        PARAMETERS, timed.compute_seconds, link, optimizer="AdamW", total_steps=2000, budget_loss=0.01
    )
    assert (planned.best.name, planned.best.loss) == (timed.best.name, timed.best.loss)
    expected = by_name(timed)
    for name, prediction in by_name(planned).items():
        # The thirds of two messages are rounded each by itself.
        assert prediction.sent_bytes == pytest.approx(expected[name].sent_bytes, abs=1), name
        assert prediction.rounds == expected[name].rounds, name
        assert prediction.step_seconds == pytest.approx(expected[name].step_seconds, rel=0.05), name
        assert prediction.residual_bytes == expected[name].residual_bytes


def test_a_step_at_a_rate() -> None:
    """100 M parameters are 400 MB, of which two machines send all: 3.2 s at 1 Gbit/s, half in 16 bits."""
    one = advise_by_size(100_000_000, 0.3, MeasuredLink.of_rate(1e9, 0.0, 2))
    exact, half = by_name(one)["AllReduce()"], by_name(one)['Cast("bf16")']
    assert exact.sent_bytes == 400e6
    # The first bucket, of at least 1 MiB, leaves when the forward pass has ended, and soon after.
    assert 3.2 + 0.1 < exact.step_seconds < 3.2 + 0.15
    assert 1.6 + 0.1 < half.step_seconds < 1.6 + 0.16
    # A machine of eight sends once.
    eight = advise_by_size(100_000_000, 0.3, MeasuredLink.of_rate(1e9, 0.0, 2, 8))
    assert [p.sent_bytes for p in eight.predictions] == [p.sent_bytes for p in one.predictions]
    assert eight.processes == 8
    assert "MB: what leaves a machine per step" in str(eight)


def test_small_gradients_are_left_to_ddp() -> None:
    """LoRA: 8 M of fp32 are 32 MB, 26 ms at 10 Gbit/s; 5 M are 160 ms at 1 Gbit/s, in a step of 4 s."""
    assert advise_by_size(8_000_000, 0.8, MeasuredLink.of_rate(1e10, 2e-4, 2)).adds_nothing
    assert advise_by_size(5_000_000, 4.0, MeasuredLink.of_rate(1e9, 2e-4, 2)).adds_nothing


def test_the_command(tmp_path: Path, typed: Typed) -> None:
    asked = ["advise", "--parameters=350m", "--compute=0.8s", "--optimizer=adamw", "--steps=20000", "--json"]
    stated = json.loads(typed(*asked, "--rate=1gbit", "--budget-loss=0.5%").stdout)
    assert stated["best"]["code"] == "thinwire.attach(ddp_model, thinwire.Quantize(bits=4))"
    assert stated["best"]["code"] in stated["lines"]["DDP"]
    assert stated["best"] in stated["tied"]
    assert (stated["optimizer"], stated["budget_loss"], stated["compress"]) == ("AdamW", 0.005, True)
    assert stated["best"]["step_seconds"] < stated["baseline"]["step_seconds"]
    assert any("Losses are not measured at this size" in note for note in stated["notes"])
    # A probe of such a link says the same.
    network(1e9, 1e-4).save(tmp_path / "probe.json")
    probed = json.loads(typed(*asked, f"--probe={tmp_path / 'probe.json'}").stdout)
    for one, other in zip(stated["predictions"], probed["predictions"], strict=True):
        assert one["sent_bytes"] == other["sent_bytes"]
        assert one["step_seconds"] == pytest.approx(other["step_seconds"], rel=0.01)


def test_the_page_has_the_answer(typed: Typed) -> None:
    page = (Path(__file__).parents[2] / "docs" / "will-it-pay.md").read_text()
    command, printed = page.split("\n```\n")[1:4:2]
    answer = re.sub("– +", "– ", typed(*command.split()[1:]).stdout)  # quartiles are one cell
    assert printed.splitlines()[:3] == answer.splitlines()[:3]
    table = {cells[0]: cells for cells in (re.split(" {2,}", line) for line in answer.splitlines())}
    for line in printed.splitlines()[6:12]:
        name, *shown = re.split(" {2,}", line)
        assert shown == [table[name][column] for column in (1, 3, 4, 6)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rate=1gbit --compute=2", "up to 3600s; got '2'"),
        ("--rate=1gbit --parameters=1X", "--parameters must be like 350M"),
        ("", "advise needs the link: --rate, such as 1gbit, or --probe"),
        ("--rate=1gb", "a rate must be like 100mbit"),
        ("--rate=1gbit --machines=1", "machines must be a whole number of at least 2, got 1"),
        ("--rate=1gbit --budget-loss=much", "--budget-loss must be from 0 to 20%, such as 0.5%"),
        ("--probe={probe} --machines=3", "--machines and --probe"),
        ("--probe=none.json", "none.json can't be read"),
    ],
)
def test_wrong_input_is_one_sentence(options: str, message: str, tmp_path: Path, typed: Typed) -> None:
    network(1e9).save(tmp_path / "probe.json")
    given = options.format(probe=tmp_path / "probe.json").split()
    done = typed("advise", "--parameters=1M", "--compute=1s", *given)
    assert done.stderr.startswith("thinwire: ")
    assert message in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
