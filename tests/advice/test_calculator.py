"""The site's calculator says what the command says: the same constants, and in Node the same answers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from thinwire.advice.planned_steps import advise_by_size
from thinwire.probe.measured_link import MeasuredLink

ROOT = Path(__file__).parents[2]
FACTS: list[dict[str, Any]] = [
    {"parameters": 350_000_000, "computeSeconds": 0.8, "bytesPerSecond": 1.25e8, "machines": 2}
    | {"optimizer": "AdamW", "steps": 20000},
    {"parameters": 350_000_000, "computeSeconds": 0.8, "bytesPerSecond": 1.25e10, "machines": 2}
    | {"optimizer": "AdamW", "steps": 20000},
    {"parameters": 123_456_789, "computeSeconds": 0.1, "bytesPerSecond": 1.25e9, "machines": 8}
    | {"optimizer": "Muon", "steps": 300},
    {"parameters": 7_000_000_000, "computeSeconds": 3.0, "bytesPerSecond": 1.25e9, "machines": 3}
    | {"optimizer": "SGD", "steps": 400},
    {"parameters": 5_000_000, "computeSeconds": 0.5, "bytesPerSecond": 1.25e7, "machines": 2}
    | {"optimizer": None, "steps": None},
    {"parameters": 70, "computeSeconds": 0.01, "bytesPerSecond": 1.25e7, "machines": 2}
    | {"optimizer": "Lion", "steps": 2000},
]


def test_the_constants_are_those_of_the_package() -> None:
    made = run_path(str(ROOT / "scripts" / "calculator_constants.py"))["constants"]()
    told = "run scripts/calculator_constants.py"
    assert json.loads((ROOT / "docs" / "calculator.json").read_text()) == made, told


@pytest.mark.skipif(shutil.which("node") is None, reason="Node runs the calculator")
def test_the_calculator_says_what_the_command_says() -> None:
    script = (
        "const {answer} = require('./docs/calculator.js'), constants = require('./docs/calculator.json');"
        "const facts = JSON.parse(process.argv[1]);"
        "console.log(JSON.stringify(facts.map((one) => answer(one, constants))));"
    )
    run = ["node", "-e", script, json.dumps(FACTS)]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    for facts, told in zip(FACTS, json.loads(ended.stdout), strict=True):
        link = MeasuredLink.of_rate(8 * facts["bytesPerSecond"], 0.0, facts["machines"])
        advice = advise_by_size(
            facts["parameters"],
            facts["computeSeconds"],
            link,
            optimizer=facts["optimizer"],
            total_steps=facts["steps"],
        )
        assert told["best"] == advice.best.name, facts
        ways = {way["name"]: way for way in told["ways"]}
        for prediction in advice.predictions:
            if not prediction.name.startswith("TopK"):
                way = ways.pop(prediction.name)
                assert way["sentBytes"] == prediction.sent_bytes, (facts, prediction.name)
                assert way["stepSeconds"] == pytest.approx(prediction.step_seconds, rel=1e-6)
                assert way["loss"] == prediction.loss.percent, (facts, prediction.name)
        assert not ways
