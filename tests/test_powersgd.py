"""The reference package's names: gradients averaged after the backward pass, against a NumPy reference."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Join

import thinwire
from pool import Pool, Pools
from reference_powersgd import ReferencePowerSGD
from thinwire.algorithms import Algorithm, Quantize
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.factors import random_rows
from thinwire.channel import Recording
from thinwire.powersgd import Aggregator, AlgorithmAggregator, AllReduce, Config, PowerSGD, optimizer_step
from thinwire.testing import InjectedError, fail_at, faults

PAIRS = [[0, 1], [2, 3]]
AT_ONCE = Config(rank=2, start_compressing_after_num_steps=0)


def new_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Conv2d(3, 24, 3), nn.Flatten(), nn.Linear(24 * 16, 40), nn.Tanh(), nn.Linear(40, 40)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(40, 8)).to(dtype)


def backward(model: nn.Module, step: int, process_rank: int, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(1_000 * step + process_rank)
    batch = torch.randn(8, 3, 6, 6, generator=generator).to(dtype)
    torch.autograd.backward(model(batch).square().mean())


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_the_config_has_the_references_names_and_defaults() -> None:
    assert Config._field_defaults == {
        "min_compression_rate": 2,
        "num_iters_per_step": 1,
        "start_compressing_after_num_steps": 100,
    }
    assert Config._fields[0] == "rank"


@pytest.mark.parametrize(
    ("matrix_rank", "iterations", "start_after"),
    [(1, 1, 0), (3, 1, 2), (1, 2, 2), (3, 2, 0), (1, 3, 0), (3, 3, 2)],
)
def test_the_same_as_a_plain_float64_reference(
    pool2: Pool, matrix_rank: int, iterations: int, start_after: int
) -> None:
    config = Config(matrix_rank, 1.5, iterations, start_after)
    for gaps, ratio, compressed in pool2.run(_against_reference, config):
        assert max(gaps) < 1e-4
        assert ratio > 1.5
        assert 3 <= compressed < 8


def _against_reference(config: Config) -> tuple[list[float], float, int]:
    """Direct `aggregate` calls, so that the errors left in the input are compared as well."""
    shapes = [tuple(p.shape) for p in new_model().parameters()]
    parameters = [torch.zeros(shape) for shape in shapes]
    powersgd = PowerSGD(parameters, config)
    bases = {
        index: random_rows(0, (min(config.rank, shape[0]), shape[0]), torch.device("cpu")).T.double().numpy()
        for index, shape in enumerate(shapes)
        if len(shape) > 1
    }
    reference = ReferencePowerSGD(shapes, *config[:1], config[2], config[1], config[3], bases)
    own = [torch.zeros(shape) for shape in shapes]
    theirs = [[torch.zeros(shape, dtype=torch.float64).numpy() for shape in shapes] for _ in range(2)]
    gaps = []
    for step in range(6):
        for process_rank in range(2):
            generator = torch.Generator().manual_seed(100 * step + process_rank)
            for index, shape in enumerate(shapes):
                gradient = torch.randn(shape, generator=generator)
                theirs[process_rank][index] += gradient.double().numpy()
                if process_rank == dist.get_rank():
                    own[index] += gradient
        means = powersgd.aggregate(own)
        expected = reference.step(theirs)
        for got, true in [
            *zip(means, expected, strict=True),
            *zip(own, theirs[dist.get_rank()], strict=True),
        ]:
            scale = max(1.0, float(torch.from_numpy(true).norm()))
            gaps.append(float((got.double() - torch.from_numpy(true)).norm()) / scale)
    planned = [route for route in powersgd.plan.routes if route.is_compressed]
    assert len(planned) == sum(reference.compressed)
    return gaps, powersgd.stats().compression_ratio, len(planned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_type_with_and_without_zero_grad(pool2: Pool, dtype: torch.dtype) -> None:
    without = pool2.run(_trained, dtype, None)
    for results in (without, pool2.run(_trained, dtype, True), pool2.run(_trained, dtype, False)):
        for parameters, ratio, steps, world_size in results:
            assert (steps, world_size) == (6, 2)
            assert ratio > 2
            for mine, theirs in zip(parameters, without[0][0], strict=True):
                assert torch.equal(mine, theirs)
                assert mine.isfinite().all()


def _trained(dtype: torch.dtype, set_to_none: bool | None) -> tuple[list[Tensor], float, int, int]:
    model = new_model(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    half = len(list(model.parameters())) // 2
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    powersgd = PowerSGD(model.parameters(), AT_ONCE)
    for step in range(6):
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, step, dist.get_rank(), dtype)
        assert optimizer_step(optimizer, powersgd)
    stats = powersgd.stats()
    return parameters_of(model), stats.compression_ratio, stats.steps, dist.get_world_size()


@pytest.mark.parametrize("algorithm", [None, Quantize(bits=4)], ids=str)
def test_a_machine_of_two_processes_sends_once(pool4: Pool, algorithm: Algorithm | None) -> None:
    results = pool4.run(_on_machines, algorithm)
    for parameters, sent, of_flat, world_size in results:
        assert world_size == 4
        assert 0 < 1.9 * sent < of_flat
        for mine, theirs in zip(parameters, results[0][0], strict=True):
            assert torch.equal(mine, theirs)


def _on_machines(algorithm: Algorithm | None) -> tuple[list[Tensor], int, int, int]:
    """The parameters of a run on two machines, and what a machine sent, and would have sent flat."""
    found: list[Any] = []
    for machines in (PAIRS, False):
        model = new_model()
        if algorithm is None:
            aggregator: AlgorithmAggregator = PowerSGD(model.parameters(), AT_ONCE, machines=machines)
        else:
            aggregator = AlgorithmAggregator(model.parameters(), algorithm, machines=machines)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            backward(model, step, dist.get_rank())
            assert optimizer_step(optimizer, aggregator)
        found += [aggregator.stats(), parameters_of(model)]
    stats, parameters, of_flat, _ = found
    assert stats.compression_ratio > 2
    # Each of the two processes of a machine sends, if each sends by itself.
    return parameters, stats.message_bytes, 2 * of_flat.message_bytes, dist.get_world_size()


def test_all_reduce_is_plain_data_parallel(pool2: Pool) -> None:
    for gap, messages_are_whole in pool2.run(_exact):
        assert gap < 1e-6
        assert messages_are_whole


def _exact() -> tuple[float, bool]:
    model, single = new_model(), new_model()
    optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, single))
    aggregator = AllReduce()
    for step in range(3):
        backward(model, step, dist.get_rank())
        optimizer_step(optimizer, aggregator)
        alone.zero_grad()
        for process_rank in range(2):
            backward(single, step, process_rank)
        for parameter in single.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / 2
        alone.step()
    pairs = zip(parameters_of(model), parameters_of(single), strict=True)
    gap = max(float((a - b).abs().max()) for a, b in pairs)
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert aggregator._front is not None
    return gap, aggregator._front.sync.stats().message_bytes >= 3 * whole


def test_facts_14_equal_shapes_are_each_normalised_on_their_own(pool2: Pool) -> None:
    """FACTS 14: at matrix rank 1 theirs normalises over the batch: 94 % error for 16 matrices of rank one."""
    for gaps, ratio in pool2.run(_sixteen):
        assert max(gaps) < 1e-4
        assert ratio > 10


def _sixteen() -> tuple[list[float], float]:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-3, 3, 16)
    true = [
        scale * torch.randn(40, 1, generator=generator) @ torch.randn(1, 30, generator=generator)
        for scale in scales
    ]
    powersgd = PowerSGD(true, Config(rank=1, start_compressing_after_num_steps=0))
    for _ in range(4):
        means = powersgd.aggregate([matrix.clone() for matrix in true])
    gaps = [float((mean - matrix).norm() / matrix.norm()) for mean, matrix in zip(means, true, strict=True)]
    return gaps, powersgd.stats().compression_ratio


class Branches(nn.Module):
    """The first branch is used by all, each other by one process or, the last, by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(30, 30) for _ in range(4))

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.branches[index](inputs) for index in used]).sum(0)

    def weight(self, index: int) -> Tensor:
        return self.branches[index].get_parameter("weight").detach().clone()


def test_facts_14_unused_parameters(pool2: Pool) -> None:
    """None on some counts as zeros; None on all stays None: no weight decay, and what is owed is kept."""
    for untouched, agreed, owed_kept, paid in pool2.run(_unused):
        assert untouched
        assert agreed
        assert owed_kept > 0
        assert paid


def _unused() -> tuple[bool, bool, float, bool]:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9)
    powersgd = PowerSGD(model.parameters(), AT_ONCE)
    rank = dist.get_rank()

    def train(step: int, used: list[int]) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        torch.autograd.backward(model(torch.randn(4, 30, generator=generator), used).square().mean())
        optimizer_step(optimizer, powersgd)

    last = model.weight(3)
    for step in range(3):
        train(step, [0, 1 + rank])
    untouched = torch.equal(last, model.weight(3))
    owed = dict(powersgd.state_dict()["error"])["parameter[2]"].clone()
    factor = dict(powersgd.state_dict()["factor"])["parameter[2]"].clone()
    before = model.weight(1)
    train(3, [0])
    kept = dict(powersgd.state_dict()["error"])["parameter[2]"]
    assert torch.equal(dict(powersgd.state_dict()["factor"])["parameter[2]"], factor)
    untouched = untouched and torch.equal(before, model.weight(1)) and torch.equal(owed, kept)
    train(4, [0, 1])
    paid = not torch.equal(dict(powersgd.state_dict()["error"])["parameter[2]"], owed)
    checksum = torch.cat([p.detach().view(-1) for p in model.parameters()])
    everyone = [torch.empty_like(checksum) for _ in range(2)]
    dist.all_gather(everyone, checksum)
    return untouched, torch.equal(*everyone), float(owed.norm()), paid


@pytest.mark.parametrize("processes", [2, 3])
def test_saved_and_resumed_bit_equal(pools: Pools, processes: int) -> None:
    results = pools.of(processes).run(_resumed)
    assert len(results) == processes
    for straight, resumed, ratio in results:
        assert ratio > 2
        for mine, theirs in zip(straight, resumed, strict=True):
            assert torch.equal(mine, theirs)


def _resumed() -> tuple[list[Tensor], list[Tensor], float]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    powersgd = PowerSGD(model.parameters(), AT_ONCE)
    for step in range(3):
        backward(model, step, dist.get_rank())
        optimizer_step(optimizer, powersgd)
    file = io.BytesIO()
    torch.save(powersgd.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    other_powersgd = PowerSGD(other.parameters(), AT_ONCE)
    other_powersgd.load_state_dict(torch.load(file, weights_only=True))
    for trained, its_optimizer, aggregator in (
        (model, optimizer, powersgd),
        (other, other_optimizer, other_powersgd),
    ):
        for step in range(3, 6):
            backward(trained, step, dist.get_rank())
            optimizer_step(its_optimizer, aggregator)
    return parameters_of(model), parameters_of(other), other_powersgd.stats().compression_ratio


def test_a_process_group_of_some(pool4: Pool) -> None:
    results = pool4.run(_groups)
    for a, b in ((0, 1), (2, 3)):
        assert all(torch.equal(x, y) for x, y in zip(results[a], results[b], strict=True))
    assert not torch.equal(results[0][0], results[2][0])


def _groups() -> list[Tensor]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    powersgd = PowerSGD(model.parameters(), AT_ONCE, process_group=groups[dist.get_rank() // 2])
    for step in range(3):
        backward(model, step, dist.get_rank())
        optimizer_step(optimizer, powersgd)
    assert powersgd.stats().compression_ratio > 2
    return parameters_of(model)


@pytest.mark.parametrize("kind", ["plain", "GradScaler", "a disabled one"])
def test_a_non_finite_gradient_skips_the_step_on_all(pool2: Pool, kind: str) -> None:
    for taken, unchanged, healthy, agreed, scale in pool2.run(_overflow, kind):
        assert taken == [True, True, False, True, True]
        assert unchanged
        assert healthy
        assert agreed
        assert scale == (2.0**9 if kind == "GradScaler" else 1.0)


def _overflow(kind: str) -> tuple[list[bool], bool, bool, bool, float]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    enabled = kind == "GradScaler"
    scaler = None if kind == "plain" else GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
    powersgd = PowerSGD(model.parameters(), AT_ONCE, grad_scaler=scaler)
    taken, unchanged = [], False
    for step in range(5):
        generator = torch.Generator().manual_seed(1_000 * step + dist.get_rank())
        loss = model(torch.randn(8, 3, 6, 6, generator=generator)).square().mean()
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        before = parameters_of(model)
        if step == 2 and dist.get_rank() == 1:
            next(iter(model.parameters())).grad[0, 0] = torch.inf  # type: ignore[index]
        taken.append(optimizer_step(optimizer, powersgd))
        if scaler is not None:
            scaler.update()
        if step == 2:
            unchanged = all(torch.equal(a, b) for a, b in zip(before, parameters_of(model), strict=True))
    flat = torch.cat([p.view(-1) for p in parameters_of(model)])
    everyone = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(everyone, flat)
    assert powersgd.stats().nonfinite_steps == 1
    scale = 1.0 if scaler is None else scaler.get_scale()
    return taken, unchanged, bool(flat.isfinite().all()), torch.equal(*everyone), scale


def test_a_scale_that_jumps_changes_no_result(pool2: Pool) -> None:
    for plain, scaled in pool2.run(_jumping):
        for mine, theirs in zip(plain, scaled, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def _jumping() -> tuple[list[Tensor], list[Tensor]]:
    results = []
    for scaler in (None, GradScaler("cpu", init_scale=2.0**8)):
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        powersgd = PowerSGD(model.parameters(), AT_ONCE, grad_scaler=scaler)
        for step in range(5):
            generator = torch.Generator().manual_seed(1_000 * step + dist.get_rank())
            loss = model(torch.randn(8, 3, 6, 6, generator=generator)).square().mean()
            torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
            assert optimizer_step(optimizer, powersgd)
            if scaler is not None:
                scaler.update(2.0 ** (4 + step))
        results.append(parameters_of(model))
    return results[0], results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1024.0], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("processes", [2, 4])
def test_fed_back_by_the_caller_nothing_is_lost_or_counted_twice(
    pools: Pools, dtype: torch.dtype, scale: float, processes: int
) -> None:
    """Also by four processes on two machines, of which each keeps a part of the residual."""
    for gap, ratio in pools.of(processes).run(_fed_back, dtype, scale):
        assert gap < (1e-5 if dtype == torch.float32 else 5e-3)
        assert ratio > 2


def _fed_back(dtype: torch.dtype, scale: float) -> tuple[float, float]:
    held = [torch.zeros(40, 30, dtype=dtype), torch.zeros(40, dtype=dtype)]
    processes = dist.get_world_size()
    machines = PAIRS if processes == 4 else False
    powersgd = PowerSGD(held, AT_ONCE, grad_scaler=GradScaler("cpu", init_scale=scale), machines=machines)
    sent, true = ([torch.zeros(p.shape, dtype=torch.float64) for p in held] for _ in range(2))
    for step in range(8):
        for process_rank in range(processes):
            generator = torch.Generator().manual_seed(10 * step + process_rank)
            for index, tensor in enumerate(held):
                gradient = torch.randn(tensor.shape, generator=generator).to(dtype)
                true[index] += gradient.double() / processes
                if process_rank == dist.get_rank():
                    tensor.add_(gradient * scale)
        for total, mean in zip(sent, powersgd.aggregate(held), strict=True):
            total.add_(mean.double() / scale)
    kept = dict(powersgd.state_dict()["error"]).get("parameter[0]", torch.zeros(()))
    owed = held[0].double() / scale
    remembered = powersgd.engine.memory[ERROR].get("parameter[0]", torch.zeros(0))
    if len(remembered):  # whole: one process of a machine averages the matrix
        owed += remembered.view(40, 30) * (processes // 2)
    assert (kept.norm() > 0) == (dtype == torch.bfloat16)
    dist.all_reduce(owed)
    gap = (sent[0] + owed / processes - true[0]).norm() / true[0].norm()
    return float(gap), powersgd.stats().compression_ratio


class SignMean(Aggregator):
    """A user's own: the mean of signs, with error feedback in the input."""

    def aggregate(self, gradients: list[Tensor]) -> list[Tensor]:
        means = []
        for gradient in gradients:
            sent = gradient.sign() * gradient.abs().mean()
            gradient.sub_(sent)
            dist.all_reduce(sent)
            means.append(sent / dist.get_world_size())
        return means


def test_an_aggregator_of_ones_own_keeps_the_references_contract(pool2: Pool) -> None:
    for errors, agreed in pool2.run(_own_aggregator):
        assert min(errors) > 0
        assert agreed


def _own_aggregator() -> tuple[list[float], bool]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        backward(model, step, dist.get_rank())
        optimizer_step(optimizer, SignMean())
    errors = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.view(-1) for p in parameters_of(model)])
    everyone = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(everyone, flat)
    return errors, torch.equal(*everyone)


@pytest.mark.parametrize("num_batches", [(0, 12), (9, 2)], ids=str)
@pytest.mark.parametrize("divide_by_initial", [True, False], ids=["by initial size", "by contributors"])
def test_uneven_inputs(pool2: Pool, num_batches: tuple[int, int], divide_by_initial: bool) -> None:
    _check_uneven(pool2, num_batches, divide_by_initial, None)


@pytest.mark.parametrize(
    "algorithm",
    [
        thinwire.Quantize(bits=2, error_feedback=True),
        thinwire.TopK(density=0.1, error_decay=1.0, merge="members"),
    ],
    ids=["Quantize", "TopK"],
)
def test_any_algorithm_averages_at_the_optimizer_step(pool2: Pool, algorithm: Algorithm) -> None:
    _check_uneven(pool2, (3, 5), True, algorithm)


def _check_uneven(
    pool: Pool, num_batches: tuple[int, int], divide_by_initial: bool, algorithm: Algorithm | None
) -> None:
    """What was applied and what is still owed are the true sum over the whole uneven run."""
    results = pool.run(_uneven, num_batches, divide_by_initial, algorithm)
    for parameters, _, steps, ratio in results:
        assert steps == max(num_batches)
        assert ratio > 4
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][0], strict=True))
    assert results[num_batches.index(max(num_batches))][1] < 1e-5


def _uneven(
    num_batches: tuple[int, int], divide_by_initial: bool, algorithm: Algorithm | None
) -> tuple[list[Tensor], float, int, float]:
    """With a learning rate of one and gradients that do not depend on the weights."""
    torch.manual_seed(0)
    layer = nn.Linear(40, 30, bias=False)
    start = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    powersgd = (
        PowerSGD(layer.parameters(), AT_ONCE)
        if algorithm is None
        else AlgorithmAggregator(layer.parameters(), algorithm)
    )

    def gradient(step: int, process_rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + process_rank)
        return torch.randn(30, 40, generator=generator)

    with thinwire.join(powersgd, divide_by_initial):
        for step in range(num_batches[dist.get_rank()]):
            layer.weight.grad = gradient(step, dist.get_rank())
            optimizer_step(optimizer, powersgd)
    true = torch.zeros(30, 40, dtype=torch.float64)
    for step in range(max(num_batches)):
        contributors = [index for index, batches in enumerate(num_batches) if step < batches]
        divisor = 2 if divide_by_initial else len(contributors)
        true += sum(gradient(step, index).double() for index in contributors) / divisor
    applied = (start - layer.weight.detach()).double()
    owed = dict(powersgd.state_dict()["error"])["parameter[0]"]
    assert owed.norm() > 0
    gap = (applied + owed - true).norm() / true.norm()
    stats = powersgd.stats()
    return parameters_of(layer), float(gap), stats.steps, stats.compression_ratio


def test_after_torchs_own_join_context_it_averages_on(pool2: Pool) -> None:
    """Torch leaves its notifications switched on, also on the process that never shadowed another."""
    assert pool2.run(_after_join) == [(False, 4), (False, 4)]


def _after_join() -> tuple[bool, int]:
    powersgd = PowerSGD([torch.zeros(30, 40)], AT_ONCE)
    with Join([powersgd]):
        for _ in range(3 - dist.get_rank()):
            powersgd.aggregate([torch.ones(30, 40)])
    notifies = powersgd._join_config.enable
    if not notifies:
        powersgd.aggregate([torch.ones(30, 40)])
    return notifies, powersgd.stats().steps


def test_a_setting_that_differs_is_named_as_it_was_typed(pool2: Pool) -> None:
    for kind, message in pool2.run(_differing):
        assert kind == "AgreementError"
        assert "process 0 has rank 1, process 1 has rank 2" in message


def _differing() -> tuple[str, str]:
    powersgd = PowerSGD(
        [torch.zeros(30, 40)], Config(rank=1 + dist.get_rank(), start_compressing_after_num_steps=0)
    )
    try:
        powersgd.aggregate([torch.ones(30, 40)])
    except thinwire.ThinwireError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "rank 0": (lambda: PowerSGD([torch.ones(3)], Config(rank=0)), "^rank must be .* got 0"),
    "rank as text": (
        lambda: PowerSGD([torch.ones(3)], Config(rank="4")),  # type: ignore[arg-type]
        "^rank must be .* got '4'",
    ),
    "a rate below 0": (
        lambda: PowerSGD([torch.ones(3)], Config(1, min_compression_rate=-1)),
        "^min_compression_rate must be .* got -1",
    ),
    "no iterations": (
        lambda: PowerSGD([torch.ones(3)], Config(1, num_iters_per_step=0)),
        "^num_iters_per_step must be .* got 0",
    ),
    "half a step": (
        lambda: PowerSGD(
            [torch.ones(3)],
            Config(1, start_compressing_after_num_steps=0.5),  # type: ignore[arg-type]
        ),
        "^start_compressing_after_num_steps must be .* got 0.5",
    ),
    "no config": (lambda: PowerSGD([torch.ones(3)], {"rank": 1}), "Config"),  # type: ignore[arg-type]
    "no parameters": (lambda: PowerSGD([], AT_ONCE), "got none"),
    "a tensor": (lambda: PowerSGD(torch.ones(3), AT_ONCE), "got Tensor"),
    "names": (lambda: PowerSGD(["weight"], AT_ONCE), "got a str among them"),  # type: ignore[list-item]
    "a parameter twice": (lambda: PowerSGD([torch.ones(3)] * 2, AT_ONCE), "more than once"),
    "a scaler that is none": (
        lambda: PowerSGD([torch.ones(3)], AT_ONCE, grad_scaler=2.0),  # type: ignore[arg-type]
        "grad_scaler.*2.0",
    ),
    "too few gradients": (
        lambda: PowerSGD([torch.ones(3), torch.ones(2)], AT_ONCE).aggregate([torch.ones(3)]),
        "expected 2 gradients, one for each parameter, got 1",
    ),
    "another shape": (
        lambda: PowerSGD([torch.ones(3)], AT_ONCE).aggregate([torch.ones(4)]),
        r"gradient 0 has shape \(4,\), its parameter \(3,\)",
    ),
    "a sparse gradient": (
        lambda: PowerSGD([torch.ones(3)], AT_ONCE).aggregate([torch.ones(3).to_sparse()]),
        "sparse=False",
    ),
    "not an aggregator": (
        lambda: optimizer_step(torch.optim.SGD([torch.ones(3)]), thinwire.PowerSGD()),  # type: ignore[arg-type]
        "expected an Aggregator",
    ),
    "parameters of another model": (
        lambda: optimizer_step(
            torch.optim.SGD([nn.Parameter(torch.ones(3))]), PowerSGD([nn.Parameter(torch.ones(3))], AT_ONCE)
        ),
        "the optimizer has 1 parameters that are not the aggregator's, the aggregator 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_refused_at_once(pool2: Pool, name: str) -> None:
    assert pool2.run(_refused, name) == [True] * 2


def _refused(name: str) -> bool:
    call, message = BAD[name]
    with pytest.raises(thinwire.ThinwireError, match=message):
        call()
    return True


def test_unscaled_too_early_is_told(pool2: Pool) -> None:
    assert pool2.run(_unscaled) == [True] * 2


def _unscaled() -> bool:
    model, scaler = new_model(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    powersgd = PowerSGD(model.parameters(), AT_ONCE, grad_scaler=scaler)
    torch.autograd.backward(scaler.scale(model(torch.ones(1, 3, 6, 6)).sum()))
    scaler.unscale_(optimizer)
    with pytest.raises(thinwire.StepError, match="unscale_"):
        optimizer_step(optimizer, powersgd)
    return True


def test_without_a_process_group_whole_gradients_come_back_and_nothing_is_left() -> None:
    """The reference's own test_no_compression_in_the_beginning."""
    assert not dist.is_initialized()
    parameters = list(new_model().parameters())
    config = Config(1, min_compression_rate=10, start_compressing_after_num_steps=2)
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    given = [gradient.clone() for gradient in gradients]
    powersgd = PowerSGD(parameters, config)
    for mean, left, gradient in zip(powersgd.aggregate(gradients), gradients, given, strict=True):
        assert torch.equal(mean, gradient)
        assert not left.any()
    assert powersgd.step_counter == 1


def test_without_a_process_group_what_is_missed_is_left() -> None:
    """The reference's own test_error_feedback_mechanism, in float64 as it is there."""
    assert not dist.is_initialized()
    parameters = list(new_model(torch.float64).parameters())
    config = Config(2, min_compression_rate=1.5, num_iters_per_step=3, start_compressing_after_num_steps=0)
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    given = [gradient.clone() for gradient in gradients]
    powersgd = PowerSGD(parameters, config)
    for mean, left, gradient in zip(powersgd.aggregate(gradients), gradients, given, strict=True):
        torch.testing.assert_close(mean + left, gradient)
    assert sum(bool(left.any()) for left in gradients) >= 3
    assert powersgd.stats().compression_ratio > 1.5


def test_without_a_process_group_a_run_is_saved_and_resumed_bit_equal() -> None:
    assert not dist.is_initialized()
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    powersgd = PowerSGD(model.parameters(), AT_ONCE)
    for step in range(3):
        backward(model, step, 0)
        assert optimizer_step(optimizer, powersgd)
    other = copy.deepcopy(model)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    other_powersgd = PowerSGD(other.parameters(), AT_ONCE)
    other_powersgd.load_state_dict(powersgd.state_dict())
    for trained, its_optimizer, its in (
        (model, optimizer, powersgd),
        (other, other_optimizer, other_powersgd),
    ):
        backward(trained, 3, 0)
        optimizer_step(its_optimizer, its)
    assert powersgd.step_counter == other_powersgd.step_counter == 4
    assert powersgd.stats().compression_ratio > 2
    assert all(torch.equal(a, b) for a, b in zip(parameters_of(model), parameters_of(other), strict=True))


def test_without_a_process_group_there_is_nothing_to_join() -> None:
    powersgd = PowerSGD([torch.ones(3)], AT_ONCE)
    with pytest.raises(thinwire.AttachError, match="no process group to join"), thinwire.join(powersgd):
        pass


def test_several_processes_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(thinwire.AttachError, match="init_process_group"):
        PowerSGD([torch.ones(3)], AT_ONCE)


def test_made_before_the_process_group_it_is_refused_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    powersgd = PowerSGD([torch.ones(3)], AT_ONCE)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(thinwire.StepError, match="make it afterwards"):
        powersgd.aggregate([torch.ones(3)])


def test_no_gradients_have_no_means() -> None:
    assert AllReduce().aggregate([]) == []


def shapes_of_resnet_50() -> list[tuple[int, ...]]:
    """As torchvision's `resnet50().parameters()` has them."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(planes, channels, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            if block == 0:
                convolutions.append((4 * planes, channels, 1, 1))
            for convolution in convolutions:
                shapes += [convolution, convolution[:1], convolution[:1]]
            channels = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


def test_the_shapes_of_resnet_50() -> None:
    shapes = shapes_of_resnet_50()
    assert len(shapes) == 161
    assert sum(torch.Size(shape).numel() for shape in shapes) == 25_557_032


@pytest.mark.parametrize("matrix_rank", [1, 4, 16, 32, 64])
@pytest.mark.parametrize(("rate", "iterations"), [(2, 1), (10, 2), (40, 4), (0, 1)])
def test_as_many_matrices_of_resnet_50_are_compressed_as_by_the_reference(
    matrix_rank: int, rate: float, iterations: int
) -> None:
    """By its own formula, which counts convolutions by their four sizes."""
    shapes = shapes_of_resnet_50()
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    powersgd = PowerSGD(parameters, Config(matrix_rank, rate, iterations))
    counted = [0.5 * iterations * min(matrix_rank, *shape) * sum(shape) for shape in shapes]
    expected = [
        len(shape) > 1 and torch.Size(shape).numel() / elements > rate
        for shape, elements in zip(shapes, counted, strict=True)
    ]
    assert [route.is_compressed for route in powersgd.plan.routes] == expected
    if rate <= 2:
        assert sum(expected) == 54


def test_a_gradient_missing_on_one_process_can_be_saved_all_the_same(pool2: Pool) -> None:
    """There the error stays in memory, where the others have left it in their gradients."""
    first, second = pool2.run(_missing_on_one)
    assert first["checksum"] == second["checksum"]
    assert [name for name, _ in first["error"]] == ["parameter[0]"]


def _missing_on_one() -> dict[str, Any]:
    weight = torch.zeros(48, 32)
    powersgd = PowerSGD([weight], AT_ONCE)
    for step in range(3):
        missing = step == 2 and dist.get_rank() == 1
        torch.manual_seed(step)
        powersgd.aggregate([None if missing else torch.randn(48, 32)])
    return powersgd.state_dict()


def test_a_failed_step_of_several_buckets_is_forgotten(pool2: Pool) -> None:
    assert pool2.run(_failed_between_buckets) == [(3, True), (3, True)]


def _failed_between_buckets() -> tuple[int, bool]:
    parameters = [torch.zeros(48, 32), torch.zeros(48, 32, dtype=torch.float64)]
    powersgd = PowerSGD(parameters, AT_ONCE)
    for step in range(4):
        schedule = [fail_at(process, 1, "raise", after_messages=1) for process in (0, 1)] if step == 1 else []
        with faults(powersgd, schedule), pytest.raises(InjectedError) if schedule else nullcontext():
            powersgd.average([torch.randn_like(parameter) for parameter in parameters])
    state = powersgd.state_dict()
    return state["step"], len(state["error"]) == 2


def test_every_message_goes_through_the_transport_of_the_sync(pool2: Pool) -> None:
    for counted, noted, ratio in pool2.run(_noted):
        assert noted == counted == 2 * (1 + 1)  # in each step, who was used and one factor
        assert ratio > 5


def _noted() -> tuple[int, int, float]:
    assert dist.get_world_size() == 2
    powersgd = PowerSGD([torch.zeros(48, 32)], AT_ONCE)
    metered = powersgd.engine.metered
    metered.transport = recording = Recording(metered.transport)
    for _ in range(2):
        powersgd.average([torch.randn(48, 32)])
    return powersgd.stats().messages, len(recording.notes), powersgd.stats().compression_ratio
