"""The table of what is averaged over whom, as in docs/local-sgd.md."""

from __future__ import annotations

import pytest

from thinwire import Streaming, Warmup
from thinwire.algorithms import Quantize, TopK
from thinwire.local_sgd.schedule import Schedule

ROWS = [
    # has_ddp, has_subgroup, gradients of the eight steps, parameters after each of them
    (False, False, "--------", "GG--G--G"),
    (False, True, "--------", "GGSSGSSG"),
    (True, False, "GG------", "-G--G--G"),
    (True, True, "GGSSSSSS", "-G--G--G"),
]
LETTERS = {"": "-", "group": "G", "subgroup": "S"}


def turns_of(schedule: Schedule, num_steps: int) -> str:
    """Return after which steps members average: the fragment whose turn it is, "a" for all, "-" for none."""
    shown, turns, began = "", 0, 0
    for step in range(1, num_steps + 1):
        is_due = schedule.is_due(step, turns, step - began)
        place = "a" if schedule.is_warm_up(step) else str(turns % schedule.streaming.fragments)
        shown += place if is_due else "-"
        if is_due:
            turns, began = turns + (not schedule.is_warm_up(step)), step
        if step >= schedule.warmup.steps:
            assert schedule.position(step) == (turns, began)
    return shown


@pytest.mark.parametrize(("has_ddp", "has_subgroup", "gradients", "parameters"), ROWS)
def test_the_table(has_ddp: bool, has_subgroup: bool, gradients: str, parameters: str) -> None:
    """Two steps of warm-up, then over the group every three."""
    schedule = Schedule(3, Warmup(2), has_ddp, has_subgroup)
    assert "".join(LETTERS[schedule.gradients_in(step)] for step in range(8)) == gradients
    assert turns_of(schedule, 8) == parameters.replace("S", "-").replace("G", "a", 2 - has_ddp).replace(
        "G", "0"
    )
    assert schedule.averages_within == ("S" in parameters)


@pytest.mark.parametrize(
    ("every_steps", "fragments", "turns"),
    [
        (6, 1, "-----0" * 2),
        (6, 2, "--0--1" * 2),
        (5, 3, "-0-12" * 2),
        (4, 4, "0123" * 2),
    ],
)
def test_fragments_take_turns_after_the_warm_up(every_steps: int, fragments: int, turns: str) -> None:
    schedule = Schedule(every_steps, Warmup(2), streaming=Streaming(fragments=fragments))
    assert turns_of(schedule, len(turns) + 2) == "aa" + turns


@pytest.mark.parametrize(
    ("delay_steps", "num_rounds", "sent"),
    [
        (1, 1, [1, 1]),
        (4, 1, [1, 1, 1, 1, 1]),
        (4, 2, [1, 1, 2, 2, 2]),
        (3, 2, [1, 1, 2, 2]),
        (2, 3, [1, 2, 3]),
    ],
)
def test_rounds_are_spread_over_the_delay(delay_steps: int, num_rounds: int, sent: list[int]) -> None:
    schedule = Schedule(9, streaming=Streaming(delay_steps=delay_steps))
    assert [schedule.rounds_sent(age, num_rounds) for age in range(delay_steps + 1)] == sent


def test_what_a_model_keeps_of_its_own_if_nothing_is_said() -> None:
    """Nothing where a residual would send it a second time."""
    schedules = [Schedule(9, streaming=Streaming(delay_steps=steps)) for steps in (0, 5)]
    assert [schedule.local_weight(TopK()) for schedule in schedules] == [0.0, 0.0]
    assert [schedule.local_weight(Quantize()) for schedule in schedules] == [0.0, 0.5]
    given = Schedule(9, streaming=Streaming(delay_steps=5, local_weight=0.25))
    assert given.local_weight(TopK()) == given.local_weight(Quantize()) == 0.25
