"""Averaging less often, in real processes: schedule, groups, algorithms, outer optimizer, state, mistakes."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pool import Pool
from thinwire import (
    AllReduce,
    BatchedPowerSGD,
    Cast,
    LocalSGD,
    PowerSGD,
    StateError,
    StepError,
    ThinwireError,
)
from thinwire.algorithms import Algorithm

POWER = PowerSGD(matrix_rank=2)
DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
BUFFERS_OPTION = "forward_sync_buffers" if "forward_sync_buffers" in DDP_OPTIONS else "broadcast_buffers"
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def new_model(seed: int = 7, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 8)).to(
        dtype
    )


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_of(step: int, process_rank: int | None = None) -> Tensor:
    place = dist.get_rank() if process_rank is None else process_rank
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(1_000 * step + place))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(model(batch).square().mean())
    optimizer.step()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        train_step(model, optimizer, batch_of(step).to(dtype))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def gathered(tensor: Tensor) -> Tensor:
    """The tensors of all processes, stacked: to look, not part of what is tested."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return torch.stack(everyone)


def agreed(model: nn.Module) -> bool:
    """Whether all processes hold the same parameters to the bit."""
    everyone = gathered(flat(model))
    return bool((everyone == everyone[0]).all())


def pairs() -> dist.ProcessGroup:
    """This process's group of two."""
    subgroup: dist.ProcessGroup = dist.new_subgroups(2)[0]  # type: ignore[no-untyped-call]
    return subgroup


def error_of(action: Callable[[], object]) -> str:
    """The Thinwire error an action raises: its type and message; empty if it raises none."""
    try:
        action()
    except ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# The schedule


FULL_RANK = PowerSGD(matrix_rank=48, min_compression_ratio=0.01)


@pytest.mark.parametrize(
    ("algorithm", "dtype", "most_gap"),
    [
        (AllReduce(), torch.float64, 1e-12),
        (AllReduce(), torch.float32, 1e-5),
        (FULL_RANK, torch.float32, 1e-4),
    ],
    ids=["exact, fp64", "exact, fp32", "full rank, fp32"],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_averaging_every_step_is_data_parallel_training(
    request: pytest.FixtureRequest, world_size: int, algorithm: Algorithm, dtype: torch.dtype, most_gap: float
) -> None:
    pool: Pool = request.getfixturevalue(f"pool{world_size}")
    for size, gap, moved, equal, same_storage in pool.run(_every_step, algorithm, dtype):
        assert size == world_size
        assert moved > 0.1
        assert gap < most_gap * moved
        assert equal
        assert same_storage


def _every_step(algorithm: Algorithm, dtype: torch.dtype) -> tuple[int, float, float, bool, bool]:
    ours, ddp_model = new_model(dtype=dtype), DistributedDataParallel(new_model(dtype=dtype))
    start, addresses = flat(ours), [p.data_ptr() for p in ours.parameters()]
    train(ddp_model, new_optimizer(ddp_model), range(10))
    optimizer = new_optimizer(ours)
    with LocalSGD(ours, optimizer, every_steps=1, algorithm=algorithm):
        train(ours, optimizer, range(10))
    gap = (flat(ours) - flat(ddp_model)).norm().item()
    moved = (flat(ours) - start).norm().item()
    same_storage = addresses == [p.data_ptr() for p in ours.parameters()]
    return dist.get_world_size(), gap, moved, agreed(ours), same_storage


def test_every_few_steps_the_models_become_their_mean(pool2: Pool) -> None:
    for world_size, apart, equal, gap in pool2.run(_to_the_mean):
        assert world_size == 2
        assert apart == [True, True, False, True, True, False]
        assert all(equal)
        assert gap < 1e-6


def _to_the_mean() -> tuple[int, list[bool], list[bool], float]:
    ours, alone = new_model(), new_model()
    optimizer = new_optimizer(ours)
    train(alone, new_optimizer(alone), range(3))
    apart, equal, gap = [], [], 0.0
    with LocalSGD(ours, optimizer, every_steps=3):
        for step in range(6):
            train(ours, optimizer, range(step, step + 1))
            apart.append(not agreed(ours))
            if step == 2:
                gap = (flat(ours) - gathered(flat(alone)).mean(0)).abs().max().item()
            if step % 3 == 2:
                equal.append(agreed(ours))
    return dist.get_world_size(), apart, equal, gap


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_bytes_are_those_of_data_parallel_training_over_the_number_of_steps(
    pool2: Pool, warmup_steps: int
) -> None:
    for stats, parameter_bytes in pool2.run(_bytes, warmup_steps):
        assert stats.steps == warmup_steps + 12
        assert stats.gradient_bytes == stats.steps * parameter_bytes
        assert stats.message_bytes == (warmup_steps + 12 // 4) * parameter_bytes
        assert stats.compression_ratio == stats.steps / (warmup_steps + 3)


def _bytes(warmup_steps: int) -> tuple[Any, int]:
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=4, warmup_steps=warmup_steps) as local:
        train(model, optimizer, range(warmup_steps + 12))
    return local.stats(), 4 * flat(model).numel()


def test_warm_up_is_data_parallel_training_without_compression_or_outer_optimizer(pool2: Pool) -> None:
    for gap, moved, errors, outer_state, last in pool2.run(_warm_up):
        assert gap < 1e-12 * moved
        assert errors == [0, 3]
        assert outer_state == [0, 6]
        assert last


def _warm_up() -> tuple[float, float, list[int], list[int], bool]:
    ours, reference = new_model(dtype=torch.float64), new_model(dtype=torch.float64)
    start, ddp_model = flat(ours), DistributedDataParallel(reference)
    train(ddp_model, new_optimizer(ddp_model), range(5))
    optimizer = new_optimizer(ours)
    errors, outer_state = [], []
    local = LocalSGD(ours, optimizer, every_steps=2, warmup_steps=5, algorithm=POWER, outer=NESTEROV)
    with local:
        for steps in (range(5), range(5, 7)):
            train(ours, optimizer, steps)
            if steps.start == 0:
                gap, moved = ((flat(ours) - other).norm().item() for other in (flat(ddp_model), start))
            state = local.state_dict()
            errors.append(len(dict(state["sync"]["error"])))
            outer_state.append(len(state["outer"]["state"]))
    return gap, moved, errors, outer_state, agreed(ours)


# Algorithms and the outer optimizer


@pytest.mark.parametrize(
    ("algorithm", "least_ratio"),
    [
        (Cast("bf16"), 8),
        (POWER, 20),
        (PowerSGD(matrix_rank=2, alternating=True), 30),
        (BatchedPowerSGD(), 60),
    ],
    ids=str,
)
def test_every_algorithm_carries_changes(pool2: Pool, algorithm: Algorithm, least_ratio: float) -> None:
    for world_size, ratio, equal, loss in pool2.run(_with_algorithm, algorithm):
        assert world_size == 2
        assert ratio >= least_ratio
        assert equal
        assert loss < 0.6


def _with_algorithm(algorithm: Algorithm) -> tuple[int, float, bool, float]:
    model = new_model()
    optimizer = new_optimizer(model)
    before = model(batch_of(99, 0)).square().mean().item()
    with LocalSGD(model, optimizer, every_steps=4, algorithm=algorithm) as local:
        train(model, optimizer, range(16))
    after = model(batch_of(99, 0)).square().mean().item()
    return dist.get_world_size(), local.stats().compression_ratio, agreed(model), after / before


def test_what_powersgd_did_not_carry_is_owed(pool2: Pool) -> None:
    """What all processes got, plus the mean error, is the exact mean of the models."""
    for gap, owed, ratio in pool2.run(_owed):
        assert owed > 1e-3
        assert gap < 1e-5 * owed + 1e-6
        assert ratio > 20


def _owed() -> tuple[float, float, float]:
    ours, alone = new_model(), new_model()
    train(alone, new_optimizer(alone), range(4))
    optimizer = new_optimizer(ours)
    with LocalSGD(ours, optimizer, every_steps=4, algorithm=POWER) as local:
        train(ours, optimizer, range(4))
    error = dict(local.state_dict()["sync"]["error"])
    owed = {name: error.get(name, torch.zeros_like(p)) for name, p in ours.named_parameters()}
    total = torch.cat([(p.detach() + owed[name]).reshape(-1) for name, p in ours.named_parameters()])
    norm = torch.cat([each.reshape(-1) for each in owed.values()]).norm().item()
    return (total - gathered(flat(alone)).mean(0)).norm().item(), norm, local.stats().compression_ratio


@pytest.mark.parametrize("world_size", [2, 4])
def test_diloco_against_a_plain_reference(request: pytest.FixtureRequest, world_size: int) -> None:
    pool: Pool = request.getfixturevalue(f"pool{world_size}")
    for size, gap, moved, equal in pool.run(_diloco):
        assert size == world_size
        assert moved > 0.5
        assert gap < 1e-11
        assert equal


def _diloco() -> tuple[int, float, float, bool]:
    model = new_model(dtype=torch.float64)
    start = flat(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with LocalSGD(model, optimizer, every_steps=5, outer=NESTEROV):
        train(model, optimizer, range(20))
    expected = _diloco_in_one_process(dist.get_world_size(), num_averagings=4, every_steps=5)
    gap = (flat(model) - expected).norm().item()
    return dist.get_world_size(), gap, (expected - start).norm().item(), agreed(model)


def _diloco_in_one_process(num_workers: int, *, num_averagings: int, every_steps: int) -> Tensor:
    """Algorithm 1 of the DiLoCo paper on one vector of parameters, in float64."""
    workers = [new_model(dtype=torch.float64) for _ in range(num_workers)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=1e-2) for worker in workers]
    theta, velocity = flat(workers[0]), torch.zeros(flat(workers[0]).shape, dtype=torch.float64)
    for averaging in range(num_averagings):
        for place, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            nn.utils.vector_to_parameters(theta.clone(), worker.parameters())
            for step in range(averaging * every_steps, (averaging + 1) * every_steps):
                train_step(worker, optimizer, batch_of(step, place).double())
        outer_gradient = theta - torch.stack([flat(worker) for worker in workers]).mean(0)
        velocity = 0.9 * velocity + outer_gradient
        theta = theta - 0.7 * (outer_gradient + 0.9 * velocity)
    return theta


def test_an_outer_optimizer_can_be_scheduled(pool2: Pool) -> None:
    for frozen, equal in pool2.run(_outer_schedule):
        assert frozen == [False, True]
        assert equal


def _outer_schedule() -> tuple[list[bool], bool]:
    model = new_model()
    optimizer = new_optimizer(model)
    frozen = []
    with LocalSGD(model, optimizer, every_steps=2, outer=partial(torch.optim.SGD, lr=1.0)) as local:
        for lr in (1.0, 0.0):
            assert local.outer is not None
            local.outer.param_groups[0]["lr"] = lr
            before = flat(model)
            train(model, optimizer, range(2))
            frozen.append(torch.equal(before, flat(model)))
    return frozen, agreed(model)


# Skipped steps, disagreement, values that are not finite


def scaled_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, step: int) -> None:
    """On process 0, step 2 overflows: its scaler skips."""
    optimizer.zero_grad()
    factor = torch.inf if step == 2 and dist.get_rank() == 0 else 1.0
    torch.autograd.backward(scaler.scale(model(batch_of(step)).square().mean()) * factor)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_that_one_scaler_skips_counts(pool2: Pool, enabled: bool) -> None:
    taken = []
    for steps_taken, averaged_after, stats, restored in pool2.run(_skipped, enabled):
        taken.append(steps_taken)
        assert averaged_after == [4, 8]
        assert stats.steps == 8
        assert stats.messages == 2
        assert restored
    assert taken == ([7, 8] if enabled else [8, 8])


def _skipped(enabled: bool) -> tuple[int, list[int], Any, bool]:
    model = new_model()
    optimizer = new_optimizer(model)
    scaler = GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
    taken: list[int] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    averaged_after = []
    with LocalSGD(model, optimizer, every_steps=4, grad_scaler=scaler) as local:
        for step in range(8):
            if enabled:
                scaled_step(model, optimizer, scaler, step)
            else:
                scaled_step(model, optimizer, scaler, step=7)
            if agreed(model):
                averaged_after.append(step + 1)
    return len(taken), averaged_after, local.stats(), "step" not in vars(scaler)


def test_a_fused_optimizer_under_a_scaler_counts_once(pool2: Pool) -> None:
    """The scaler leaves skipping to it, so that its own hook fires in every step."""
    for averaged_after, stats in pool2.run(_fused):
        assert averaged_after == [3, 6]
        assert stats.steps == 6


def _fused() -> tuple[list[int], Any]:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    averaged_after = []
    with LocalSGD(model, optimizer, every_steps=3, grad_scaler=scaler) as local:
        for step in range(6):
            scaled_step(model, optimizer, scaler, step)
            if agreed(model):
                averaged_after.append(step + 1)
    return averaged_after, local.stats()


def test_without_the_scaler_a_skipped_step_is_an_error_on_all_processes_that_names_the_remedy(
    pool2: Pool,
) -> None:
    messages = pool2.run(_skipped_unseen)
    assert len(messages) == 2
    for message in messages:
        assert message.startswith("StepError: processes are at different steps (0: 7, 1: 8)")
        assert "LocalSGD(…, grad_scaler=scaler)" in message


def _skipped_unseen() -> str:
    model = new_model()
    optimizer = new_optimizer(model)
    scaler = GradScaler("cpu", init_scale=2.0**8)

    def loop() -> None:
        with LocalSGD(model, optimizer, every_steps=4):
            for step in range(8):
                scaled_step(model, optimizer, scaler, step)

    return error_of(loop)


@pytest.mark.parametrize("every_steps", [2, 4, 100])
@pytest.mark.parametrize("hierarchical", [False, True])
def test_different_numbers_of_batches_are_an_error_on_all_processes(
    pool4: Pool, every_steps: int, hierarchical: bool
) -> None:
    messages = pool4.run(_uneven, every_steps, hierarchical)
    assert len(messages) == 4
    for message in messages:
        assert message.startswith("StepError: processes are at different steps")
        assert "1: 3" in message
        assert "uneven batches" in message
        assert "with local, thinwire.join(local): …" in message


def _uneven(every_steps: int, hierarchical: bool) -> str:
    model = new_model()
    optimizer = new_optimizer(model)
    subgroup = pairs() if hierarchical else None
    steps = range(3 if dist.get_rank() == 1 else 4)

    def loop() -> None:
        with LocalSGD(model, optimizer, every_steps=every_steps, subgroup=subgroup):
            train(model, optimizer, steps)

    return error_of(loop)


@pytest.mark.parametrize("algorithm", [AllReduce(), POWER], ids=str)
def test_parameters_that_are_not_finite_are_an_error_on_all_processes(
    pool2: Pool, algorithm: Algorithm
) -> None:
    """Nothing is averaged: parameters, last average and error memory stay as they were."""
    results = pool2.run(_diverged, algorithm)
    assert len(results) == 2
    for message, finite, untouched, messages in results:
        assert message.startswith("StepError: the parameters or buffers of process 1 are not finite")
        assert "restart all processes from a checkpoint" in message
        assert untouched == [True, True, True]
        assert messages == (1 if algorithm == AllReduce() else 2)
        assert finite
    assert results[0][1]


def _diverged(algorithm: Algorithm) -> tuple[str, bool, list[bool], int]:
    model = new_model()
    optimizer = new_optimizer(model)
    local = LocalSGD(model, optimizer, every_steps=2, algorithm=algorithm)
    states, kept = [], []

    def loop() -> None:
        with local:
            train(model, optimizer, range(3))
            states.append(copy.deepcopy(local.state_dict()))
            if dist.get_rank() == 1:
                next(model.parameters()).data[0, 0] = torch.nan
            kept.append(flat(model))
            local.average()

    message = error_of(loop)
    states.append(local.state_dict())
    before, after = states
    untouched = [
        torch.equal(kept[0].nan_to_num(5), flat(model).nan_to_num(5)),
        all(torch.equal(t, after["last_average"][n]) for n, t in before["last_average"].items()),
        all(
            torch.equal(t, dict(after["sync"]["error"])[n]) for n, t in dict(before["sync"]["error"]).items()
        ),
    ]
    finite = dist.get_rank() == 1 or bool(flat(model).isfinite().all())
    return message, finite, untouched, local.stats().messages


def test_a_subgroup_that_diverges_stops_all_processes(pool4: Pool) -> None:
    messages = pool4.run(_diverged_in_a_subgroup)
    assert len(messages) == 4
    for message in messages:
        assert message.startswith("StepError: the parameters or buffers of process 3 are not finite")


def _diverged_in_a_subgroup() -> str:
    model = new_model()
    optimizer = new_optimizer(model)
    subgroup = pairs()

    def loop() -> None:
        with LocalSGD(model, optimizer, every_steps=3, subgroup=subgroup):
            for step in range(6):
                if step == 4 and dist.get_rank() == 3:
                    next(model.parameters()).data[0, 0] = torch.inf
                train(model, optimizer, range(step, step + 1))

    return error_of(loop)


def test_a_mean_that_leaves_the_range_of_its_type_is_an_error_and_changes_nothing(pool2: Pool) -> None:
    for message, untouched in pool2.run(_overflowing):
        assert message.startswith("StepError: the mean change of the parameters is not finite")
        assert untouched


def _overflowing() -> tuple[str, bool]:
    model = new_model()
    optimizer = new_optimizer(model)
    kept = []

    def loop() -> None:
        with LocalSGD(model, optimizer, every_steps=2, algorithm=Cast("fp16")) as local:
            train(model, optimizer, range(1))
            next(model.parameters()).data[0, 0] = 1e6
            kept.append(flat(model))
            local.average()

    return error_of(loop), torch.equal(kept[0], flat(model))


# Subgroups and DDP models


def halves(model: nn.Module) -> tuple[bool, bool]:
    """On four processes in two subgroups: whether all subgroups agree within, and all processes agree."""
    first, second, third, fourth = gathered(flat(model))
    return torch.equal(first, second) and torch.equal(third, fourth), agreed(model)


@pytest.mark.parametrize("in_ddp", [False, True], ids=["plain", "DDP"])
def test_hierarchical_averaging(pool4: Pool, in_ddp: bool) -> None:
    """The subgroup every step, all processes in the warm-up and every third step after it."""
    for world_size, seen, message_bytes, parameter_bytes in pool4.run(_hierarchical, in_ddp):
        assert world_size == 4
        everywhere, within = (True, True), (True, False)
        assert seen == [everywhere] * 2 + [within, within, everywhere] * 2
        assert message_bytes == (2 + in_ddp + 2) * parameter_bytes


def _hierarchical(in_ddp: bool) -> tuple[int, list[tuple[bool, bool]], int, int]:
    subgroup = pairs()
    model = DistributedDataParallel(new_model(), bucket_cap_mb=0.005) if in_ddp else new_model()
    optimizer = new_optimizer(model)
    seen = []
    with LocalSGD(model, optimizer, every_steps=3, warmup_steps=2, subgroup=subgroup) as local:
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            seen.append(halves(model))
    return dist.get_world_size(), seen, local.stats().message_bytes, 4 * flat(model).numel()


@pytest.mark.parametrize("in_ddp", [False, True], ids=["plain", "DDP"])
def test_within_a_subgroup_it_is_data_parallel_training(pool4: Pool, in_ddp: bool) -> None:
    for gap, moved, seen in pool4.run(_within, in_ddp):
        assert seen == (True, False)
        assert gap < 1e-12 * moved


def _within(in_ddp: bool) -> tuple[float, float, tuple[bool, bool]]:
    subgroup = pairs()
    reference = DistributedDataParallel(new_model(dtype=torch.float64), process_group=subgroup)
    start = flat(reference)
    train(reference, new_optimizer(reference), range(6))
    model = new_model(dtype=torch.float64)
    model = DistributedDataParallel(model) if in_ddp else model
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=100, subgroup=subgroup):
        train(model, optimizer, range(6))
        gap, moved = ((flat(model) - other).norm().item() for other in (flat(reference), start))
        return gap, moved, halves(model)


def test_a_ddp_model_has_one_counter_for_gradients_and_parameters(pool2: Pool) -> None:
    """FACTS 15: torch has two, in two objects, and is silently wrong where they differ."""
    for warm, local_bytes, averaged, parameter_bytes, plain_again in pool2.run(_one_counter):
        assert warm
        assert local_bytes == [0, 0, parameter_bytes]
        assert averaged
        assert plain_again


def _one_counter() -> tuple[bool, list[int], bool, int, bool]:
    model, reference = (DistributedDataParallel(new_model(), bucket_cap_mb=0.005) for _ in range(2))
    optimizer, plain = new_optimizer(model), new_optimizer(reference)
    sent = []
    with LocalSGD(model, optimizer, every_steps=3, warmup_steps=4) as local:
        train(reference, plain, range(3))
        train(model, optimizer, range(3))
        warm = torch.equal(flat(model), flat(reference))
        train(model, optimizer, range(3, 4))
        for step in range(4, 7):
            before = local.stats().message_bytes
            train(model, optimizer, range(step, step + 1))
            sent.append(local.stats().message_bytes - before)
        averaged = agreed(model)
    train(model, optimizer, range(7, 8))
    gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    everyone = gathered(gradients)
    return warm, sent, averaged, 4 * flat(model).numel(), torch.equal(everyone[0], everyone[1])


def test_a_ddp_model_can_be_used_again(pool2: Pool) -> None:
    """DDP keeps a hook for good; ours is switched over, and a copied model has none."""
    for first, second, copied in pool2.run(_again):
        assert first == second == [False, True]
        assert copied


def _again() -> tuple[list[bool], list[bool], bool]:
    model = DistributedDataParallel(new_model())
    optimizer = new_optimizer(model)
    seen = []
    for _ in range(2):
        with LocalSGD(model, optimizer, every_steps=2):
            for step in range(2):
                train(model, optimizer, range(step, step + 1))
                seen.append(agreed(model))
    copied = copy.deepcopy(model)
    copied_optimizer = new_optimizer(copied)
    with LocalSGD(copied, copied_optimizer, every_steps=2):
        train(copied, copied_optimizer, range(2))
    return seen[:2], seen[2:], agreed(copied)


def test_a_process_group_of_some(pool4: Pool) -> None:
    results = pool4.run(_of_some)
    assert [size for size, *_ in results] == [2] * 4
    assert all(seen == (True, False) for _, seen, _ in results)
    assert all(ratio == 2 for _, _, ratio in results)


def _of_some() -> tuple[int, tuple[bool, bool], float]:
    group = pairs()
    model = new_model(seed=dist.get_rank() // 2)
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=2, process_group=group) as local:
        train(model, optimizer, range(4))
    return group.size(), halves(model), local.stats().compression_ratio


# Models


class Normalised(nn.Module):
    """BatchNorm's statistics, a saved buffer that is partly infinite, and a mask that is not saved."""

    bounds: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 8)
        self.register_buffer("bounds", torch.tensor([-torch.inf, 3.0, torch.inf]))
        self.register_buffer("mask", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.mark.parametrize("average_buffers", [True, False])
@pytest.mark.parametrize("outer", [None, partial(torch.optim.SGD, lr=0.5)], ids=["mean", "outer"])
def test_floating_buffers(pool2: Pool, average_buffers: bool, outer: Any) -> None:
    """The mean of the statistics, outer optimizer or not; integer and unsaved buffers are left alone."""
    for equal, gap, tracked, bounds, mask in pool2.run(_buffers, average_buffers, outer):
        assert equal == average_buffers
        assert (gap < 1e-6) == average_buffers
        assert tracked == [2, 3]
        assert bounds == [-torch.inf, 3.0, torch.inf]
        assert mask == [0, 1]


def _buffers(average_buffers: bool, outer: Any) -> tuple[bool, float, list[int], list[float], list[float]]:
    torch.manual_seed(0)
    model = Normalised()
    alone = copy.deepcopy(model)
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=2, average_buffers=average_buffers, outer=outer):
        model.mask += dist.get_rank()
        if dist.get_rank() == 1:
            model(batch_of(9)), alone(batch_of(9))
        train(model, optimizer, range(2))
    train(alone, new_optimizer(alone), range(2))
    means, alone_means = (gathered(each.norm.state_dict()["running_mean"]) for each in (model, alone))
    gap = (means[0] - alone_means.mean(0)).abs().max().item()
    tracked = gathered(model.norm.state_dict()["num_batches_tracked"]).tolist()
    mask = gathered(model.mask)[:, 0].tolist()
    return torch.equal(means[0], means[1]), gap, tracked, model.bounds.tolist(), mask


class Mixed(nn.Module):
    """Parameters of three types, tied, transposed, frozen, a scalar and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 24, bias=False)
        self.again = nn.Linear(24, 24, bias=False)
        self.again.weight = self.embed.weight
        self.narrow = nn.Linear(24, 16).to(torch.bfloat16)
        self.filter = nn.Parameter(torch.randn(16, 12, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(8, 12).t())
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.narrow(self.again(self.embed(x)).bfloat16()).to(torch.complex64)
        out: Tensor = (hidden @ self.filter).abs() @ self.transposed * self.scale * self.frozen
        return out + self.nothing.sum()


@pytest.mark.parametrize(
    "algorithm", [AllReduce(), PowerSGD(matrix_rank=1, min_compression_ratio=1)], ids=str
)
def test_every_kind_of_parameter(pool2: Pool, algorithm: Algorithm) -> None:
    for equal, same_storage, ratio, compressed in pool2.run(_kinds, algorithm):
        assert all(equal.values()), equal
        assert same_storage
        assert ratio >= 3
        assert compressed == (algorithm != AllReduce())


def _kinds(algorithm: Algorithm) -> tuple[dict[str, bool], bool, float, bool]:
    torch.manual_seed(0)
    model = Mixed()
    addresses = [p.data_ptr() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with LocalSGD(model, optimizer, every_steps=3, algorithm=algorithm) as local:
        for step in range(6):
            train_step(model, optimizer, batch_of(step))
    equal = {
        name: len({each.tobytes() for each in _bytes_of(p)}) == 1 for name, p in model.named_parameters()
    }
    same_storage = addresses == [p.data_ptr() for p in model.parameters()]
    compressed = any(route.matrix_rank for route in local.sync.plan.routes)
    return equal, same_storage, local.stats().compression_ratio, compressed


def _bytes_of(parameter: nn.Parameter) -> list[Any]:
    raw = parameter.detach().contiguous().view(-1).view(torch.uint8)
    return [each.numpy() for each in gathered(raw)] if raw.numel() else [raw.numpy()]


def test_of_two_optimizers_the_one_that_steps_last_is_given(pool2: Pool) -> None:
    assert pool2.run(_two_optimizers) == [[False, True, False, True]] * 2


def _two_optimizers() -> list[bool]:
    model = new_model()
    first, *others = model.parameters()
    optimizers = [torch.optim.AdamW([first], lr=0.01), torch.optim.SGD(others, lr=0.05)]
    equal = []
    with LocalSGD(model, optimizers[1], every_steps=2):
        for step in range(4):
            model.zero_grad()
            torch.autograd.backward(model(batch_of(step)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
            equal.append(agreed(model))
    return equal


def test_entry_gives_all_processes_the_first_ones_model(pool2: Pool) -> None:
    for equal, frozen, unsaved in pool2.run(_entry):
        assert equal
        assert frozen == [0, 0]
        assert unsaved == [0, 0]


def _entry() -> tuple[bool, list[float], list[float]]:
    model = new_model(seed=dist.get_rank())
    model.frozen = nn.Parameter(torch.full((1,), float(dist.get_rank())), requires_grad=False)
    model.register_buffer("unsaved", torch.tensor([dist.get_rank()]), persistent=False)
    with LocalSGD(model, new_optimizer(model), every_steps=1):
        return agreed(model), gathered(model.frozen)[:, 0].tolist(), gathered(model.unsaved)[:, 0].tolist()  # type: ignore[arg-type]


def test_a_compiled_model(pool2: Pool) -> None:
    for equal, ratio in pool2.run(_compiled):
        assert equal
        assert ratio == 2


def _compiled() -> tuple[bool, float]:
    model = new_model()
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizer = new_optimizer(model)
    with LocalSGD(compiled, optimizer, every_steps=2) as local:
        train(compiled, optimizer, range(4))
    return agreed(model), local.stats().compression_ratio


def test_a_model_that_trains_other_parameters_than_on_entry_is_refused(pool2: Pool) -> None:
    for message in pool2.run(_unfrozen):
        assert message.startswith("StepError: the model's trainable parameters or buffers are others")
        assert "0.weight" in message


def _unfrozen() -> str:
    model = new_model()
    first = next(model.parameters()).requires_grad_(False)
    optimizer = new_optimizer(model)

    def loop() -> None:
        with LocalSGD(model, optimizer, every_steps=1):
            first.requires_grad_(True)
            train(model, optimizer, range(1))

    return error_of(loop)


# Entry, exit, averaging on request


def test_averaging_on_request_leaves_the_schedule_alone(pool2: Pool) -> None:
    for seen, messages in pool2.run(_on_request):
        assert seen == [False, True, True, False, True, False, True]
        assert messages == [0, 1, 1, 1, 2, 2, 3]


def _on_request() -> tuple[list[bool], list[int]]:
    model = new_model()
    optimizer = new_optimizer(model)
    seen, messages = [], []
    with LocalSGD(model, optimizer, every_steps=3) as local:
        actions = ["step", "average", "average", "step", "step", "step"]
        for step, action in enumerate(actions):
            train(model, optimizer, range(step, step + 1)) if action == "step" else local.average()
            seen.append(agreed(model))
            messages.append(local.stats().messages)
    return [*seen, agreed(model)], [*messages, local.stats().messages]


@pytest.mark.parametrize("raises", [False, True])
def test_exit_takes_everything_off_and_averages_only_if_clean(pool2: Pool, raises: bool) -> None:
    for averaged, hooks, restored, messages in pool2.run(_exit, raises):
        assert averaged != raises
        assert hooks == [2, 1]
        assert restored
        assert messages == (0 if raises else 1)


def _exit(raises: bool) -> tuple[bool, list[int], bool, int]:
    model = new_model()
    optimizer = new_optimizer(model)
    scaler = GradScaler("cpu")
    scaler.step = own = scaler.step  # type: ignore[method-assign]
    optimizer.register_step_post_hook(lambda *_: None)
    hooks = []
    local = LocalSGD(model, optimizer, every_steps=5, grad_scaler=scaler)
    with pytest.raises(KeyError) if raises else nullcontext(), local:
        hooks.append(len(optimizer._optimizer_step_post_hooks))
        train(model, optimizer, range(2))
        if raises:
            raise KeyError
    hooks.append(len(optimizer._optimizer_step_post_hooks))
    train(model, optimizer, range(10 if raises else 0))
    return agreed(model), hooks, scaler.step is own, local.stats().messages


@pytest.mark.parametrize("by_contributors", [False, True], ids=["by initial size", "by contributors"])
@pytest.mark.parametrize("num_batches", [(6, 3), (2, 7), (5, 0), (4, 4), (0, 0)], ids=str)
def test_uneven_inputs(pool2: Pool, num_batches: tuple[int, int], by_contributors: bool) -> None:
    for equal, gap, steps, world_size in pool2.run(_uneven_inputs, num_batches, by_contributors):
        assert world_size == 2
        assert equal
        assert gap < 1e-12
        assert steps == max(num_batches)


def _uneven_inputs(num_batches: tuple[int, int], by_contributors: bool) -> tuple[bool, float, int, int]:
    model = new_model(dtype=torch.float64)
    optimizer = new_optimizer(model)
    with (
        LocalSGD(model, optimizer, every_steps=2) as local,
        Join([local], divide_by_initial_world_size=not by_contributors),
    ):
        train(model, optimizer, range(num_batches[dist.get_rank()]))
    assert not local._join_config.enable
    gap = (flat(model) - _uneven_in_one_process(num_batches, by_contributors)).abs().max().item()
    return agreed(model), gap, local.stats().steps, dist.get_world_size()


def _uneven_in_one_process(num_batches: tuple[int, int], by_contributors: bool) -> Tensor:
    """Two workers; sums of changes over two, or over those that had input, after every second step."""
    workers = [new_model(dtype=torch.float64) for _ in num_batches]
    optimizers = [new_optimizer(worker) for worker in workers]
    last, contributors = flat(workers[0]), set()
    for step in range(max(num_batches)):
        for place, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            if step < num_batches[place]:
                train_step(worker, optimizer, batch_of(step, place).double())
                contributors.add(place)
        if step % 2 == 1 or step == max(num_batches) - 1:
            total = sum((flat(worker) - last for worker in workers), start=torch.zeros_like(last))
            last = last + total / (len(contributors) if by_contributors else 2)
            contributors = set()
            for worker in workers:
                nn.utils.vector_to_parameters(last.clone(), worker.parameters())
    return last


@pytest.mark.parametrize("subgroups", [False, True])
def test_uneven_inputs_on_four_processes(pool4: Pool, subgroups: bool) -> None:
    for equal, steps, compressed in pool4.run(_uneven_on_four, subgroups):
        assert equal
        assert steps == 6
        assert compressed


def _uneven_on_four(subgroups: bool) -> tuple[bool, int, bool]:
    model = new_model()
    optimizer = new_optimizer(model)
    local = LocalSGD(
        model,
        optimizer,
        every_steps=2,
        warmup_steps=1,
        algorithm=POWER,
        outer=NESTEROV,
        subgroup=pairs() if subgroups else None,
    )
    with local, Join([local]):
        train(model, optimizer, range([6, 1, 4, 3][dist.get_rank()]))
    return agreed(model), local.stats().steps, local.stats().compression_ratio > 3


def test_early_termination_raises_on_all_processes(pool2: Pool) -> None:
    messages = pool2.run(_early_termination)
    assert messages[0].startswith("Detected at least one rank that exhausted inputs")
    assert messages[1] == "Rank 1 exhausted all inputs."


def _early_termination() -> str:
    model = new_model()
    optimizer = new_optimizer(model)
    local = LocalSGD(model, optimizer, every_steps=2)
    try:
        with local, Join([local], throw_on_early_termination=True):
            train(model, optimizer, range(4 - 2 * dist.get_rank()))
    except RuntimeError as error:
        return str(error)
    return ""


# State


@pytest.mark.parametrize("saved_after", [4, 6])
@pytest.mark.parametrize("outer", [None, NESTEROV], ids=["mean", "outer"])
def test_resuming_is_equal_to_the_bit(pool2: Pool, outer: Any, saved_after: int) -> None:
    """At an averaging or between two, each process with its own model and optimizer."""
    for straight, resumed, schedule, ratio in pool2.run(_resume, outer, saved_after):
        assert torch.equal(straight, resumed)
        assert schedule == [11, 11]
        assert ratio > 15


def _resume(outer: Any, saved_after: int) -> tuple[Tensor, Tensor, list[int], float]:
    model = new_model()
    optimizer = new_optimizer(model)
    settings: dict[str, Any] = {"every_steps": 4, "algorithm": POWER, "outer": outer}
    saved = io.BytesIO()
    with LocalSGD(model, optimizer, **settings) as local:
        train(model, optimizer, range(saved_after))
        parts = (local.state_dict(), model.state_dict(), optimizer.state_dict())
        torch.save(parts, saved)
        train(model, optimizer, range(saved_after, 11))
    saved.seek(0)
    local_state, model_state, optimizer_state = torch.load(saved, weights_only=True)
    again = new_model(seed=3)
    again_optimizer = new_optimizer(again)
    resumed = LocalSGD(again, again_optimizer, **settings)
    again.load_state_dict(model_state)
    again_optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(local_state)
    with resumed:
        train(again, again_optimizer, range(saved_after, 11))
    steps = [local.stats().steps, resumed.stats().steps]
    return flat(model), flat(again), steps, resumed.stats().compression_ratio


def test_what_was_pending_when_saved_is_averaged_after_resuming(pool2: Pool) -> None:
    assert pool2.run(_pending) == [(False, True)] * 2


def _pending() -> tuple[bool, bool]:
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=4) as local:
        train(model, optimizer, range(2))
        state, saved = local.state_dict(), copy.deepcopy(model.state_dict())
    model.load_state_dict(saved)
    resumed = LocalSGD(model, optimizer, every_steps=4)
    resumed.load_state_dict(state)
    with resumed:
        before = agreed(model)
    return before, agreed(model)


def test_the_state_is_the_same_on_all_processes(pool2: Pool) -> None:
    first, second = pool2.run(_state)
    assert first.keys() == second.keys()
    assert first["step"] == second["step"] == 5
    assert first["pending_steps"] == second["pending_steps"] == 1
    for part in (first["last_average"], dict(first["sync"]["error"])):
        assert part
    for name, tensor in first["last_average"].items():
        assert torch.equal(tensor, second["last_average"][name])
    for name, tensor in dict(first["sync"]["error"]).items():
        assert torch.equal(tensor, dict(second["sync"]["error"])[name])


def _state() -> dict[str, Any]:
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=4, algorithm=POWER) as local:
        train(model, optimizer, range(5))
        return local.state_dict()


def test_an_averaged_model_resumes_on_another_number_of_processes(pool2: Pool, pool4: Pool) -> None:
    """One model, one optimizer's state and one LocalSGD state for all."""
    saved = pool2.run(_save_one)[0]
    for world_size, same_start, equal, step, error in pool4.run(_resume_on_more, saved):
        assert world_size == 4
        assert same_start
        assert equal
        assert step == 12
        assert error


def _save_one() -> tuple[dict[str, Any], ...]:
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=4, algorithm=POWER, outer=NESTEROV) as local:
        train(model, optimizer, range(6))
        local.average()
        return local.state_dict(), model.state_dict(), optimizer.state_dict()


def _resume_on_more(saved: tuple[dict[str, Any], ...]) -> tuple[int, bool, bool, int, bool]:
    model = new_model(seed=dist.get_rank())
    optimizer = new_optimizer(model)
    local = LocalSGD(model, optimizer, every_steps=4, algorithm=POWER, outer=NESTEROV)
    local.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    with local:
        same_start = agreed(model)
        train(model, optimizer, range(6, 12))
    error = dict(local.state_dict()["sync"]["error"])
    return dist.get_world_size(), same_start, agreed(model), local.stats().steps, bool(error)


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no state": (lambda state: [1], "made by LocalSGD.state_dict()"),
    "version": (lambda state: state | {"version": 9}, "reads version 2"),
    "step": (lambda state: state | {"step": -1}, "step must be a whole number"),
    "names": (lambda state: state | {"last_average": {"x": torch.ones(1)}}, "differ in ['0.bias'"),
    "kind": (lambda state: state | {"last_average": 3}, "must map names to tensors"),
    "shape": (
        lambda state: state | {"last_average": state["last_average"] | {"0.bias": torch.ones(1)}},
        "not a tensor of shape (48,)",
    ),
    "sync": (lambda state: state | {"sync": {}}, "expected a state"),
    "outer": (lambda state: state | {"outer": {}}, "pass outer="),
    "not finite": (
        lambda state: (
            state | {"last_average": state["last_average"] | {"0.bias": torch.full((48,), torch.nan)}}
        ),
        "0.bias is not finite",
    ),
    "8 bits": (
        lambda state: (
            state
            | {"last_average": state["last_average"] | {"0.bias": torch.zeros(48).to(torch.float8_e5m2)}}
        ),
        "0.bias is of torch.float8_e5m2",
    ),
    "expanded": (
        lambda state: state | {"outer": {"momentum": torch.zeros(1).expand(2**20, 2**20)}},
        "some are expanded",
    ),
    "sparse": (
        lambda state: state | {"outer": {"momentum": torch.zeros(2, 2).to_sparse()}},
        "layout torch.sparse_coo",
    ),
    "damaged": (lambda state: state | {"checksum": "crc32:00000000"}, "the state is damaged"),
    "key": (lambda state: state | {"more": 1}, "made by LocalSGD.state_dict()"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_does_not_fit_is_refused(pool2: Pool, case: str) -> None:
    for message, loaded in pool2.run(_bad_state, case):
        assert message.startswith("StateError")
        assert STATES[case][1] in message
        assert not loaded


def _bad_state(case: str) -> tuple[str, bool]:
    state = _state() | {"checksum": None}
    model = new_model()
    local = LocalSGD(model, new_optimizer(model), every_steps=1)
    return error_of(lambda: local.load_state_dict(STATES[case][0](state))), local.stats().steps != 0  # type: ignore[arg-type]


def test_the_state_of_another_outer_optimizer_is_refused(pool2: Pool) -> None:
    assert all(
        message.startswith("StateError: the state is of another outer") for message in pool2.run(_other_outer)
    )


def _other_outer() -> str:
    model = new_model()
    with LocalSGD(model, new_optimizer(model), every_steps=1, outer=NESTEROV) as local:
        state = local.state_dict()
    state["outer"]["param_groups"], state["checksum"] = [], None
    other = LocalSGD(model, new_optimizer(model), every_steps=1, outer=NESTEROV)
    other.load_state_dict(state)
    return error_of(other.__enter__)


# Mistakes


def _make(model: Any = None, optimizer: Any = None, **settings: Any) -> LocalSGD:
    model = new_model() if model is None else model
    optimizer = new_optimizer(model) if optimizer is None else optimizer
    return LocalSGD(model, optimizer, **{"every_steps": 2, **settings})


def _entered_twice() -> None:
    with _make() as local:
        local.__enter__()


def _averaged_outside() -> None:
    with _make() as local:
        pass
    local.average()


def _loaded_inside() -> None:
    with _make() as local:
        local.load_state_dict(local.state_dict())


class Wrapper(torch.optim.Optimizer):
    """As torch's PostLocalSGDOptimizer and Accelerate's: an optimizer that is none itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = inner, inner.param_groups


def _wrapped_optimizer() -> None:
    model = new_model()
    _make(model, Wrapper(new_optimizer(model)))


def _foreign_parameters() -> None:
    model = new_model()
    _make(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1))


def _frozen() -> None:
    model = new_model()
    optimizer = new_optimizer(model)
    _make(model.requires_grad_(False), optimizer)


def _not_of_all() -> None:
    with _make(outer=lambda parameters: torch.optim.SGD(parameters[:1], lr=1.0)):
        pass


def _in_a_foreign_subgroup() -> None:
    groups = [dist.new_group([process_rank]) for process_rank in range(2)]
    _make(subgroup=groups[1 - dist.get_rank()])


def _outside_the_group() -> None:
    groups = [dist.new_group([process_rank]) for process_rank in range(2)]
    _make(process_group=groups[dist.get_rank()], subgroup=dist.group.WORLD)


def _other_ddp_group() -> None:
    _make(DistributedDataParallel(new_model()), process_group=dist.new_group([0, 1]))


def _joined_ddp() -> None:
    with _make(DistributedDataParallel(new_model())) as local:
        local.join_hook()


def _joined_by_contributors() -> None:
    with _make(subgroup=dist.group.WORLD) as local:
        local.join_hook(divide_by_initial_world_size=False)


def _attached_ddp() -> None:
    model = DistributedDataParallel(new_model())
    thinwire.attach(model, POWER)
    _make(model)


def _normalised_ddp() -> None:
    _make(DistributedDataParallel(Normalised()))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "every_steps=0": (
        lambda: _make(every_steps=0),
        "ConfigError: every_steps must be a whole number of at least 1",
    ),
    "every_steps=2.5": (lambda: _make(every_steps=2.5), "ConfigError: every_steps"),
    "every_steps=True": (lambda: _make(every_steps=True), "ConfigError: every_steps"),
    "warm-up": (
        lambda: _make(warmup_steps=-1),
        "ConfigError: warmup_steps must be a whole number of at least 0",
    ),
    "buffers": (lambda: _make(average_buffers=2), "ConfigError: average_buffers must be True or False"),
    "algorithm": (lambda: _make(algorithm="PowerSGD"), "ConfigError: expected an algorithm such as"),
    "no module": (lambda: _make([1], new_optimizer(new_model())), "ConfigError: expected a torch.nn.Module"),
    "lazy": (
        lambda: _make(nn.LazyLinear(3), new_optimizer(new_model())),
        "ConfigError: weight has no shape yet; run one forward pass",
    ),
    "nothing to train": (_frozen, "ConfigError: Sequential has no trainable parameter"),
    "no optimizer": (lambda: _make(optimizer="SGD"), "ConfigError: expected a torch.optim.Optimizer"),
    "wrapped optimizer": (_wrapped_optimizer, "ConfigError: Wrapper wraps an optimizer"),
    "other model's": (
        lambda: _make(optimizer=new_optimizer(new_model())),
        "ConfigError: the optimizer holds none of the model's trainable parameters",
    ),
    "more than the model's": (
        _foreign_parameters,
        "ConfigError: the optimizer holds 1 parameters that are not",
    ),
    "outer is an optimizer": (
        lambda: _make(outer=new_optimizer(new_model())),
        "ConfigError: outer must be a function that makes",
    ),
    "outer makes nothing": (
        lambda: _make(outer=lambda parameters: None).__enter__(),
        "ConfigError: outer must make a torch.optim.Optimizer",
    ),
    "outer of some": (_not_of_all, "ConfigError: outer must make an optimizer of all the tensors"),
    "scaler": (lambda: _make(grad_scaler=1.0), "ConfigError: grad_scaler must be"),
    "group": (lambda: _make(process_group=3), "AttachError: expected a torch.distributed process group"),
    "subgroup without this process": (_in_a_foreign_subgroup, "AttachError: this process is not a member"),
    "subgroup outside the group": (_outside_the_group, "of the subgroup are not in the process group"),
    "another group than DDP's": (_other_ddp_group, "ConfigError: process_group is not that of the DDP model"),
    "DDP with a hook": (_attached_ddp, "AttachError: the DDP model has a communication hook already"),
    "DDP with buffers": (_normalised_ddp, f"build it with {BUFFERS_OPTION}=False (LocalSGD averages them)"),
    "DDP looks for unused": (
        lambda: _make(DistributedDataParallel(new_model(), find_unused_parameters=True)),
        "AttachError: find_unused_parameters=True",
    ),
    "entered twice": (_entered_twice, "StepError: this LocalSGD has been entered before"),
    "average before": (lambda: _make().average(), "StepError: average() was called outside"),
    "average after": (_averaged_outside, "StepError: average() was called outside"),
    "state before": (lambda: _make().state_dict(), "StepError: there is nothing to save before"),
    "joined outside": (lambda: _make().join_hook(), "StepError: enter LocalSGD before"),
    "joined with DDP": (_joined_ddp, "AttachError: a DDP model can't be joined through LocalSGD"),
    "joined with a subgroup": (
        _joined_by_contributors,
        "ConfigError: with a subgroup",
    ),
    "load inside": (_loaded_inside, "StepError: load the state before the context is entered"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_raise_at_once_and_name_the_remedy(pool2: Pool, case: str) -> None:
    for message in pool2.run(_mistake, case):
        assert MISTAKES[case][1] in message


def _mistake(case: str) -> str:
    return error_of(MISTAKES[case][0])


def test_without_a_process_group() -> None:
    assert error_of(_make).startswith("AttachError: torch.distributed is not initialised")


def test_the_errors_are_the_ones_users_catch() -> None:
    assert issubclass(StepError, RuntimeError)
    assert issubclass(StateError, ValueError)
