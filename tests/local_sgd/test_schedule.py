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
LETTERS = {None: "-", "group": "G", "subgroup": "S"}


@pytest.mark.parametrize(("has_ddp", "has_subgroup", "gradients", "parameters"), ROWS)
def test_the_table(has_ddp: bool, has_subgroup: bool, gradients: str, parameters: str) -> None:
    """Two steps of warm-up, then over the group every three."""
    schedule = Schedule(3, Warmup(2), has_ddp, has_subgroup)
    assert "".join(LETTERS[schedule.gradients_in(step)] for step in range(8)) == gradients
    assert "".join(LETTERS[schedule.after(step)] for step in range(1, 9)) == parameters
    assert [schedule.is_warm_up(step) for step in range(1, 9)] == [True] * 2 + [False] * 6
    assert schedule.meets_in_subgroups == ("S" in parameters)


@pytest.mark.parametrize("has_ddp", [False, True])
@pytest.mark.parametrize("every_steps", [1, 4])
def test_without_a_warm_up(every_steps: int, has_ddp: bool) -> None:
    schedule = Schedule(every_steps, has_ddp=has_ddp)
    assert not any(schedule.gradients_in(step) for step in range(9))
    assert [step for step in range(1, 9) if schedule.after(step)] == list(range(every_steps, 9, every_steps))
    assert not any(schedule.is_warm_up(step) for step in range(1, 9))


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
    assert [list(schedule.fragments_after(step)) for step in (1, 2)] == [list(range(fragments))] * 2
    sent = [schedule.fragments_after(step) for step in range(3, len(turns) + 3)]
    assert "".join("-" if not each else str(*each) for each in sent) == turns
    assert [schedule.after(step) for step in range(1, 3)] == ["group"] * 2
    after = [schedule.after(step) for step in range(3, len(turns) + 3)]
    assert after == ["group" if each else None for each in sent]


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
    assert [each.local_weight(TopK()) for each in schedules] == [0.0, 0.0]
    assert [each.local_weight(Quantize()) for each in schedules] == [0.0, 0.5]
    given = Schedule(9, streaming=Streaming(delay_steps=5, local_weight=0.25))
    assert given.local_weight(TopK()) == given.local_weight(Quantize()) == 0.25
