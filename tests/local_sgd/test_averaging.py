"""What an averaging makes of the models of all members, and what it sends."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from members import NESTEROV, POWER, Failing, Member, data_parallel, in_each_member, run
from thinwire import LocalSGD, Streaming, Warmup
from thinwire.algorithms import Algorithm, AllReduce, Cast, PowerSGD, TopK
from thinwire.comm import InProcessTransport
from thinwire.errors import CommunicationError, StepError
from thinwire.sync import engine_of
from thinwire.sync.state import digest_of
from training import batch_of, flat, new_model, refused, train_step

NOT_FINITE = "parameters or buffers of rank {} are not finite"


@pytest.mark.parametrize(
    ("size", "algorithm", "dtype", "max_gap"),
    [
        (4, AllReduce(), torch.float64, 1e-12),
        (2, PowerSGD(matrix_rank=48, min_compression_ratio=0.01), torch.float32, 1e-4),
    ],
    ids=["exact", "full rank"],
)
@in_each_member()
def test_averaging_every_step_is_data_parallel_training(
    member: Member, algorithm: Algorithm, dtype: torch.dtype, max_gap: float
) -> None:
    expected, model = data_parallel(member.size, 5, dtype), new_model(dtype=dtype)
    moved = (expected - flat(model)).norm()
    assert moved > 0.05
    member.take(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    with member.local(every_steps=1, algorithm=algorithm):
        member.train(5)
    assert (flat(model) - expected).norm() < max_gap * moved
    assert member.agreed()
    assert addresses == [p.data_ptr() for p in model.parameters()]


@in_each_member(2)
def test_bytes_are_those_of_data_parallel_training_over_the_number_of_steps(member: Member) -> None:
    with member.local(every_steps=4, warmup=Warmup(3)) as local:
        member.train(15)
    parameter_bytes, stats = flat(member.model).nbytes, local.stats()
    assert (stats.steps, stats.averagings, stats.compression_ratio) == (15, 3, 15 / 6)
    assert stats.gradient_bytes == 15 * parameter_bytes
    assert stats.message_bytes == (3 + 3) * parameter_bytes == local.counts().message_bytes
    # The handle counts the same: it does not take three averagings for the steps.
    assert local.sync.stats() == stats
    assert "15 steps, 3 averagings" in str(local.sync)
    assert str(local) == "LocalSGD(every_steps=4), AllReduce()"


@in_each_member(2)
def test_warm_up_is_data_parallel_training_without_compression_or_outer_optimizer(member: Member) -> None:
    expected, model = data_parallel(2, 5, torch.float64), new_model(dtype=torch.float64)
    moved = (expected - flat(model)).norm()
    member.take(model)
    with member.local(every_steps=2, warmup=Warmup(5), algorithm=POWER, outer=NESTEROV) as local:
        for steps, num_errors, num_outer_states in (((5,), 0, 0), ((5, 7), 3, 6)):
            member.train(*steps)
            if steps == (5,):
                assert (flat(model) - expected).norm() < 1e-12 * moved
            state = local.state_dict()
            assert len(dict(state["sync"]["error"])) == num_errors
            assert len(state["outer"]["state"]) == num_outer_states
    assert member.agreed()


# Skipped steps, disagreement, values that are not finite


def scaled_step(member: Member, scaler: GradScaler, step: int) -> None:
    """On member 0, step 2 overflows: its scaler skips."""
    member.optimizer.zero_grad()
    factor = torch.inf if step == 2 and member.rank == 0 else 1.0
    loss = member.model(batch_of(step, member.rank)).square().mean()
    torch.autograd.backward(scaler.scale(loss) * factor)
    scaler.step(member.optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", ["scaled", "disabled", "fused"])
@in_each_member(2)
def test_a_step_that_one_scaler_skips_counts(member: Member, kind: str) -> None:
    """To a fused optimizer the scaler leaves skipping, so that its own hook fires in every step."""
    if kind == "fused":
        member.optimizer = torch.optim.AdamW(member.model.parameters(), fused=True)
    scaler, taken, averaged_after = GradScaler("cpu", init_scale=2.0**8, enabled=kind != "disabled"), [], []
    member.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    with member.local(every_steps=4, grad_scaler=scaler) as local:
        for step in range(8):
            scaled_step(member, scaler, 7 if kind == "disabled" else step)
            if member.agreed():
                averaged_after.append(step + 1)
    assert averaged_after == [4, 8]
    assert (local.stats().steps, local.stats().messages) == (8, 2)
    assert "step" not in vars(scaler)
    assert len(taken) == (7 if kind == "scaled" and member.rank == 0 else 8)


@pytest.mark.parametrize("hierarchical", [True, False])
@in_each_member(4)
def test_different_numbers_of_batches_are_an_error_on_all_members(member: Member, hierarchical: bool) -> None:
    words = ["ranks are at different steps", "1: 3", "grad_scaler=", "uneven inputs", "thinwire.join(local)"]
    subgroup = member.pair if hierarchical else None
    with refused(StepError, *words), member.local(every_steps=2, subgroup=subgroup):
        member.train(3 if member.rank == 1 else 4)


@in_each_member(2)
def test_parameters_that_are_not_finite_are_an_error_on_all_members(member: Member) -> None:
    """Nothing is averaged: parameters, last average and residual stay as they were."""
    with (
        refused(StepError, NOT_FINITE.format(1), "Restart from a checkpoint"),
        member.local(algorithm=POWER) as local,
    ):
        member.train(3)
        before = copy.deepcopy(local.state_dict())
        if member.rank == 1:
            next(member.model.parameters()).data[0, 0] = torch.nan
        own = flat(member.model)
        local.average()
    assert torch.equal(own.nan_to_num(5), flat(member.model).nan_to_num(5))
    assert bool(own.isfinite().all()) == (member.rank == 0)
    after = local.state_dict()
    assert digest_of(after["last_average"]) == digest_of(before["last_average"])
    assert digest_of(after["sync"]["error"]) == digest_of(before["sync"]["error"])
    assert local.stats().messages == 2


@in_each_member(4)
def test_a_subgroup_that_diverges_stops_all_members(member: Member) -> None:
    local, observed = member.local(every_steps=3, subgroup=member.pair), list[bool]()
    local.observers.append(observed.append)
    with refused(StepError, NOT_FINITE.format(3)), local:
        for step in range(6):
            if step == 4 and member.rank == 3:
                next(member.model.parameters()).data[0, 0] = torch.inf
            member.train(step, step + 1)
    assert len(observed) == local.steps - 1  # not of the one that failed


@in_each_member(2)
def test_a_mean_that_leaves_the_range_of_its_type_is_an_error_and_changes_nothing(member: Member) -> None:
    with (
        refused(StepError, "the averaged change of the parameters overflowed", "Nothing was averaged"),
        member.local(algorithm=Cast("fp16")) as local,
    ):
        member.train(1)
        next(member.model.parameters()).data[0, 0] = 1e6
        own = flat(member.model)
        local.average()
    assert torch.equal(own, flat(member.model))


# Lost messages


def test_an_exchange_that_fails_changes_nothing_and_can_be_made_again() -> None:
    failed = run(2, _exchanged, True)
    assert failed == run(2, _exchanged, False)
    assert len({parameters for parameters, _ in failed}) == 1


def _exchanged(member: Member, fails: bool) -> tuple[bytes, Any]:
    with member.local(every_steps=9, algorithm=POWER, outer=NESTEROV) as local:
        engine = engine_of(local.sync)
        for first, last in ((0, 4), (4, 8)):
            member.train(first, last)
            if fails:
                before, engine.wire = flat(member.model), Failing(member.transport)
                with refused(CommunicationError, "lost"):
                    local.average()
                assert torch.equal(flat(member.model), before)
                engine.wire = engine.metered
            local.average()
    return flat(member.model).numpy().tobytes(), digest_of(local.state_dict())


@in_each_member(4)
def test_within_a_subgroup_it_is_data_parallel_training(member: Member) -> None:
    member.take(new_model(dtype=torch.float64))
    start = flat(member.model)
    expected = data_parallel(2, 6, torch.float64, first_worker=member.rank // 2 * 2)
    with member.local(every_steps=100, subgroup=member.pair):
        member.train(6)
        assert (flat(member.model) - expected).norm() < 1e-12 * (expected - start).norm()
        assert member.halves() == (True, False)


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


@pytest.mark.parametrize(
    ("average_buffers", "outer"), [(True, partial(torch.optim.SGD, lr=0.5)), (True, None), (False, None)]
)
@in_each_member(2)
def test_floating_buffers(member: Member, average_buffers: bool, outer: Any) -> None:
    """The mean of the statistics as they are: a variance that is only about the mean may be negative.

    No outer optimizer moves them, no algorithm compresses them; integer and unsaved ones are left alone.
    """
    torch.manual_seed(0)
    model = Normalised()
    member.take(model)
    settings = {"algorithm": TopK(density=1 / 8), "outer": outer, "every_steps": 1}
    with member.local(streaming=Streaming(average_buffers=average_buffers), **settings) as local:
        model.mask += member.rank
        model(batch_of(9, member.rank))
        own, plan = member.gathered(model.norm.state_dict()["running_var"]), local.sync.plan
        if member.rank == 1:
            model.norm.num_batches_tracked += 1  # type: ignore[operator,assignment]
        member.optimizer.step()
        assert local.sync.plan == plan
    averaged = member.gathered(model.norm.state_dict()["running_var"])
    assert not torch.equal(own[0], own[1])
    torch.testing.assert_close(averaged, own.mean(0).expand_as(own) if average_buffers else own)
    assert any(route.names == ("norm.running_var",) and not route.is_compressed for route in plan.routes) == (
        average_buffers
    )
    assert member.gathered(model.norm.state_dict()["num_batches_tracked"]).tolist() == [1, 2]
    assert model.bounds.tolist() == [-torch.inf, 3.0, torch.inf]
    assert member.gathered(model.mask)[:, 0].tolist() == [0, 1]


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


def test_every_kind_of_parameter() -> None:
    first, second = run(2, _kinds)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def _kinds(member: Member) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Mixed()
    addresses = [p.data_ptr() for p in model.parameters()]
    member.model, member.optimizer = model, torch.optim.SGD(model.parameters(), lr=1e-4)
    with member.local(every_steps=3, algorithm=PowerSGD(matrix_rank=1, min_compression_ratio=1)) as local:
        for step in range(6):
            train_step(model, member.optimizer, batch_of(step, member.rank))
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert local.stats().compression_ratio > 3
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("are_both_given", [False, True])
@in_each_member(2)
def test_of_two_optimizers_both_are_given_or_the_one_that_steps_last(
    member: Member, are_both_given: bool
) -> None:
    """Under one scaler, too, the other's steps do not count."""
    first, *others = member.model.parameters()
    optimizers = [torch.optim.AdamW([first], lr=0.01), torch.optim.SGD(others, lr=0.05)]
    given, scaler = optimizers[0 if are_both_given else 1 :], GradScaler("cpu", enabled=not are_both_given)
    settings: dict[str, Any] = {"replicas": member.transport, "grad_scaler": scaler}
    with LocalSGD(member.model, given, every_steps=2, **settings) as local:
        for step in range(4):
            member.model.zero_grad()
            loss = member.model(batch_of(step, member.rank)).square().mean()
            torch.autograd.backward(scaler.scale(loss))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            assert member.agreed() == (step % 2 == 1)
    assert (local.steps, local.stats().messages) == (4, 2)


@pytest.mark.parametrize("change", [0, 1])
@in_each_member(2)
def test_frozen_parameters_start_equal_and_their_changes_are_told(
    member: Member, change: int, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = new_model(seed=member.rank)
    model.frozen = nn.Parameter(torch.full((1,), float(member.rank)), requires_grad=False)
    model.register_buffer("unsaved", torch.tensor([member.rank]), persistent=False)
    member.take(model)
    with member.local(every_steps=1):
        assert member.agreed()
        assert model.frozen.item() == model.unsaved.item() == 0
        for _ in range(2):  # the loop of a momentum teacher
            member.train(1)
            model.frozen.data += change
    assert ("frozen parameters have changed in the loop: ['frozen']" in caplog.text) == bool(change)


@in_each_member(2)
def test_a_compiled_model(member: Member) -> None:
    compiled: Any = torch.compile(member.model, backend="eager")
    member.model = compiled
    with member.local() as local:
        member.train(4)
    assert member.agreed()
    assert local.stats().compression_ratio == 2


# Entry, exit, averaging on request


@in_each_member(2)
def test_averaging_on_request_leaves_the_schedule_alone(member: Member) -> None:
    seen, messages, observed = [], [], []
    with member.local(every_steps=3) as local:
        local.observers.append(lambda committed: observed.append((local.steps, committed)))
        for step, action in enumerate(["step", "average", "average", "step", "step", "step"]):
            member.train(step, step + 1) if action == "step" else local.average()
            seen.append(member.agreed())
            messages.append(local.stats().messages)
    assert [*seen, member.agreed()] == [False, True, True, False, True, False, True]
    assert [*messages, local.stats().messages] == [0, 1, 1, 1, 2, 2, 3]
    assert observed == [(step, True) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("raises", [False, True])
@in_each_member(2)
def test_exit_takes_everything_off_and_averages_only_if_clean(member: Member, raises: bool) -> None:
    scaler = GradScaler("cpu")
    scaler.step = own = scaler.step  # type: ignore[method-assign]
    member.optimizer.register_step_post_hook(lambda *_: None)
    local = member.local(every_steps=3, grad_scaler=scaler)
    with pytest.raises(KeyError) if raises else nullcontext(), local:
        assert len(member.optimizer._optimizer_step_post_hooks) == 2
        member.train(2)
        if raises:
            raise KeyError
    assert len(member.optimizer._optimizer_step_post_hooks) == 1
    member.train(3 if raises else 0)
    assert member.agreed() != raises
    assert scaler.step is own
    assert local.stats().messages == (0 if raises else 1)


def test_a_context_that_has_ended_is_freed_with_its_model() -> None:
    """Immediately: the memory of its last averages is needed for the next one."""

    def train() -> list[weakref.ref[Any]]:
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with LocalSGD(model, optimizer, every_steps=1, replicas=InProcessTransport.group(1)[0]) as local:
            train_step(model, optimizer, batch_of(0, 0))
        return [weakref.ref(local), weakref.ref(model)]

    gc.collect()
    gc.disable()
    try:
        train()  # the first step imports modules, whose frames may hold it
        freed = [reference() is None for reference in train()]
    finally:
        gc.enable()
    assert freed == [True, True]
