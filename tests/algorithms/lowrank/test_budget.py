"""Matrix ranks chosen by bytes or by relative error, from what a run measures."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import thinwire
from catalog import Gradients, low_rank_routes, spec
from pool import Pool
from thinwire import CommunicationError, ConfigError, PowerSGD
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.budget import Spectrum, within_bytes, within_error
from thinwire.simulation import Simulation

STEPS = 24
SPECS = [(spec("plain", 48, 64), spec("rich", 64, 48), spec("bias", 48))]
BYTES = 4 * (48 + 6 * (48 + 64))  # a matrix rank of 3 each, or others


def gradients(step: int, num_workers: int = 2) -> Gradients:
    """Of "plain", of matrix rank 1; of "rich", of full matrix rank with equal singular values."""
    draws = torch.Generator().manual_seed(step)
    found = []
    for _ in range(num_workers):
        plain = torch.outer(torch.arange(1.0, 49.0), torch.ones(64)) * torch.rand(1, generator=draws)
        rich = torch.linalg.qr(torch.randn(64, 48, generator=draws))[0]
        found.append([torch.cat([plain.flatten(), rich.flatten(), torch.randn(48, generator=draws)])])
    return found


def run(algorithm: PowerSGD, steps: int = STEPS, num_workers: int = 2) -> Simulation:
    simulation = Simulation(algorithm, SPECS, num_workers=num_workers)
    for step in range(steps):
        simulation.step(gradients(step, num_workers))
    return simulation


def ranks_of(simulation: Simulation) -> dict[str, int]:
    return {route.label: route.matrix_rank or 0 for route in low_rank_routes(simulation.syncs[0].plan)}


spectra = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(
        Spectrum,
        rank_bytes=st.integers(1, 50),
        max_rank=st.integers(1, 5),
        energies=st.lists(st.floats(1, 100), min_size=1, max_size=4).map(lambda e: sorted(e, reverse=True)),
        tail=st.floats(0, 100),
    ),
    min_size=1,
)


@settings(deadline=None, max_examples=30)
@given(spectra)
def test_beyond_what_was_found_the_energies_add_up_to_the_rest(found: dict[str, Spectrum]) -> None:
    for each in found.values():
        count = len(each.energies)
        beyond = math.fsum(each.energy(count + index) for index in range(2_000))
        assert beyond == pytest.approx(each.tail, rel=1e-3, abs=1e-9)
        for rank in range(count + 3):
            assert each.tail_at(rank) - each.tail_at(rank + 1) == pytest.approx(each.energy(rank), abs=1e-6)


@settings(deadline=None)
@given(spectra, st.integers(0, 400))
def test_bytes_are_kept_to(found: dict[str, Spectrum], budget: int) -> None:
    ranks = within_bytes(found, budget)
    spent = sum(found[name].rank_bytes * rank for name, rank in ranks.items())
    assert spent <= max(budget, sum(each.rank_bytes for each in found.values()))
    assert all(
        1 <= rank <= max(found[name].max_rank, found[name].matrix_rank) for name, rank in ranks.items()
    )
    more = [each.rank_bytes for name, each in found.items() if ranks[name] < each.farthest[1]]
    assert all(spent + each > budget for each in more)


def test_at_the_end_of_the_way_is_the_best_choice() -> None:
    """Against all others, where every matrix rank costs the same."""
    energies = {"a": [9.0, 4.0, 1.0, 0.5], "b": [25.0, 16.0, 0.2, 0.1], "c": [3.0, 2.9, 2.8, 2.7]}
    for budget in range(3, 13):
        ranks = dict.fromkeys(energies, 1)
        for _ in range(8):
            found = {
                name: Spectrum(1, 4, each[: ranks[name]], math.fsum(each[ranks[name] :]))
                for name, each in energies.items()
            }
            ranks = within_bytes(found, budget)
        rest = sum(math.fsum(each[ranks[name] :]) for name, each in energies.items())
        others = [each for each in itertools.product(range(1, 5), repeat=3) if sum(each) <= budget]
        best = min(
            sum(math.fsum(each[rank:]) for each, rank in zip(energies.values(), other, strict=True))
            for other in others
        )
        assert rest <= 1.35 * best + 1e-9, (budget, ranks)


@settings(deadline=None)
@given(spectra, st.floats(0.01, 0.99))
def test_an_error_is_kept_to_in_the_end(found: dict[str, Spectrum], error: float) -> None:
    for name, rank in within_error(found, error).items():
        each = found[name]
        most = error**2 * (each.tail + math.fsum(each.energies))
        if rank <= each.matrix_rank and rank < each.max_rank:
            assert each.tail_at(rank) <= most
        if rank < each.max_rank and each.matrix_rank < rank < each.farthest[1]:
            assert each.tail_at(rank - 1) > most


@pytest.mark.parametrize("alternating", [False, True])
def test_what_has_more_to_tell_gets_more_bytes(alternating: bool) -> None:
    budget = BYTES // 2 if alternating else BYTES
    algorithm = PowerSGD(matrix_rank=3, bytes_per_step=budget, replan_every_steps=8, alternating=alternating)
    simulation = run(algorithm)
    ranks = ranks_of(simulation)
    assert ranks["plain"] == 1
    assert ranks["rich"] > 3
    assert ranks["bias"] == 0
    assert simulation.syncs[0].plan.message_bytes <= budget
    assert simulation.syncs[0].algorithm == simulation.syncs[1].algorithm
    assert simulation.syncs[0].stats().compression_ratio > 4


def test_until_the_first_choice_the_matrix_rank_holds() -> None:
    algorithm = PowerSGD(matrix_rank=3, bytes_per_step=BYTES, replan_every_steps=8)
    assert ranks_of(run(algorithm, steps=7)) == {"plain": 3, "rich": 3, "bias": 0}
    assert ranks_of(run(algorithm, steps=8))["plain"] < 3
    late = PowerSGD(matrix_rank=3, bytes_per_step=BYTES, replan_every_steps=8, warmup_steps=8)
    assert ranks_of(run(late, steps=9))["plain"] == 3
    assert ranks_of(run(late, steps=16))["plain"] < 3


@pytest.mark.parametrize("settings", [{}, {"matrix_ranks": {"rich": 9}}, {"warmup_steps": 2}], ids=str)
@pytest.mark.parametrize("alternating", [False, True])
def test_bytes_are_kept_to_from_the_first_compressed_step(
    alternating: bool, settings: dict[str, Any]
) -> None:
    """Alternating, each two steps keep to twice the bytes."""
    algorithm = PowerSGD(
        matrix_rank=12, bytes_per_step=BYTES, replan_every_steps=50, alternating=alternating, **settings
    )
    simulation, sent = Simulation(algorithm, SPECS, num_workers=2), [0]
    for step in range(8):
        simulation.step(gradients(step))
        sent.append(simulation.syncs[0].stats().message_bytes)
    start, most = (2 if settings.get("warmup_steps") else 0), 2 * BYTES
    assert all(after - before <= most for before, after in zip(sent[start:], sent[start + 2 :], strict=False))
    assert sent[-1] - sent[-3] > most / 2
    assert ranks_of(simulation) == ranks_of(resumed(simulation.state_dicts(), algorithm))
    simulation.syncs[0].use(PowerSGD(matrix_rank=12))
    assert simulation.syncs[0].plan.message_bytes > BYTES
    simulation.syncs[0].use(algorithm)
    assert simulation.syncs[0].plan.message_bytes <= BYTES


def test_a_relative_error_is_reached() -> None:
    """Of a fixed gradient with singular values 1, 0.8, 0.64 …, and of what stays owed on it."""
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 40, generator=draws))[0] for size in (64, 48))
    gradient = (left * 0.8 ** torch.arange(40)) @ right.T
    algorithm = PowerSGD(matrix_rank=1, max_relative_error=0.6, replan_every_steps=5)
    simulation = Simulation(algorithm, [(spec("weight", 64, 48),)], num_workers=1)
    told = []
    for _ in range(90):
        simulation.step([[gradient.flatten().clone()]])
        told.append(simulation.syncs[0].stats().relative_error["weight"])
    assert told[3] > 0.75
    assert all(0.35 < each < 0.8 for each in told[45:])
    assert 5 < ranks_of(simulation)["weight"] < 13


def test_nothing_is_lost_over_changes_of_the_plan() -> None:
    simulation = Simulation(
        PowerSGD(matrix_rank=3, bytes_per_step=BYTES, replan_every_steps=5), SPECS, num_workers=3
    )
    total = torch.zeros(sum(each.numel for each in SPECS[0]))
    returned = total.clone()
    plans = set()
    for step in range(STEPS):
        found = gradients(step, 3)
        total += sum(worker[0] for worker in found) / 3
        simulation.step(found)
        returned += found[0][0]
        plans.add(str(ranks_of(simulation)))
    assert len(plans) > 1
    owed = torch.zeros_like(total)
    for engine in simulation.engines:
        error = engine.memory[ERROR]
        flat = [error.get(each.name, torch.zeros(each.numel)) for each in SPECS[0]]
        owed += torch.cat(flat) / 3
    assert (total - returned - owed).norm() < 1e-5 * total.norm()


@pytest.mark.parametrize("saved_after", [7, 8, 11])
def test_a_resumed_run_has_the_same_plan_to_the_bit(saved_after: int) -> None:
    algorithm = PowerSGD(matrix_rank=3, bytes_per_step=BYTES, replan_every_steps=8)
    first = run(algorithm, steps=saved_after)
    states = first.state_dicts()
    second = Simulation(algorithm, SPECS, num_workers=2)
    for sync, state in zip(second.syncs, states, strict=True):
        sync.load_state_dict(state)
    for step in range(saved_after, STEPS):
        a, b = gradients(step), gradients(step)
        first.step(a)
        second.step(b)
        assert torch.equal(a[0][0], b[0][0])
        assert ranks_of(first) == ranks_of(second)
    assert ranks_of(second)["rich"] > 3


def test_a_new_plan_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "thinwire"):
        run(PowerSGD(matrix_rank=3, bytes_per_step=BYTES, replan_every_steps=8), steps=9)
    assert "step 8: a new plan" in caplog.text
    assert "compression ratio" in caplog.text


def test_matrix_ranks_of_ones_own() -> None:
    simulation = run(PowerSGD(matrix_rank=2, matrix_ranks={"rich": 5}), steps=2)
    assert ranks_of(simulation) == {"plain": 2, "rich": 5, "bias": 0}
    assert hash(PowerSGD(matrix_ranks={"rich": 5})) == hash(PowerSGD(matrix_ranks=(("rich", 5),)))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"bytes_per_step": 0}, "bytes_per_step must be a whole number of at least 1"),
        ({"max_relative_error": 1.0}, "max_relative_error must be above 0 and below 1"),
        ({"max_relative_error": True}, "max_relative_error must be a number"),
        ({"max_relative_error": "low"}, "max_relative_error must be a number"),
        ({"max_relative_error": 0.5, "bytes_per_step": 5}, "expected one of them"),
        ({"max_relative_error": 0.5, "warm_start": False}, "leave both on"),
        ({"bytes_per_step": 500, "error_feedback": False}, "leave both on"),
        ({"replan_every_steps": 0}, "replan_every_steps must be"),
        ({"matrix_ranks": {"rich": 0}}, "the matrix rank of rich must be"),
        ({"matrix_ranks": 5}, "matrix_ranks must map names"),
        ({"matrix_ranks": "ab"}, "matrix_ranks must map names"),
        ({"max_relative_error": 0.5, "alternating": True, "power_iterations": 2}, "tell only a part"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PowerSGD(**settings)  # type: ignore[arg-type]


def test_what_does_not_fit_the_model_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="sends 1088 at matrix rank 1"):
        Simulation(PowerSGD(bytes_per_step=1000), SPECS, num_workers=2)
    with pytest.raises(ConfigError, match="matrix_ranks has 'head', which is no parameter"):
        Simulation(PowerSGD(matrix_ranks={"head": 2}), SPECS, num_workers=2)


@pytest.mark.usefixtures("one_for_all")
def test_on_gradients_that_stay_the_same_it_settles() -> None:
    """The last choices differ by one at most, on any number of workers."""
    for num_workers in (1, 4):
        simulation = Simulation(
            PowerSGD(matrix_rank=3, bytes_per_step=BYTES, replan_every_steps=5),
            SPECS,
            num_workers=num_workers,
        )
        seen = []
        for step in range(70):
            simulation.step(gradients(step, num_workers))
            seen.append(ranks_of(simulation)["rich"])
        assert max(seen[40:]) - min(seen[40:]) <= 1
        assert seen[-1] >= 4


def test_one_matrix_rank_is_enough_for_a_gradient_of_one() -> None:
    simulation = Simulation(
        PowerSGD(matrix_rank=4, max_relative_error=0.5, replan_every_steps=4), SPECS, num_workers=2
    )
    for step in range(40):
        simulation.step(gradients(step))
    assert ranks_of(simulation)["plain"] == 1


@pytest.mark.parametrize("shape", [(48,), (8, 1)])
def test_with_nothing_to_compress_there_is_nothing_to_choose(shape: tuple[int, ...]) -> None:
    small = [(spec("bias", *shape),)]
    simulation = Simulation(PowerSGD(bytes_per_step=10**6, replan_every_steps=2), small, num_workers=2)
    for _ in range(5):
        simulation.step([[torch.ones(math.prod(shape))] for _ in range(2)])
    assert simulation.syncs[0].plan.compression_ratio == 1


def test_what_is_too_small_for_the_matrix_rank_is_compressed_at_a_lower_one() -> None:
    layout = [(*[spec(f"small.{n}", 12, 12) for n in range(20)], spec("large", 64, 64))]
    least = PowerSGD(matrix_rank=1).plan(layout[0]).message_bytes
    simulation = Simulation(PowerSGD(bytes_per_step=least, replan_every_steps=3), layout, num_workers=1)
    for _ in range(30):
        simulation.step([[torch.randn(sum(each.numel for each in layout[0]))]])
    assert simulation.syncs[0].plan.message_bytes <= least


def resumed(states: list[dict[str, Any]], algorithm: PowerSGD) -> Simulation:
    simulation = Simulation(algorithm, SPECS, num_workers=2)
    for sync, state in zip(simulation.syncs, states, strict=True):
        sync.load_state_dict(state)
    return simulation


def test_ones_own_matrix_ranks_outlive_a_resume_in_the_warm_up() -> None:
    algorithm = PowerSGD(
        matrix_rank=2, matrix_ranks={"rich": 6}, bytes_per_step=10**5, warmup_steps=3, replan_every_steps=50
    )
    first = run(algorithm, steps=2)
    second = resumed(first.state_dicts(), algorithm)
    for step in range(2, 8):
        a, b = gradients(step), gradients(step)
        first.step(a)
        second.step(b)
        assert torch.equal(a[0][0], b[0][0])
    assert ranks_of(second)["rich"] == 6


def test_switching_to_a_budget_and_resuming_there() -> None:
    algorithm = PowerSGD(matrix_rank=2, bytes_per_step=BYTES, replan_every_steps=50)
    first = run(PowerSGD(matrix_rank=6), steps=5)
    for sync in first.syncs:
        sync.use(algorithm)
    second = resumed(first.state_dicts(), algorithm)
    assert ranks_of(first) == ranks_of(second) == {"plain": 2, "rich": 2, "bias": 0}


@pytest.mark.filterwarnings("ignore:the state's factors")
def test_a_state_of_more_bytes_does_not_break_the_budget() -> None:
    states = run(PowerSGD(matrix_rank=12), steps=3).state_dicts()
    simulation = resumed(states, PowerSGD(matrix_rank=2, bytes_per_step=BYTES, replan_every_steps=50))
    assert simulation.syncs[0].plan.message_bytes <= BYTES


def test_a_choice_that_fails_comes_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = PowerSGD(matrix_rank=3, bytes_per_step=BYTES, replan_every_steps=8)
    simulation = run(algorithm, steps=7, num_workers=1)
    (engine,), (sync,) = simulation.engines, simulation.syncs
    mean = engine.metered.mean

    def failing(message: torch.Tensor, purpose: str) -> Any:
        if "what the plan is made by" in purpose:
            raise CommunicationError(f"{purpose} failed")
        return mean(message, purpose)

    with monkeypatch.context() as patched:
        patched.setattr(engine.metered, "mean", failing)
        with pytest.raises(CommunicationError, match="step 8, what the plan is made by"):
            simulation.step(gradients(7, 1))
    assert sync.steps == 8
    assert simulation.step(gradients(8, 1))
    assert ranks_of(simulation) == {"plain": 3, "rich": 3, "bias": 0}


def test_real_processes_choose_alike(pool2: Pool) -> None:
    first, second = pool2.run(_chosen)
    assert first == second
    assert len(first) == 2
    assert set(first.values()) != {2}


def _chosen() -> dict[str, int]:
    assert dist.get_world_size() == 2
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)))
    sync = thinwire.attach(model, PowerSGD(matrix_rank=2, bytes_per_step=6000, replan_every_steps=4))
    for step in range(10):
        draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
        torch.autograd.backward(model(torch.randn(32, 64, generator=draws)).square().sum())
    assert sync.plan.message_bytes <= 6000
    assert sync.algorithm == PowerSGD(matrix_rank=2, bytes_per_step=6000, replan_every_steps=4)
    assert sync.stats().compression_ratio > 5
    return dict(sync.state_dict()["choices"])
