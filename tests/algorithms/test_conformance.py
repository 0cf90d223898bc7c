"""What every algorithm must do, whatever it sends: one suite over the catalog, with simulated workers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from catalog import (
    ENTRIES,
    Entry,
    Sums,
    averaged,
    buckets,
    random_gradients,
    resumed,
    spec,
    true_means,
    whole_residual,
)
from thinwire import AllReduce
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.algorithms.lowrank.slots import FACTOR
from thinwire.kernels import dispatch
from thinwire.simulation import Simulation

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.usefixtures("one_for_all")


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without Numba and on accelerators; tests of whole processes run the compiled passes."""
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))


def over(entries: Iterable[Entry]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", list(entries), ids=str)


every_entry = over(ENTRIES)
every_lossless = over(entry for entry in ENTRIES if entry.lossless)
every_with_feedback = over(entry for entry in ENTRIES if entry.feedback)
# Types are rounded before workers meet: each of both is tried with one of the other.
every_dtype_and_size = pytest.mark.parametrize(
    ("dtype", "num_workers"), [*zip(DTYPES, [3, 1, 2, 2], strict=True)], ids=str
)


def simulation(entry: Entry, num_workers: int = 3, dtype: torch.dtype = torch.float32) -> Simulation:
    return Simulation(entry.algorithm, buckets(dtype), num_workers=num_workers)


def warmup_steps(algorithm: Algorithm) -> int:
    steps: int = getattr(algorithm, "warmup_steps", 0)
    return steps


def first_steps(entry: Entry) -> range:
    """Two that are compressed, after a warm-up that has an end."""
    return range(2 + min(3, warmup_steps(entry.algorithm)))


def run(sim: Simulation, steps: range, sums: Sums | None = None) -> list[list[torch.Tensor]]:
    """Results by step and bucket; of all workers the same, finite, of the gradients' type."""
    # After a warm-up the steps send what the plan says: that of alternating factors has the mean of both.
    results = []
    compressed = range(max(steps.start, warmup_steps(sim.engines[-1].algorithm)), steps.stop)
    for step in steps:
        if step == compressed.start:
            before = sim.syncs[-1].stats()
        results.append(averaged(sim, step, sums))
        for mine, bucket in zip(results[-1], sim.buckets, strict=True):
            assert mine.dtype == bucket[0].dtype
            assert mine.isfinite().all()
    if compressed and len(compressed) % 2 == 0:
        after, plan = sim.syncs[-1].stats(), sim.syncs[-1].plan
        assert after.message_bytes - before.message_bytes == len(compressed) * plan.message_bytes
        assert after.gradient_bytes - before.gradient_bytes == len(compressed) * plan.gradient_bytes
    return results


def assert_same_results(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(some, others, strict=True):
        assert all(map(torch.equal, mine, theirs))


@over(entry for entry in ENTRIES if not entry.feedback)  # of the others the next test but one says more
@every_dtype_and_size
def test_all_workers_get_the_same_finite_result_in_the_gradients_own_type(
    entry: Entry, dtype: torch.dtype, num_workers: int
) -> None:
    assert len(run(simulation(entry, num_workers, dtype), range(2))) == 2


@every_lossless
def test_lossless_ones_give_the_exact_mean(entry: Entry) -> None:
    sim = simulation(entry)
    for step, result in enumerate(run(sim, range(3))):
        means = true_means(random_gradients(sim.buckets, num_workers=3, seed=step))
        for flat, mean in zip(result, means, strict=True):
            torch.testing.assert_close(flat.double(), mean, rtol=1e-6, atol=1e-6)


@every_with_feedback
@every_dtype_and_size
def test_results_plus_final_mean_error_are_the_sum_of_true_means(
    entry: Entry, dtype: torch.dtype, num_workers: int
) -> None:
    sim, sums = simulation(entry, num_workers, dtype), Sums()
    run(sim, range(max(4, first_steps(entry).stop)), sums)
    lost = sums.lost(sim)
    # What travels whole has no error memory, so half precision rounds it for good.
    assert lost.norm() < max(entry.tolerance, 2e-3 if dtype.itemsize == 2 else 0.0)
    # One worker has no sum that is rounded; what it rounds to send 16 bits, it owes.
    is_owed = whole_residual(sim.state_dicts()[0], sim.buckets) != 0
    assert num_workers > 1 or lost[is_owed].norm() < 1e-15


@over(entry for entry in ENTRIES if warmup_steps(entry.algorithm) < 1_000)
def test_a_plan_tells_ratio_and_rounds_of_a_step(entry: Entry) -> None:
    for num_workers in (2, 5):
        plan = simulation(entry, num_workers).syncs[-1].plan
        assert (plan.compression_ratio > 1.9) == entry.compresses
    bucket, rounds = buckets()[:1], list[int]()
    sim = Simulation(entry.algorithm, bucket, num_workers=2)
    for step in first_steps(entry):
        sim.step(random_gradients(bucket, num_workers=2, seed=step))
        rounds.append(sim.syncs[0].stats().rounds)
    assert rounds[-1] - rounds[-2] == sim.syncs[0].plan.rounds


@every_entry
def test_a_saved_state_continues_bit_equal(entry: Entry) -> None:
    sim, first = simulation(entry, 2), first_steps(entry)
    run(sim, first)
    states = sim.state_dicts()
    for state in states[1:]:
        assert_same_state(state, states[0])
    again = resumed(simulation(entry, 2), states[0])
    then = range(first.stop, first.stop + 2)
    assert_same_results(run(sim, then), run(again, then))
    assert_same_state(sim.state_dicts()[0], again.state_dicts()[0])


@over(entry for entry in ENTRIES if entry.same_in_any_buckets)
def test_results_do_not_depend_on_which_parameters_share_a_bucket(entry: Entry) -> None:
    """DDP's first step has other buckets than those that follow: so has that of a run that resumes."""
    layout = buckets()
    together = [tuple(parameter for bucket in layout for parameter in bucket)]
    joined = Simulation(entry.algorithm, together, num_workers=3)
    divided = simulation(entry, 3)
    for step in first_steps(entry):
        gradients = random_gradients(layout, num_workers=3, seed=step)
        in_one = [[torch.cat(of_worker)] for of_worker in gradients]
        assert divided.step(gradients)
        assert joined.step(in_one)
        gap = (torch.cat(gradients[0]) - in_one[0][0]).norm() / in_one[0][0].norm()
        assert gap < 1e-6  # products of more matrices at once may round otherwise


@every_with_feedback
def test_nothing_is_lost_where_buckets_change_and_change_back_after_a_resume(entry: Entry) -> None:
    """Whatever results owe to the buckets."""
    layout, sums, num_steps = buckets(), Sums(), first_steps(entry).stop
    together = [tuple(parameter for bucket in layout for parameter in bucket)]
    first, second = simulation(entry, 2), simulation(entry, 2)
    for number in range(num_steps):
        first.buckets = together if number > 0 else layout
        averaged(first, number, sums)
    resumed(second, first.state_dicts()[0])
    for number in range(num_steps, num_steps + 2):
        second.buckets = together if number > num_steps else layout
        averaged(second, number, sums)
    assert sums.lost(second).norm() < entry.tolerance


NON_FINITE = [(torch.inf, 0), (-torch.inf, 1), (torch.nan, 0)]


@every_entry
def test_a_non_finite_gradient_skips_the_step_on_all(entry: Entry) -> None:
    """In the first bucket or the last, time after time: what follows is as if it had not been."""
    healthy, poisoned, first = simulation(entry, 2), simulation(entry, 2), first_steps(entry)
    run(poisoned, first)
    resumed(healthy, poisoned.state_dicts()[0])
    for step, (value, position) in enumerate(NON_FINITE, first.stop):
        gradients = random_gradients(poisoned.buckets, num_workers=2, seed=99)
        gradients[1][position][7] = value
        committed = poisoned.step(gradients)
        for of_worker in gradients:
            assert not torch.cat(of_worker).isfinite().all()
        after = run(poisoned, range(step, step + 1))
        if entry.feedback:
            assert not committed
            assert_same_results(after, run(healthy, range(step, step + 1)))
    if entry.feedback:
        assert [sync.stats().nonfinite_steps for sync in poisoned.syncs] == [len(NON_FINITE)] * 2
        again = resumed(simulation(entry, 2), poisoned.state_dicts()[0])
        assert again.syncs[1].steps == poisoned.syncs[1].steps == first.stop + 2 * len(NON_FINITE)


@every_with_feedback
def test_switching_to_exact_pays_back_all_that_is_owed(entry: Entry) -> None:
    sim, first, sums = simulation(entry, 2), first_steps(entry), Sums()
    run(sim, first, sums)
    for sync in sim.syncs:
        sync.use(AllReduce())
    run(sim, range(first.stop, first.stop + 2), sums)
    assert all(not dict(state["error"]) for state in sim.state_dicts())
    assert sums.lost(sim).norm() < entry.tolerance


@every_with_feedback
def test_a_layer_that_was_dead_for_a_while_comes_back_whole(entry: Entry) -> None:
    """Zero gradients, then gradients of rank one, then full ones: no direction is lost for good."""
    layout = [(spec("weight", 48, 40),)]
    sim = Simulation(entry.algorithm, layout, num_workers=2)
    full = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    thin = full[:, :1] @ full[:1]
    for matrix, steps in ((torch.zeros(48, 40), 2), (thin, 2), (full, 2)):
        for _ in range(steps):
            gradients = [[matrix.reshape(-1).clone()] for _ in range(2)]
            assert sim.step(gradients)
            assert gradients[0][0].isfinite().all()
    factor = sim.engines[0].state.memory[FACTOR]
    for rows in factor.values():
        assert (rows.norm(dim=1) > 0).all()
    if getattr(entry.algorithm, "wire_dtype", None) is None:
        alive = torch.linalg.matrix_rank(gradients[0][0].view(48, 40), rtol=1e-4)
        lowest = getattr(entry.algorithm, "matrix_rank", 1)
        assert alive >= (1 if isinstance(entry.algorithm, BatchedPowerSGD) else lowest)


@over(entry for entry in ENTRIES if entry.feedback and getattr(entry.algorithm, "wire_dtype", None) != "fp16")
def test_a_loss_scale_changes_no_unscaled_result(entry: Entry) -> None:
    """Whatever the scale, and however it jumps: a power of two changes no digit."""
    scales = [1.0, 2.0**16, 2.0**-3]
    scale = torch.ones(())
    plain = simulation(entry, 2)
    scaled = Simulation(entry.algorithm, buckets(), num_workers=2, loss_scale=lambda device: scale)
    for step, value in enumerate(scales):
        scale.fill_(value)
        expected = run(plain, range(step, step + 1))[0]
        gradients = random_gradients(scaled.buckets, num_workers=2, seed=step)
        for flat in (flat for of_worker in gradients for flat in of_worker):
            flat.mul_(value)
        assert scaled.step(gradients)
        for x, y in zip(expected, gradients[0], strict=True):
            torch.testing.assert_close(y / value, x, rtol=1e-5, atol=1e-5)


@every_entry
def test_settings_are_frozen_and_stay_equal_as_copies(entry: Entry) -> None:
    with pytest.raises(AttributeError):
        entry.algorithm.matrix_rank = 3  # type: ignore[attr-defined]
    algorithm: Any = entry.algorithm
    for same in (copy.deepcopy(algorithm), pickle.loads(pickle.dumps(algorithm)), replace(algorithm)):
        assert (same, hash(same)) == (algorithm, hash(algorithm))


def assert_same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    slots = [name for name, _ in mine["slots"]]
    assert {"error", "factor"} <= set(slots)
    for key in mine.keys() - set(slots):
        assert mine[key] == theirs[key], key
    for key in slots:
        assert [name for name, _ in mine[key]] == [name for name, _ in theirs[key]]
        for (name, tensor), (_, other) in zip(mine[key], theirs[key], strict=True):
            assert torch.equal(tensor, other), name
