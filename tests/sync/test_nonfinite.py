"""What becomes of a step whose gradients are not finite: NaN for a `GradScaler`, zeros, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import thinwire
from catalog import ENTRIES, Entry, buckets, random_gradients, spec
from processes import in_each_process
from thinwire import AllReduce, Cast, ConfigError, LocalSGD, NonfiniteError, PowerSGD, hooks
from thinwire import powersgd as epfl
from thinwire.algorithms import Algorithm
from thinwire.algorithms.error_feedback import ERROR
from thinwire.simulation import Simulation
from thinwire.sync.settings import loss_scale_of
from training import are_alike, batch_of, ddp_of, error_of, flat, new_model

POWER = PowerSGD(matrix_rank=2)
BAD = 1  # the step, or the batch, that is not finite on one worker


def run(
    algorithm: Algorithm, bad_steps: set[int], *, steps: int, **settings: Any
) -> tuple[Simulation, list[Tensor]]:
    """The means of each step; bad ones have a NaN on one worker, in the second bucket only."""
    simulation = Simulation(algorithm, buckets(), num_workers=2, **settings)
    means = []
    for step in range(steps):
        gradients = random_gradients(buckets(), num_workers=2, seed=step)
        if step in bad_steps:
            gradients[step // 2][1][7] = torch.nan
        simulation.step(gradients)
        for others in gradients[1:]:
            for mine, theirs in zip(gradients[0], others, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        means.append(torch.cat(gradients[0]))
    return simulation, means


@pytest.mark.parametrize(("entry", "host_check"), [*zip(ENTRIES, cycle([True, False]))], ids=str)
def test_zeros_in_place_of_nan_and_else_the_same_run(entry: Entry, host_check: bool) -> None:
    """Of every algorithm: all gradients of the step, in all buckets, and the step is counted."""
    steps = 5 if getattr(entry.algorithm, "warmup_steps", 0) else 3
    (simulation, got), (as_nan, expected) = (
        run(entry.algorithm, {BAD}, steps=steps, host_check=host_check, on_nonfinite=on_nonfinite)
        for on_nonfinite in ("zero", "nan")
    )
    for step, (a, b) in enumerate(zip(got, expected, strict=True)):
        if step == BAD:
            assert b.isnan().any()
            assert not a.any()
        else:
            assert torch.equal(a, b)
    stats = simulation.syncs[0].stats()
    assert (stats.nonfinite_steps, stats.steps) == (1, len(got))
    if entry.compresses:
        assert stats.compression_ratio > 1.1  # with a warm-up of three of the five steps
    with_memory = as_nan.engines[0].state.memory
    for name, owed in simulation.engines[0].state.memory[ERROR].items():
        assert torch.equal(owed, with_memory[ERROR][name])


@pytest.mark.parametrize("algorithm", [AllReduce(), POWER, PowerSGD(warmup_steps=9)], ids=str)
def test_a_raise_leaves_what_was_and_the_run_goes_on(algorithm: Algorithm) -> None:
    disturbed, healthy = (
        Simulation(algorithm, buckets(), num_workers=2, on_nonfinite=how) for how in ("raise", "nan")
    )
    for step in range(4):
        gradients = random_gradients(buckets(), num_workers=2, seed=step)
        if step == BAD:
            bad = [[flat.clone() for flat in of_worker] for of_worker in gradients]
            bad[1][0][3] = -torch.inf
            before = disturbed.state_dicts()[0]
            with pytest.raises(
                NonfiniteError, match=f"step {BAD}: the mean gradients are not finite.*residual is unchanged"
            ):
                disturbed.step(bad)
            after = disturbed.state_dicts()[0]
            assert (before["step"], before["skipped_steps"]) == (BAD, 0)
            assert (after["step"], after["skipped_steps"]) == (BAD, 1)
            healthy.state_dicts()
        theirs = [[flat.clone() for flat in of_worker] for of_worker in gradients]
        disturbed.step(gradients)
        healthy.step(theirs)
        for mine, other in zip(gradients[0], theirs[0], strict=True):
            assert torch.equal(mine, other)
    assert disturbed.syncs[1].stats().nonfinite_steps == 1


def test_what_a_narrower_type_makes_of_a_finite_mean_counts() -> None:
    """The mean of fp16 gradients is finite in bf16, where it is rounded up to more than fp16 holds."""
    layout = [(spec("weight", 8, dtype=torch.float16),)]
    for on_nonfinite, count in (("nan", 0), ("zero", 1)):
        simulation = Simulation(Cast("bf16"), layout, num_workers=1, on_nonfinite=on_nonfinite)  # type: ignore[arg-type]
        gradients = [[torch.full((8,), 65504.0, dtype=torch.float16)]]
        simulation.step(gradients)
        assert simulation.syncs[0].stats().nonfinite_steps == count
        assert bool(gradients[0][0].isinf().all()) == (count == 0)


# On real processes, through every adapter.


def loss_of(model: nn.Module, step: int, *, overflows: bool = False) -> Tensor:
    loss: Tensor = model(batch_of(step)).square().mean()
    return loss * torch.inf if overflows and dist.get_rank() == 1 else loss


Averaged = tuple[nn.Module, torch.optim.Optimizer, Any]
"""A model, its optimizer, and what averages its gradients."""

CONFIG = epfl.Config(rank=2, start_compressing_after_num_steps=0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def attached(**options: Any) -> Averaged:
    model = ddp_of()
    return model, sgd(model), thinwire.attach(model, POWER, **options)


def hooked(**options: Any) -> Averaged:
    model, state = ddp_of(), hooks.PowerSGDState(None, 2, start_powerSGD_iter=0, **options)
    model.register_comm_hook(state, hooks.powerSGD_hook)
    return model, sgd(model), state


def post_local_hooked(**options: Any) -> Averaged:
    model, state = ddp_of(), hooks.PostLocalSGDState(None, None, 100, False, **options)
    model.register_comm_hook(state, hooks.post_localSGD_hook)
    return model, sgd(model), state


def in_the_warmup_of_local_sgd(**options: Any) -> Averaged:
    model = ddp_of()
    optimizer = sgd(model)
    warmup = thinwire.Warmup(100, **options)
    return model, optimizer, LocalSGD(model, optimizer, every_steps=50, warmup=warmup)


def aggregated(**options: Any) -> Averaged:
    model = new_model()
    return model, sgd(model), epfl.PowerSGD(model.parameters(), CONFIG, **options)


def aggregated_exactly(**options: Any) -> Averaged:
    model = new_model()
    return model, sgd(model), epfl.AllReduce(**options)


ADAPTERS = [attached, hooked, post_local_hooked, in_the_warmup_of_local_sgd, aggregated, aggregated_exactly]


@pytest.mark.parametrize("adapter", ADAPTERS)
@in_each_process(2)
def test_without_a_scaler_a_batch_that_overflows_is_as_if_it_had_not_been(
    adapter: Callable[..., Averaged],
) -> None:
    _, healthy = _trained(adapter, "zero", overflow=False)
    for on_nonfinite in ("zero", "raise"):
        raised, disturbed = _trained(adapter, on_nonfinite, overflow=True)
        assert raised == (on_nonfinite == "raise")
        assert torch.equal(disturbed, healthy)
        assert are_alike([disturbed])


def _trained(adapter: Callable[..., Averaged], on_nonfinite: str, *, overflow: bool) -> tuple[bool, Tensor]:
    model, optimizer, averager = adapter(on_nonfinite=on_nonfinite)
    is_aggregator = isinstance(averager, epfl.Aggregator)
    step = partial(epfl.optimizer_step, optimizer, averager) if is_aggregator else optimizer.step
    raised = False
    with averager if isinstance(averager, LocalSGD) else nullcontext():
        for number in range(3):
            if number == BAD and overflow:
                model.zero_grad()
                try:
                    torch.autograd.backward(loss_of(model, 77, overflows=True))
                    step()
                except NonfiniteError as error:
                    raised = "the mean gradients are not finite" in str(error)
            model.zero_grad()
            torch.autograd.backward(loss_of(model, number))
            step()
        return raised, flat(model)


@pytest.mark.parametrize(
    ("on_nonfinite", "scaler", "host_check", "words"),
    [
        ("nan", None, False, "became NaN"),
        ("zero", None, True, "became zeros"),
        ("nan", GradScaler("cpu", init_scale=1.0), True, None),
        # Without mixed precision it skips nothing.
        ("nan", GradScaler("cpu", enabled=False), True, "became NaN"),
    ],
    ids=["nan", "zero", "scaler", "disabled"],
)
@in_each_process(2)
def test_it_is_said_once_where_no_scaler_is_known(
    on_nonfinite: Any, scaler: Any, host_check: bool, words: str | None
) -> None:
    model = ddp_of()
    sync = thinwire.attach(model, POWER, grad_scaler=scaler, host_check=host_check, on_nonfinite=on_nonfinite)
    with patch("thinwire.sync.reporter.logger.warning") as warning:
        for step in range(4):
            model.zero_grad()
            torch.autograd.backward(loss_of(model, step, overflows=step > 1))
        assert sync.stats().nonfinite_steps == 2
    lines = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert len(lines) == (words is not None)
    assert words is None or words in lines[0]


# With a scaler: overflows leave no trace, and no change of scale changes a result.

STEPS = 10
HUGE = 3e38  # overflows in fp32 once it is scaled


def overflows(processes: int, seed: int = 3) -> dict[int, int]:
    """Before which steps one more batch comes, that overflows, and on which process."""
    draw = random.Random(seed)
    return {step: draw.randrange(processes) for step in sorted(draw.sample(range(STEPS), 5))}


@pytest.mark.parametrize(
    ("adapter", "options"),
    [(attached, {}), (attached, {"host_check": False}), (hooked, {}), (aggregated, {})],
)
@in_each_process(2)
def test_overflows_leave_no_trace(adapter: Callable[..., Averaged], options: dict[str, Any]) -> None:
    """Five batches more that overflow on one process; else the same run, to the bit."""
    runs: tuple[tuple[GradScaler, dict[int, int]], ...] = (
        (GradScaler("cpu", init_scale=2.0**14, growth_interval=3), overflows(dist.get_world_size())),
        (GradScaler("cpu", init_scale=1.0, growth_interval=10_000), {}),
    )
    found = []
    for scaler, overflowing in runs:
        # A hook is given a function, the others the scaler.
        given: Any = scaler.get_scale if adapter is hooked else scaler
        model, optimizer, sync = adapter(grad_scaler=given, **options)
        step: Callable[[], object] = partial(scaler.step, optimizer)
        if isinstance(sync, epfl.Aggregator):
            step = partial(epfl.optimizer_step, optimizer, sync)
        scales = set()
        for number in range(STEPS):
            for is_one_more in (True, False) if number in overflowing else (False,):
                is_bad = is_one_more and overflowing[number] == dist.get_rank()
                before = flat(model)
                loss = loss_of(model, number + 77 * is_one_more) * (HUGE if is_bad else 1.0)
                torch.autograd.backward(scaler.scale(loss))
                step()
                scaler.update()
                optimizer.zero_grad()
                scales.add(scaler.get_scale())
                assert torch.equal(flat(model), before) == is_one_more
        assert (len(scales) > 1) == bool(overflowing)
        assert sync.stats().nonfinite_steps == len(overflowing)
        found.append((flat(model), dict(sync.state_dict()["error"])))
    assert sync.stats().compression_ratio > 3
    (parameters, residuals), (expected, expected_residuals) = found
    assert torch.equal(parameters, expected)
    assert all(residual.any() for residual in residuals.values())
    torch.testing.assert_close(residuals, expected_residuals, rtol=0, atol=0)


# What may be given as the scale.


def test_what_tells_the_scale() -> None:
    given = {
        GradScaler("cpu", init_scale=8.0): 8.0,
        lambda: 8: 8.0,
        lambda: torch.tensor([8.0], dtype=torch.float64): 8.0,
    }
    for scaler, expected in given.items():
        scale = loss_scale_of(scaler)
        assert scale is not None
        assert torch.equal(scale(torch.device("cpu")), torch.tensor(expected))
    with pytest.raises(ConfigError, match=r"must be a torch\.amp\.GradScaler, a function"):
        loss_scale_of(1024.0)
    assert loss_scale_of(None) is None
    assert loss_scale_of(GradScaler("cpu", enabled=False)) is None


@pytest.mark.parametrize(
    "bad",
    [0, -1.0, torch.inf, torch.nan, 1e-60, 1e300, True, None, "8", torch.ones(2), torch.tensor(0.0)],
    ids=str,
)
def test_a_scale_that_is_none_is_refused(bad: Any) -> None:
    scale = loss_scale_of(lambda: bad)
    assert scale is not None
    with pytest.raises(ConfigError, match="must return a number above 0 within fp32"):
        scale(torch.device("cpu"))


@pytest.mark.parametrize("choice", ["skip", None, True, "zero", "raise"])
def test_a_choice_is_one_of_three_and_a_scaler_must_see_what_is_not_finite(choice: Any) -> None:
    is_one = choice in ("zero", "raise")
    words = "must see gradients" if is_one else r'on_nonfinite must be "nan", "zero" or "raise", got'
    with pytest.raises(ConfigError, match=words):
        hooks.PowerSGDState(None, on_nonfinite=choice, grad_scaler=GradScaler("cpu"))
    for scaler in (GradScaler("cpu", enabled=False), lambda: 8.0) if is_one else ():
        hooks.PowerSGDState(None, on_nonfinite=choice, grad_scaler=scaler)


@in_each_process(2)
def test_what_would_not_reach_all_or_have_no_effect_is_refused() -> None:
    plain, model, group = new_model(), ddp_of(), dist.group.WORLD

    def local(model: nn.Module, on_nonfinite: Any, **settings: Any) -> LocalSGD:
        optimizer, warmup = torch.optim.SGD(model.parameters()), thinwire.Warmup(on_nonfinite=on_nonfinite)
        return LocalSGD(model, optimizer, every_steps=2, warmup=warmup, **settings)

    def attach(**settings: Any) -> None:
        thinwire.attach(model, POWER, **settings)

    def unlike() -> None:
        attach(on_nonfinite="zero" if dist.get_rank() == 0 else "nan")
        torch.autograd.backward(loss_of(model, 0))

    for words, call in (
        (
            'host_check=False can\'t be combined with on_nonfinite="raise"',
            lambda: attach(host_check=False, on_nonfinite="raise"),
        ),
        ("must see gradients", lambda: attach(grad_scaler=GradScaler("cpu"), on_nonfinite="zero")),
        ("this model is a plain module", lambda: local(plain, "zero")),
        ("can't be combined with a subgroup", lambda: local(model, "raise", subgroup=group)),
        (
            "can't be combined with averaging within subgroups",
            lambda: hooks.PostLocalSGDState(None, group, 3, on_nonfinite="raise"),
        ),
        ("process 0 has on_nonfinite zero, process 1 has on_nonfinite nan", unlike),
    ):
        assert words in error_of(call)
