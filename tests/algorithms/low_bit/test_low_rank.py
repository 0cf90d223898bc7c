"""The low-rank part under few bits: what it saves, what it remembers, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from catalog import buckets, random_gradients, spec, true_means
from thinwire import ConfigError, PowerSGD, Quantize
from thinwire.algorithms.lowrank.slots import FACTOR
from thinwire.kernels import dispatch
from thinwire.plan import ParameterSpec
from thinwire.simulation import Simulation

LAYOUT = [(spec("weight", 64, 96), spec("bias", 64), spec("tiny", 2, 3))]


def near_rank_4(step: int, workers: int = 3) -> list[list[torch.Tensor]]:
    """Matrices with four large directions, the same in every step, beneath noise of each worker."""
    draws = torch.Generator().manual_seed(0)
    large = torch.randn(64, 4, generator=draws) @ torch.randn(4, 96, generator=draws)
    gradients = random_gradients(LAYOUT, num_workers=workers, seed=step)
    for (flat,) in gradients:
        flat[: large.numel()].mul_(0.2).add_(large.flatten())
    return gradients


def errors(algorithm: Quantize, steps: int = 3) -> list[float]:
    """How far the mean is from the true one, by step."""
    simulation, found = Simulation(algorithm, LAYOUT, num_workers=3), []
    for step in range(steps):
        gradients = near_rank_4(step)
        (true,) = true_means(gradients)
        assert simulation.step(gradients)
        found.append(float((gradients[0][0] - true).norm() / true.norm()))
    return found


@pytest.mark.parametrize("bits", [4, 2])
def test_what_is_left_of_large_directions_is_coded_more_exactly(bits: int) -> None:
    alone, beside = errors(Quantize(bits=bits)), errors(Quantize(bits=bits, low_rank=4))
    assert beside[-1] < 0.4 * alone[-1]
    assert beside[-1] < 0.6 * beside[0]  # the first basis was drawn, later ones have been found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_workers_of_two_machines_get_the_same_and_remember_by_parameter(dtype: torch.dtype) -> None:
    layout = buckets(dtype)
    by_machine, apart = (
        Simulation(Quantize(bits=4, low_rank=2), layout, num_workers=2 * count, workers_per_machine=count)
        for count in (2, 1)
    )
    for step in range(3):
        gradients = random_gradients(layout, num_workers=4, seed=step)
        (one, *others), two = [[flat.clone() for flat in of] for of in gradients], gradients[::2]
        two = [[(a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in (gradients[:2], gradients[2:])]
        assert by_machine.step([one, *others])
        assert apart.step(two)
        for worker in others:
            assert all(map(torch.equal, one, worker))
    states = [simulation.state_dicts()[0]["factor"] for simulation in (by_machine, apart)]
    assert dict(states[0]).keys() == dict(states[1]).keys() == {"head.weight", "body.weight", "conv.weight"}


@pytest.mark.filterwarnings("ignore:the state.s factors of weight are of a different matrix rank")
def test_a_state_goes_on_with_any_number_of_workers_and_any_rank() -> None:
    old = Simulation(Quantize(bits=2, low_rank=4), LAYOUT, num_workers=3)
    assert old.step(near_rank_4(0))
    state = old.state_dicts()[0]
    assert dict(state["factor"])["weight"].shape == (4, 96)
    for workers, algorithm in ((2, Quantize(bits=2, low_rank=4)), (3, PowerSGD(matrix_rank=2))):
        new = Simulation(algorithm, LAYOUT, num_workers=workers)
        for sync in new.syncs:
            sync.load_state_dict(state)
        assert new.step(near_rank_4(1, workers))


def test_a_step_that_is_not_finite_leaves_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    simulation = Simulation(Quantize(bits=4, low_rank=4), LAYOUT, num_workers=2)
    assert simulation.step(near_rank_4(0, 2))
    before = [dict(engine.state.memory[FACTOR]) for engine in simulation.engines]
    for position in (5, -1):  # in a matrix, and in what is coded alone
        gradients = near_rank_4(1, 2)
        gradients[1][0][position] = math.nan
        assert not simulation.step(gradients)
        for engine, was in zip(simulation.engines, before, strict=True):
            assert all(torch.equal(engine.state.memory[FACTOR][name], was[name]) for name in was)
            assert engine.state.memory.step == 1


@pytest.mark.parametrize("size", [1.0, 1024.0])
def test_a_loss_scale_does_not_stay_in_the_factor(size: float) -> None:
    layout = [(spec("weight", 64, 96),)]
    plain, scaled = (
        Simulation(Quantize(bits=4, low_rank=4), layout, num_workers=2, loss_scale=scale)
        for scale in (None, lambda _: torch.tensor(size))
    )
    assert plain.step([[flat[:6144].clone()] for (flat,) in near_rank_4(0, 2)])
    assert scaled.step([[size * flat[:6144]] for (flat,) in near_rank_4(0, 2)])
    factors = [simulation.engines[0].state.memory[FACTOR]["weight"] for simulation in (plain, scaled)]
    torch.testing.assert_close(*factors)


def test_matrices_that_do_not_gain_travel_in_codes_alone() -> None:
    plan = Quantize(bits=2, low_rank=8).plan([spec("square", 64, 64), spec("long", 64, 65), spec("bias", 64)])
    assert [route.rounds for route in plan.routes] == [4, 4, 2]
    assert [route.rounds for route in Quantize(bits=1, low_rank=8).plan([spec("square", 64, 64)]).routes] == [
        2
    ]


@pytest.mark.parametrize(
    ("low_rank", "model"), [(64, (spec("weight", 64, 512),)), (1, (spec("bias", 64),)), (9, LAYOUT[0][1:])]
)
def test_a_rank_by_which_no_matrix_gains_is_refused(low_rank: int, model: tuple[ParameterSpec, ...]) -> None:
    with pytest.raises(ConfigError, match=f"low_rank={low_rank} fits no matrix of the model"):
        Quantize(bits=4, low_rank=low_rank).check_model(model)


def test_error_feedback_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="low_rank is of this step's gradient and takes no error_feedback"):
        Quantize(bits=4, low_rank=4, error_feedback=True)
