"""Factors in 8 bits: their bytes, budget and settings.

That nothing of them is lost, the conformance suite and the properties say.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from catalog import low_rank_routes, random_gradients, spec
from thinwire import ConfigError, PowerSGD
from thinwire.plan import Cut, ParameterSpec
from thinwire.simulation import Simulation

LAYOUT = [(spec("plain", 96, 64), spec("rich", 64, 100), spec("bias", 64))]


def test_they_take_about_a_quarter_of_the_bytes_of_fp32() -> None:
    specs = [spec("weight", 512, 512)]
    whole, coded = (PowerSGD(matrix_rank=4, factor_bits=bits).plan(specs) for bits in (None, 8))
    assert coded.routes[0].detail == "512×512, rank 4, 8 bits"
    assert coded.message_bytes / whole.message_bytes == 66 / 256


@pytest.mark.parametrize("alternating", [False, True])
def test_a_budget_of_bytes_is_kept_to_and_buys_higher_matrix_ranks(alternating: bool) -> None:
    """With what fills up the shares of three workers."""
    budget, ranks = 3_000 if alternating else 6_000, {}
    for bits in (None, 8):
        algorithm = PowerSGD(
            matrix_rank=3,
            factor_bits=bits,
            bytes_per_step=budget,
            replan_every_steps=4,
            alternating=alternating,
        )
        simulation = Simulation(algorithm, LAYOUT, num_workers=3)
        for step in range(15):
            if step == 13:  # between the third choice and the fourth
                before = simulation.syncs[0].stats().message_bytes
            assert simulation.step(random_gradients(LAYOUT, num_workers=3, seed=step))
        sent_bytes = simulation.syncs[0].stats().message_bytes - before
        assert sent_bytes == 2 * simulation.syncs[0].plan.message_bytes <= 2 * budget
        ranks[bits] = [route.matrix_rank or 0 for route in low_rank_routes(simulation.syncs[0].plan)]
    assert sum(ranks[8]) > sum(ranks[None]) + 2


def test_a_saved_state_tells_of_them() -> None:
    simulation = Simulation(PowerSGD(matrix_rank=2, factor_bits=8), LAYOUT, num_workers=2)
    assert simulation.step(random_gradients(LAYOUT, num_workers=2, seed=0))
    state = simulation.state_dicts()[0]
    assert "factor_bits=8" in state["algorithm"]
    assert state["buckets"] == (("plain", "rich", "bias"),)


@pytest.mark.parametrize("bits", [4, 16, 0, True, "8", 8.0])
def test_other_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match=f"factor_bits must be .*got {bits!r}"):
        PowerSGD(factor_bits=bits)


def test_another_spelling_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'wire_bits'; write PowerSGD\(factor_bits=8\)"):
        PowerSGD(wire_bits=8)  # type: ignore[call-arg]


def test_whole_matrices_of_shards_are_refused() -> None:
    shard = ParameterSpec.of("weight", torch.empty(32, 64))._replace(cut=Cut((64, 64), 0, 2))
    with pytest.raises(ConfigError, match="factor_bits does not go with whole_matrices=True"):
        PowerSGD(factor_bits=8).check_model([shard])
