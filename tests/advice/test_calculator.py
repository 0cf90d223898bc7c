"""The site's calculator says what the command says: its answers in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from thinwire.advice.planned_steps import advise_by_size
from thinwire.probe.measured_link import MeasuredLink

ROOT = Path(__file__).parents[2]
NAMES = "parameters", "computeSeconds", "bytesPerSecond", "machines", "optimizer", "steps"
FACTS: list[dict[str, Any]] = [
    dict(zip(NAMES, values, strict=True))
    for values in (
        (350_000_000, 0.8, 1.25e8, 2, "AdamW", 20000),
        (350_000_000, 0.8, 1.25e10, 2, "AdamW", 20000),
        (123_456_789, 0.1, 1.25e9, 8, "Muon", 300),
        (7_000_000_000, 3.0, 1.25e9, 3, "SGD", 400),
        (5_000_000, 0.5, 1.25e7, 2, None, None),
        (70, 0.01, 1.25e7, 2, "Lion", 2000),
    )
]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node runs the calculator")
def test_the_calculator_says_what_the_command_says() -> None:
    script = (
        "const {answer} = require('./docs/calculator.js'), constants = require('./docs/calculator.json');"
        "const facts = JSON.parse(process.argv[1]);"
        "console.log(JSON.stringify(facts.map((one) => answer(one, constants))));"
    )
    run = ["node", "-e", script, json.dumps(FACTS)]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    for facts, answer in zip(FACTS, json.loads(ended.stdout), strict=True):
        link = MeasuredLink.of_rate(8 * facts["bytesPerSecond"], 0.0, facts["machines"])
        options = {"optimizer": facts["optimizer"], "total_steps": facts["steps"]}
        advice = advise_by_size(facts["parameters"], facts["computeSeconds"], link, **options)
        assert answer["best"] == advice.best.name, facts
        ways = {way["name"]: way for way in answer["ways"]}
        for prediction in advice.predictions:
            if not prediction.name.startswith("TopK"):
                way = ways.pop(prediction.name)
                assert way["sentBytes"] == prediction.sent_bytes, (facts, prediction.name)
                assert way["stepSeconds"] == pytest.approx(prediction.step_seconds, rel=1e-6)
                assert way["loss"] == prediction.loss.percent, (facts, prediction.name)
        assert not ways
