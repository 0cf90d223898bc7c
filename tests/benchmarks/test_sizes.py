"""Trainings of `bench_sizes.py`: a small one by each method, and which run is next."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from thinwire.demo.model import GPT, GPTConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 4


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_sizes")


def ended(training: Any) -> Any:
    while not training.is_over():
        training.advance()
    return training.outcome()


def test_all_methods_train_on_means_of_engines(sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each training compares itself with Thinwire's engines, and its gradients with a plain pass."""
    captured = importlib.import_module("captured")
    monkeypatch.setattr(captured, "HELDOUT_BATCHES", 1)
    run = sizes.Run("tiny", "", seed=0, steps=STEPS, rate=2e-3, windows=4)
    new_model = partial(GPT, GPTConfig(1, 2, 64, captured.CONTEXT_LENGTH))
    errors = {}
    for name, algorithm in sizes.METHODS.items():
        training = captured.Training(replace(run, method=name), new_model, algorithm, captures=False)
        outcome = ended(training)
        assert outcome.curve[-1] < outcome.curve[0] < 1.1 * math.log(256), name
        errors[name] = outcome.errors["matrices"]
    assert errors["exact"] == 0
    assert errors["bf16"] < 1e-4 < errors["4 bits"] < errors["3 bits"] < errors["2 bits"] < 0.3


def test_runs_wait_for_their_rate_and_what_is_done_is_not_done_again(sizes: Any) -> None:
    tuning, compared = list(sizes.tuning(["3 M"])), list(sizes.compared(["3 M"], ["exact", "2 bits"]))
    schedule = sizes.Schedule([*tuning, *compared], [])
    taken = [schedule.next_run(math.inf) for _ in tuning]
    assert taken == tuning
    assert schedule.next_run(math.inf) is None  # no rate is known yet
    for run, loss in zip(tuning, (1.5, 1.3, 1.4), strict=True):
        schedule.ended(run, outcome_of(sizes, loss))
    first = schedule.next_run(math.inf)
    assert first == replace(compared[0], rate=tuning[1].rate)
    schedule.ended(first, None)  # it has failed

    found = [sizes.Record(run, outcome_of(sizes, loss)) for run, loss in ((tuning[0], 1.5), (first, 1.2))]
    found = [sizes.Record.of_line(record.line()) for record in found]
    again = sizes.Schedule([tuning[0], *compared], found)
    assert again.next_run(math.inf).method == "exact"  # at the rate that is best of those known now
    assert sizes.Schedule([tuning[0]], found).next_run(math.inf) is None


def outcome_of(sizes: Any, loss: float) -> Any:
    return sizes.Outcome(
        loss=loss,
        curve=[loss],
        errors=dict.fromkeys(sizes.KINDS, 0.0),
        bytes_a_step=1,
        times_fewer=1.0,
        seconds=1.0,
        preparing=0.1,
        device="none",
        versions="none",
    )
