"""What an averaging makes of the models of all members, and what it sends."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from members import Member, data_parallel, run
from thinwire import LocalSGD, Streaming, Warmup
from thinwire.algorithms import Algorithm, AllReduce, BatchedPowerSGD, Cast, PowerSGD, Quantize, TopK
from thinwire.channel import Metered
from thinwire.channel.transport import Work
from thinwire.errors import CommunicationError
from thinwire.plan import Plan
from thinwire.sync import engine_of
from training import batch_of, error_of, flat, new_model, new_optimizer, train, train_step

POWER = PowerSGD(matrix_rank=2)
FULL_RANK = PowerSGD(matrix_rank=48, min_compression_ratio=0.01)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("algorithm", "dtype", "max_gap"),
    [
        (AllReduce(), torch.float64, 1e-12),
        (AllReduce(), torch.float32, 1e-5),
        (FULL_RANK, torch.float32, 1e-4),
    ],
    ids=["exact, fp64", "exact, fp32", "full rank, fp32"],
)
@pytest.mark.parametrize("size", [2, 4])
def test_averaging_every_step_is_data_parallel_training(
    size: int, algorithm: Algorithm, dtype: torch.dtype, max_gap: float
) -> None:
    expected, start = data_parallel(size, 8, dtype), flat(new_model(dtype=dtype))
    moved = (expected - start).norm()
    assert moved > 0.1
    for parameters, agreed, same_storage in run(size, _every_step, algorithm, dtype):
        assert (parameters - expected).norm() < max_gap * moved
        assert agreed
        assert same_storage


def _every_step(member: Member, algorithm: Algorithm, dtype: torch.dtype) -> tuple[Tensor, bool, bool]:
    member.take(new_model(dtype=dtype))
    addresses = [p.data_ptr() for p in member.model.parameters()]
    with member.local(every_steps=1, algorithm=algorithm):
        member.train(8)
    same_storage = addresses == [p.data_ptr() for p in member.model.parameters()]
    return flat(member.model), member.agreed(), same_storage


@pytest.mark.parametrize("algorithm", [TopK(), Quantize(bits=1)])
def test_statistics_are_averaged_as_they_are(algorithm: Algorithm) -> None:
    """A variance that is only about the mean may be negative, and its model's outputs NaN."""
    models = run(4, _with_statistics, algorithm)
    variances = torch.stack([before for before, *_ in models])
    assert len({tuple(each.tolist()) for each in variances}) == 4
    for _, after, ratio in models:
        torch.testing.assert_close(after, variances.mean(0))
        assert ratio > 4


def _with_statistics(member: Member, algorithm: Algorithm) -> tuple[Tensor, Tensor, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48))
    member.take(model)
    variance = model[1].running_var
    assert isinstance(variance, Tensor)
    with member.local(every_steps=1, algorithm=algorithm) as local:
        variance.copy_(torch.rand(48, generator=torch.Generator().manual_seed(member.rank)))
        before = variance.clone()
        member.optimizer.step()
    return before, variance.clone(), local.stats().compression_ratio


@pytest.mark.parametrize("algorithm", [Quantize(bits=4, error_feedback=True), BatchedPowerSGD(matrix_rank=1)])
def test_before_the_first_averaging_the_plan_knows_statistics(algorithm: Algorithm) -> None:
    """As it is after it."""
    first, last = run(2, _plans, algorithm)[0]
    assert first == last
    assert first.compression_ratio > 4
    assert [r.names for r in first.routes if not r.is_compressed] == [("1.running_mean",), ("1.running_var",)]


def _plans(member: Member, algorithm: Algorithm) -> tuple[Plan, Plan]:
    torch.manual_seed(0)
    member.take(nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48)))
    with member.local(every_steps=1, algorithm=algorithm) as local:
        first = local.sync.plan
        member.optimizer.step()
        return first, local.sync.plan


def test_every_few_steps_the_models_become_their_mean() -> None:
    alone = []
    for worker in range(2):
        model = new_model()
        train(model, new_optimizer(model), range(3), worker)
        alone.append(flat(model))
    for agreed, after_three in run(2, _to_the_mean):
        assert agreed == [False, False, True, False, False, True]
        assert (after_three - torch.stack(alone).mean(0)).abs().max() < 1e-6


def _to_the_mean(member: Member) -> tuple[list[bool], Tensor]:
    agreed, parameters = [], []
    with member.local(every_steps=3):
        for step in range(6):
            member.train(step, step + 1)
            agreed.append(member.agreed())
            parameters.append(flat(member.model))
    return agreed, parameters[2]


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_bytes_are_those_of_data_parallel_training_over_the_number_of_steps(warmup_steps: int) -> None:
    parameter_bytes = 4 * flat(new_model()).numel()
    for stats in run(2, _bytes, warmup_steps):
        assert stats.steps == warmup_steps + 12
        assert stats.gradient_bytes == stats.steps * parameter_bytes
        assert stats.message_bytes == (warmup_steps + 12 // 4) * parameter_bytes
        assert stats.compression_ratio == stats.steps / (warmup_steps + 3)


def _bytes(member: Member, warmup_steps: int) -> Any:
    with member.local(every_steps=4, warmup=Warmup(warmup_steps)) as local:
        member.train(warmup_steps + 12)
    assert local.counts().message_bytes == local.stats().message_bytes
    assert str(local) == "LocalSGD(every_steps=4), AllReduce()"
    return local.stats()


def test_warm_up_is_data_parallel_training_without_compression_or_outer_optimizer() -> None:
    expected = data_parallel(2, 5, torch.float64)
    moved = (expected - flat(new_model(dtype=torch.float64))).norm()
    for after_warm_up, errors, outer_state, agreed in run(2, _warm_up):
        assert (after_warm_up - expected).norm() < 1e-12 * moved
        assert errors == [0, 3]
        assert outer_state == [0, 6]
        assert agreed


def _warm_up(member: Member) -> tuple[Tensor, list[int], list[int], bool]:
    member.take(new_model(dtype=torch.float64))
    parameters, errors, outer_state = [], [], []
    with member.local(every_steps=2, warmup=Warmup(5), algorithm=POWER, outer=NESTEROV) as local:
        for first, last in ((0, 5), (5, 7)):
            member.train(first, last)
            parameters.append(flat(member.model))
            state = local.state_dict()
            errors.append(len(dict(state["sync"]["error"])))
            outer_state.append(len(state["outer"]["state"]))
    return parameters[0], errors, outer_state, member.agreed()


# Algorithms


@pytest.mark.parametrize(
    ("algorithm", "min_ratio"),
    [
        (Cast("bf16"), 8),
        (POWER, 20),
        (PowerSGD(matrix_rank=2, alternating=True), 30),
        (BatchedPowerSGD(), 60),
    ],
    ids=str,
)
def test_every_algorithm_carries_changes(algorithm: Algorithm, min_ratio: float) -> None:
    for ratio, agreed, loss in run(2, _with_algorithm, algorithm):
        assert ratio >= min_ratio
        assert agreed
        assert loss < 0.6


def _with_algorithm(member: Member, algorithm: Algorithm) -> tuple[float, bool, float]:
    before = member.model(batch_of(99, 0)).square().mean().item()
    with member.local(every_steps=4, algorithm=algorithm) as local:
        member.train(16)
    after = member.model(batch_of(99, 0)).square().mean().item()
    return local.stats().compression_ratio, member.agreed(), after / before


def test_what_powersgd_did_not_carry_is_residual() -> None:
    """What all members got, plus the mean residual, is the exact mean of the models."""
    for gap, residual, ratio in run(2, _residual):
        assert residual > 1e-3
        assert gap < 1e-5 * residual + 1e-6
        assert ratio > 20


def _residual(member: Member) -> tuple[float, float, float]:
    alone = new_model()
    train(alone, new_optimizer(alone), range(4), member.rank)
    with member.local(every_steps=4, algorithm=POWER) as local:
        member.train(4)
    error = dict(local.state_dict()["sync"]["error"])
    named = list(member.model.named_parameters())
    residual = torch.cat([error.get(name, torch.zeros_like(p)).reshape(-1) for name, p in named])
    gap = flat(member.model) + residual - member.gathered(flat(alone)).mean(0)
    return gap.norm().item(), residual.norm().item(), local.stats().compression_ratio


# Skipped steps, disagreement, values that are not finite


def scaled_step(member: Member, scaler: GradScaler, step: int) -> None:
    """On member 0, step 2 overflows: its scaler skips."""
    member.optimizer.zero_grad()
    factor = torch.inf if step == 2 and member.rank == 0 else 1.0
    loss = member.model(batch_of(step, member.rank)).square().mean()
    torch.autograd.backward(scaler.scale(loss) * factor)
    scaler.step(member.optimizer)
    scaler.update()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_that_one_scaler_skips_counts(enabled: bool) -> None:
    taken = []
    for steps_taken, averaged_after, stats, restored in run(2, _skipped, enabled):
        taken.append(steps_taken)
        assert averaged_after == [4, 8]
        assert stats.steps == 8
        assert stats.messages == 2
        assert restored
    assert taken == ([7, 8] if enabled else [8, 8])


def _skipped(member: Member, enabled: bool) -> tuple[int, list[int], Any, bool]:
    scaler = GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
    taken: list[int] = []
    member.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    averaged_after = []
    with member.local(every_steps=4, grad_scaler=scaler) as local:
        for step in range(8):
            scaled_step(member, scaler, step if enabled else 7)
            if member.agreed():
                averaged_after.append(step + 1)
    return len(taken), averaged_after, local.stats(), "step" not in vars(scaler)


def test_a_fused_optimizer_under_a_scaler_counts_once() -> None:
    """The scaler leaves skipping to it, so that its own hook fires in every step."""
    for averaged_after, stats in run(2, _fused):
        assert averaged_after == [3, 6]
        assert stats.steps == 6


def _fused(member: Member) -> tuple[list[int], Any]:
    member.optimizer = torch.optim.AdamW(member.model.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    averaged_after = []
    with member.local(every_steps=3, grad_scaler=scaler) as local:
        for step in range(6):
            scaled_step(member, scaler, step)
            if member.agreed():
                averaged_after.append(step + 1)
    return averaged_after, local.stats()


def test_without_the_scaler_a_skipped_step_is_an_error_on_all_members_that_names_the_remedy() -> None:
    def loop(member: Member) -> None:
        scaler = GradScaler("cpu", init_scale=2.0**8)
        with member.local(every_steps=4):
            for step in range(8):
                scaled_step(member, scaler, step)

    for message in run(2, lambda member: error_of(lambda: loop(member))):
        assert message.startswith("StepError: processes are at different steps (0: 7, 1: 8)")
        assert "LocalSGD(…, grad_scaler=scaler)" in message


def test_of_another_optimizer_under_the_same_scaler_steps_do_not_count() -> None:
    def body(member: Member) -> tuple[int, int]:
        first, *others = member.model.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.01), torch.optim.SGD(others, lr=0.01)]
        member.optimizer, scaler = optimizers[1], GradScaler("cpu", init_scale=2.0)
        with member.local(every_steps=2, grad_scaler=scaler) as local:
            for step in range(4):
                member.model.zero_grad()
                loss = member.model(batch_of(step, member.rank)).square().mean()
                torch.autograd.backward(scaler.scale(loss))
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
        return local.steps, local.stats().messages

    assert run(2, body) == [(4, 2)] * 2


@pytest.mark.parametrize("every_steps", [2, 4, 100])
@pytest.mark.parametrize("hierarchical", [False, True])
def test_different_numbers_of_batches_are_an_error_on_all_members(
    every_steps: int, hierarchical: bool
) -> None:
    def loop(member: Member) -> None:
        with member.local(every_steps=every_steps, subgroup=member.pair if hierarchical else None):
            member.train(3 if member.rank == 1 else 4)

    for message in run(4, lambda member: error_of(lambda: loop(member))):
        assert message.startswith("StepError: processes are at different steps")
        assert "1: 3" in message
        assert "uneven batches" in message
        assert "with local, thinwire.join(local): …" in message


def test_of_many_who_disagree_eight_are_listed() -> None:
    def loop(member: Member) -> None:
        with member.local(every_steps=9):
            member.train(member.rank)

    (message, *others) = run(10, lambda member: error_of(lambda: loop(member)))
    assert "(0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7 and 2 more)" in message
    assert others == [message] * 9


@pytest.mark.parametrize("algorithm", [AllReduce(), POWER], ids=str)
def test_parameters_that_are_not_finite_are_an_error_on_all_members(algorithm: Algorithm) -> None:
    """Nothing is averaged: parameters, last average and residual stay as they were."""
    results = run(2, _diverged, algorithm)
    assert len(results) == 2
    for message, untouched, messages in results:
        assert message.startswith("StepError: the parameters or buffers of process 1 are not finite")
        assert "restart all processes from a checkpoint" in message
        assert untouched == [True, True, True]
        assert messages == (1 if algorithm == AllReduce() else 2)


def _diverged(member: Member, algorithm: Algorithm) -> tuple[str, list[bool], int]:
    local = member.local(algorithm=algorithm)
    states, kept = [], []

    def loop() -> None:
        with local:
            member.train(3)
            states.append(copy.deepcopy(local.state_dict()))
            if member.rank == 1:
                next(member.model.parameters()).data[0, 0] = torch.nan
            kept.append(flat(member.model))
            local.average()

    message = error_of(loop)
    states.append(local.state_dict())
    before, after = states
    errors = [dict(state["sync"]["error"]) for state in states]
    untouched = [
        torch.equal(kept[0].nan_to_num(5), flat(member.model).nan_to_num(5)),
        all(torch.equal(t, after["last_average"][n]) for n, t in before["last_average"].items()),
        all(torch.equal(t, errors[1][n]) for n, t in errors[0].items()),
    ]
    assert bool(flat(member.model).isfinite().all()) == (member.rank == 0)
    return message, untouched, local.stats().messages


def test_a_subgroup_that_diverges_stops_all_members() -> None:
    def loop(member: Member) -> None:
        with member.local(every_steps=3, subgroup=member.pair):
            for step in range(6):
                if step == 4 and member.rank == 3:
                    next(member.model.parameters()).data[0, 0] = torch.inf
                member.train(step, step + 1)

    messages = run(4, lambda member: error_of(lambda: loop(member)))
    assert len(messages) == 4
    for message in messages:
        assert message.startswith("StepError: the parameters or buffers of process 3 are not finite")


def test_a_mean_that_leaves_the_range_of_its_type_is_an_error_and_changes_nothing() -> None:
    for message, untouched in run(2, _overflowing):
        assert message.startswith("StepError: the mean change of the parameters is not finite")
        assert untouched


def _overflowing(member: Member) -> tuple[str, bool]:
    kept = []

    def loop() -> None:
        with member.local(algorithm=Cast("fp16")) as local:
            member.train(1)
            next(member.model.parameters()).data[0, 0] = 1e6
            kept.append(flat(member.model))
            local.average()

    return error_of(loop), torch.equal(kept[0], flat(member.model))


# Lost messages


def test_when_a_member_is_lost_the_others_keep_what_they_had() -> None:
    (message, untouched), nothing = run(2, _lost)
    assert message.startswith("CommunicationError: step 3, the consensus check before an averaging")
    assert untouched
    assert nothing == ("", True)


def _lost(member: Member) -> tuple[str, bool]:
    kept = []
    member.optimizer.register_step_post_hook(lambda *_: kept.append(flat(member.model)))

    def loop() -> None:
        with member.local(every_steps=3):
            member.train(2)
            if member.rank == 1:
                raise KeyError  # nothing is sent any more
            member.train(2, 3)

    with nullcontext() if member.rank == 0 else pytest.raises(KeyError):
        return error_of(loop), torch.equal(flat(member.model), kept[2])
    return "", True


@pytest.mark.parametrize("algorithm", [AllReduce(), POWER], ids=str)
def test_an_exchange_that_fails_changes_nothing_and_can_be_made_again(algorithm: Algorithm) -> None:
    failed = run(2, _exchanged, algorithm, True)
    assert failed == run(2, _exchanged, algorithm, False)
    assert len({parameters for parameters, _ in failed}) == 1


class Failing(Metered):
    """Loses means."""

    def mean(self, tensor: Tensor, purpose: str) -> Work:
        tensor.fill_(torch.nan)
        raise CommunicationError(f"{purpose}: lost")


def _exchanged(member: Member, algorithm: Algorithm, fails: bool) -> tuple[bytes, Any]:
    with member.local(every_steps=9, algorithm=algorithm, outer=NESTEROV) as local:
        engine = engine_of(local.sync)
        for first, last in ((0, 4), (4, 8)):
            member.train(first, last)
            if fails:
                before, engine.wire = flat(member.model), Failing(member.transport)
                assert error_of(local.average).startswith("CommunicationError")
                assert torch.equal(flat(member.model), before)
                engine.wire = engine.metered
            local.average()
    return flat(member.model).numpy().tobytes(), local.state_dict()["checksum"]


# Subgroups


def test_hierarchical_averaging() -> None:
    """The subgroup every step, all members in the warm-up and every third step after it."""
    everywhere, within = (True, True), (True, False)
    for seen, message_bytes in run(4, _hierarchical):
        assert seen == [everywhere] * 2 + [within, within, everywhere] * 2
        assert message_bytes == (2 + 2) * 4 * flat(new_model()).numel()


def _hierarchical(member: Member) -> tuple[list[tuple[bool, bool]], int]:
    seen = []
    with member.local(every_steps=3, warmup=Warmup(2), subgroup=member.pair) as local:
        for step in range(8):
            member.train(step, step + 1)
            seen.append(member.halves())
    return seen, local.stats().message_bytes


def test_within_a_subgroup_it_is_data_parallel_training() -> None:
    start = flat(new_model(dtype=torch.float64))
    for rank, (parameters, seen) in enumerate(run(4, _within)):
        expected = data_parallel(2, 6, torch.float64, first_worker=rank // 2 * 2)
        assert seen == (True, False)
        assert (parameters - expected).norm() < 1e-12 * (expected - start).norm()


def _within(member: Member) -> tuple[Tensor, tuple[bool, bool]]:
    member.take(new_model(dtype=torch.float64))
    with member.local(every_steps=100, subgroup=member.pair):
        member.train(6)
        return flat(member.model), member.halves()


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
def test_floating_buffers(average_buffers: bool, outer: Any) -> None:
    """The mean of the statistics, outer optimizer or not; integer and unsaved buffers are left alone."""
    for equal, gap, tracked, bounds, mask in run(2, _buffers, average_buffers, outer):
        assert equal == average_buffers
        assert (gap < 1e-6) == average_buffers
        assert tracked == [2, 3]
        assert bounds == [-torch.inf, 3.0, torch.inf]
        assert mask == [0, 1]


def _buffers(
    member: Member, average_buffers: bool, outer: Any
) -> tuple[bool, float, list[int], list[float], list[float]]:
    torch.manual_seed(0)
    model = Normalised()
    alone = copy.deepcopy(model)
    member.take(model)
    with member.local(streaming=Streaming(average_buffers=average_buffers), outer=outer):
        model.mask += member.rank
        if member.rank == 1:
            model(batch_of(9, 1)), alone(batch_of(9, 1))
        member.train(2)
    train(alone, new_optimizer(alone), range(2), member.rank)
    means, alone_means = (member.gathered(each.norm.state_dict()["running_mean"]) for each in (model, alone))
    gap = (means[0] - alone_means.mean(0)).abs().max().item()
    tracked = member.gathered(model.norm.state_dict()["num_batches_tracked"]).tolist()
    mask = member.gathered(model.mask)[:, 0].tolist()
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
def test_every_kind_of_parameter(algorithm: Algorithm) -> None:
    first, second = run(2, _kinds, algorithm)
    for name, tensor in first[0].items():
        assert torch.equal(tensor, second[0][name]), name
    for _, same_storage, ratio, compressed in (first, second):
        assert same_storage
        assert ratio >= 3
        assert compressed == (algorithm != AllReduce())


def _kinds(member: Member, algorithm: Algorithm) -> tuple[dict[str, Tensor], bool, float, bool]:
    torch.manual_seed(0)
    model = Mixed()
    addresses = [p.data_ptr() for p in model.parameters()]
    member.model, member.optimizer = model, torch.optim.SGD(model.parameters(), lr=1e-4)
    with member.local(every_steps=3, algorithm=algorithm) as local:
        for step in range(6):
            train_step(model, member.optimizer, batch_of(step, member.rank))
    same_storage = addresses == [p.data_ptr() for p in model.parameters()]
    compressed = any(route.is_compressed for route in local.sync.plan.routes)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return parameters, same_storage, local.stats().compression_ratio, compressed


@pytest.mark.parametrize("are_both_given", [False, True])
def test_of_two_optimizers_both_are_given_or_the_one_that_steps_last(are_both_given: bool) -> None:
    assert run(2, _two_optimizers, are_both_given) == [[False, True, False, True]] * 2


def _two_optimizers(member: Member, are_both_given: bool) -> list[bool]:
    first, *others = member.model.parameters()
    optimizers = [torch.optim.AdamW([first], lr=0.01), torch.optim.SGD(others, lr=0.05)]
    agreed = []
    given = optimizers if are_both_given else optimizers[1]
    with LocalSGD(member.model, given, every_steps=2, replicas=member.transport):
        for step in range(4):
            member.model.zero_grad()
            torch.autograd.backward(member.model(batch_of(step, member.rank)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
            agreed.append(member.agreed())
    return agreed


def test_entry_gives_all_members_the_first_ones_model() -> None:
    for agreed, frozen, unsaved in run(2, _entry):
        assert agreed
        assert frozen == [0, 0]
        assert unsaved == [0, 0]


def _entry(member: Member) -> tuple[bool, list[float], list[float]]:
    model: Any = new_model(seed=member.rank)
    model.frozen = nn.Parameter(torch.full((1,), float(member.rank)), requires_grad=False)
    model.register_buffer("unsaved", torch.tensor([member.rank]), persistent=False)
    member.take(model)
    with member.local(every_steps=1):
        frozen, unsaved = (member.gathered(each)[:, 0].tolist() for each in (model.frozen, model.unsaved))
        return member.agreed(), frozen, unsaved


def test_a_compiled_model() -> None:
    for agreed, ratio in run(2, _compiled):
        assert agreed
        assert ratio == 2


def _compiled(member: Member) -> tuple[bool, float]:
    compiled: Any = torch.compile(member.model, backend="eager")
    member.model = compiled
    with member.local() as local:
        member.train(4)
    return member.agreed(), local.stats().compression_ratio


def test_a_model_that_trains_other_parameters_than_on_entry_is_refused() -> None:
    def loop(member: Member) -> None:
        first = next(member.model.parameters()).requires_grad_(False)
        with member.local(every_steps=1):
            first.requires_grad_(True)
            member.train(1)

    for message in run(2, lambda member: error_of(lambda: loop(member))):
        assert message.startswith("StepError: the model's trainable parameters or buffers are others")
        assert "0.weight" in message


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (
            (0, 1),
            "StepError: the model's trainable parameters or buffers are others than when this LocalSGD was ",
        ),
        # Both would send as many numbers, of other parameters.
        (
            (1,),
            "AgreementError: entering LocalSGD: process 0 has no parameters that have changed since LocalSGD",
        ),
    ],
)
def test_a_model_that_trains_other_parameters_than_when_it_was_made_is_refused(
    by: tuple[int, ...], said: str
) -> None:
    def enter(member: Member) -> None:
        local = member.local()
        next(member.model.parameters()).requires_grad_(member.rank not in by)
        with local:
            raise AssertionError("entered")

    for message in run(2, lambda member: error_of(lambda: enter(member))):
        assert message.startswith(said)
        assert "0.weight" in message


# Entry, exit, averaging on request


def test_averaging_on_request_leaves_the_schedule_alone() -> None:
    for seen, messages in run(2, _on_request):
        assert seen == [False, True, True, False, True, False, True]
        assert messages == [0, 1, 1, 1, 2, 2, 3]


def _on_request(member: Member) -> tuple[list[bool], list[int]]:
    seen, messages = [], []
    with member.local(every_steps=3) as local:
        actions = ["step", "average", "average", "step", "step", "step"]
        for step, action in enumerate(actions):
            member.train(step, step + 1) if action == "step" else local.average()
            seen.append(member.agreed())
            messages.append(local.stats().messages)
    return [*seen, member.agreed()], [*messages, local.stats().messages]


@pytest.mark.parametrize("raises", [False, True])
def test_exit_takes_everything_off_and_averages_only_if_clean(raises: bool) -> None:
    for agreed, hooks, restored, messages in run(2, _exit, raises):
        assert agreed != raises
        assert hooks == [2, 1]
        assert restored
        assert messages == (0 if raises else 1)


def _exit(member: Member, raises: bool) -> tuple[bool, list[int], bool, int]:
    scaler = GradScaler("cpu")
    scaler.step = own = scaler.step  # type: ignore[method-assign]
    member.optimizer.register_step_post_hook(lambda *_: None)
    hooks = []
    local = member.local(every_steps=5, grad_scaler=scaler)
    with pytest.raises(KeyError) if raises else nullcontext(), local:
        hooks.append(len(member.optimizer._optimizer_step_post_hooks))
        member.train(2)
        if raises:
            raise KeyError
    hooks.append(len(member.optimizer._optimizer_step_post_hooks))
    member.train(10 if raises else 0)
    return member.agreed(), hooks, scaler.step is own, local.stats().messages


def test_what_another_optimizer_has_changed_is_averaged_at_the_end_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(member: Member) -> tuple[bool, bool]:
        with member.local(every_steps=2, streaming=Streaming(fragments=2)) as local:
            member.train(2)
            assert (member.agreed(), local.stats().messages) == (
                False,
                2,
            )  # the first fragment after one step
            local.average()
            if member.rank:
                member.optimizer = new_optimizer(member.model)  # whose steps nobody counts
                member.train(1)
            before = member.agreed()
        return before, member.agreed()

    assert run(2, body) == [(False, True)] * 2
    assert [record.message[:23] for record in caplog.records] == ["parameters have changed"]


def test_observers_are_called_after_every_step() -> None:
    def body(member: Member) -> list[tuple[int, bool]]:
        seen: list[tuple[int, bool]] = []
        with member.local(every_steps=2) as local:
            local.observers.append(lambda committed: seen.append((local.steps, committed)))
            member.train(3)
        return seen

    assert run(2, body) == [[(1, True), (2, True), (3, True)]] * 2
