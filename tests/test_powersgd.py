"""The reference package's names: gradients averaged after the backward pass, against a NumPy reference."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import thinwire
from processes import Spawn, in_each_process
from reference_powersgd import ReferencePowerSGD
from thinwire.algorithms import Algorithm
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.lowrank.factors import random_rows
from thinwire.powersgd import Aggregator, AlgorithmAggregator, AllReduce, Config, PowerSGD, optimizer_step
from training import agreed, batch_of, flat, gathered, new_model

PAIRS = [[0, 1], [2, 3]]
AT_ONCE = Config(rank=2, start_compressing_after_num_steps=0)


def backward(model: nn.Module, step: int) -> None:
    dtype, process_rank = next(model.parameters()).dtype, dist.get_rank() if dist.is_initialized() else 0
    torch.autograd.backward(model(batch_of(step, process_rank).to(dtype)).square().mean())


def train(model: nn.Module, aggregator: Aggregator, steps: range) -> Tensor:
    """The parameters afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        backward(model, step)
        assert optimizer_step(optimizer, aggregator)
    return flat(model)


def noise(shape: tuple[int, ...], step: int, process_rank: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + process_rank))


def test_the_config_has_the_references_names_and_defaults() -> None:
    assert Config._field_defaults == {
        "min_compression_rate": 2,
        "num_iters_per_step": 1,
        "start_compressing_after_num_steps": 100,
    }
    assert Config._fields[0] == "rank"


@pytest.mark.parametrize(
    ("matrix_rank", "iterations", "start_after"), [(1, 1, 0), (3, 1, 2), (3, 2, 0), (1, 3, 0)]
)
@in_each_process(2)
def test_the_same_as_a_plain_float64_reference(matrix_rank: int, iterations: int, start_after: int) -> None:
    """Direct `aggregate` calls, so that the errors left in the input are compared as well."""
    shapes: list[tuple[int, ...]] = [(24, 3, 3, 3), (24,), (40, 384), (40,), (40, 40), (40,), (8, 40), (8,)]
    powersgd = PowerSGD(map(torch.zeros, shapes), Config(matrix_rank, 1.5, iterations, start_after))
    bases = {
        index: random_rows(0, (min(matrix_rank, shape[0]), shape[0]), torch.device("cpu")).T.double().numpy()
        for index, shape in enumerate(shapes)
        if len(shape) > 1
    }
    reference = ReferencePowerSGD(shapes, matrix_rank, iterations, 1.5, start_after, bases)
    own = [torch.zeros(shape) for shape in shapes]
    theirs = [[torch.zeros(shape, dtype=torch.float64).numpy() for shape in shapes] for _ in range(2)]
    for step in range(6):
        for process_rank, kept in enumerate(theirs):
            generator = torch.Generator().manual_seed(100 * step + process_rank)
            for index, shape in enumerate(shapes):
                gradient = torch.randn(shape, generator=generator)
                kept[index] += gradient.double().numpy()
                if process_rank == dist.get_rank():
                    own[index] += gradient
        got = [*powersgd.aggregate(own), *own]
        expected = [*reference.step(theirs), *theirs[dist.get_rank()]]
        for mine, true in zip(got, map(torch.from_numpy, expected), strict=True):
            assert (mine.double() - true).norm() < 1e-4 * max(1.0, true.norm())
    compressed = sum(route.is_compressed for route in powersgd.plan.routes)
    assert 3 <= compressed == sum(map(reference.is_compressed, shapes)) < 8
    assert powersgd.stats().compression_ratio > 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@in_each_process(2)
def test_with_and_without_zero_grad(dtype: torch.dtype) -> None:
    ends = []
    for set_to_none in (None, True, False):
        model = new_model(dtype=dtype)
        parameters = list(model.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        powersgd = PowerSGD(model.parameters(), AT_ONCE)
        for step in range(6):
            if set_to_none is not None:
                optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, step)
            assert optimizer_step(optimizer, powersgd)
        assert powersgd.stats().steps == 6
        assert powersgd.stats().compression_ratio > 2
        assert agreed(model)
        ends.append(flat(model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@in_each_process(2)
def test_all_reduce_is_plain_data_parallel() -> None:
    model, single = new_model(), new_model()
    alone = torch.optim.SGD(single.parameters(), lr=0.05)
    train(model, AllReduce(), range(3))
    for step in range(3):
        alone.zero_grad()
        for process_rank in range(2):
            torch.autograd.backward(single(batch_of(step, process_rank)).square().mean() / 2)
        alone.step()
    assert (flat(model) - flat(single)).abs().max() < 1e-6


class Branches(nn.Module):
    """The first branch is used by all, each other by one process or, the last, by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(30, 30) for _ in range(4))

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.branches[index](inputs) for index in used]).sum(0)

    def weight(self, index: int) -> Tensor:
        return self.branches[index].get_parameter("weight").detach().clone()


@in_each_process(2)
def test_facts_14_unused_parameters() -> None:
    """None on some counts as zeros; None on all stays None: no weight decay, and the residual is kept."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, momentum=0.9)
    powersgd = PowerSGD(model.parameters(), AT_ONCE)

    def train_branches(step: int, used: list[int]) -> None:
        inputs = noise((4, 30), step, dist.get_rank())
        torch.autograd.backward(model(inputs, used).square().mean())
        optimizer_step(optimizer, powersgd)

    def saved(kind: str) -> Tensor:
        return dict(powersgd.state_dict()[kind])["parameter[2]"].clone()  # type: ignore[no-any-return]

    last = model.weight(3)
    for step in range(3):
        train_branches(step, [0, 1 + dist.get_rank()])
    assert torch.equal(last, model.weight(3))
    residual, factor, before = saved("error"), saved("factor"), model.weight(1)
    assert residual.norm() > 0
    train_branches(3, [0])
    assert torch.equal(saved("factor"), factor)
    assert torch.equal(saved("error"), residual)
    assert torch.equal(before, model.weight(1))
    train_branches(4, [0, 1])
    assert not torch.equal(saved("error"), residual)
    assert agreed(model)


@pytest.mark.parametrize("processes", [0, 2])
def test_saved_and_resumed_bit_equal(spawn: Spawn, processes: int) -> None:
    """Without a process group as well."""
    if processes:
        spawn(processes, _resumed)
    else:
        assert not dist.is_initialized()
        _resumed()


def _resumed() -> None:
    model, file = new_model(), io.BytesIO()
    powersgd = PowerSGD(model.parameters(), AT_ONCE)
    train(model, powersgd, range(3))
    torch.save(powersgd.state_dict(), file)
    other = copy.deepcopy(model)
    other_powersgd = PowerSGD(other.parameters(), AT_ONCE)
    other_powersgd.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert torch.equal(train(model, powersgd, range(3, 6)), train(other, other_powersgd, range(3, 6)))
    assert powersgd.step_counter == other_powersgd.step_counter == 6
    assert other_powersgd.stats().compression_ratio > 2


@pytest.mark.parametrize(("processes", "dtype", "scale"), [(2, torch.float32, 1), (4, torch.bfloat16, 1024)])
def test_fed_back_by_the_caller_nothing_is_lost_or_counted_twice(
    spawn: Spawn, processes: int, dtype: torch.dtype, scale: float
) -> None:
    """Also by four processes on two machines, of which each keeps a part of the residual."""
    spawn(processes, _fed_back, dtype, scale)


def _fed_back(dtype: torch.dtype, scale: float) -> None:
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
    residual = held[0].double() / scale
    remembered = powersgd.engine.state.memory[ERROR].get("parameter[0]", torch.zeros(0))
    if len(remembered):  # whole: one process of a machine averages the matrix
        residual += remembered.view(40, 30) * (processes // 2)
    assert (kept.norm() > 0) == (dtype == torch.bfloat16)
    dist.all_reduce(residual)
    gap = (sent[0] + residual / processes - true[0]).norm() / true[0].norm()
    assert gap < (1e-5 if dtype == torch.float32 else 5e-3)
    assert powersgd.stats().compression_ratio > 2


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


@in_each_process(2)
def test_an_aggregator_of_ones_own_keeps_the_references_contract() -> None:
    model = new_model()
    train(model, SignMean(), range(3))
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
    assert agreed(model)


@pytest.mark.parametrize(
    ("num_batches", "divide_by_initial", "algorithm"),
    [
        ((0, 12), True, None),
        ((9, 2), False, None),
        ((3, 5), True, thinwire.Quantize(bits=2, error_feedback=True)),
        ((3, 5), True, thinwire.TopK(density=0.1, error_decay=1.0, merge="members")),
    ],
    ids=lambda value: str(value)[:15],
)
@in_each_process(2)
def test_uneven_inputs(
    num_batches: tuple[int, int], divide_by_initial: bool, algorithm: Algorithm | None
) -> None:
    """What was applied and what is left are the true sum over the whole uneven run."""
    # With a learning rate of one and gradients that do not depend on the weights.
    torch.manual_seed(0)
    layer = nn.Linear(40, 30, bias=False)
    start = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    if algorithm is None:
        aggregator: AlgorithmAggregator = PowerSGD(layer.parameters(), AT_ONCE)
    else:
        aggregator = AlgorithmAggregator(layer.parameters(), algorithm)
    own_batches, most = num_batches[dist.get_rank()], max(num_batches)
    with thinwire.join(aggregator, divide_by_initial):
        for step in range(own_batches):
            layer.weight.grad = noise((30, 40), step, dist.get_rank())
            optimizer_step(optimizer, aggregator)
    true = torch.zeros(30, 40, dtype=torch.float64)
    for step in range(most):
        contributors = [index for index, batches in enumerate(num_batches) if step < batches]
        divisor = 2 if divide_by_initial else len(contributors)
        true += sum(noise((30, 40), step, index).double() for index in contributors) / divisor
    applied = (start - layer.weight.detach()).double()
    residual = dict(aggregator.state_dict()["error"])["parameter[0]"]
    assert residual.norm() > 0
    assert own_batches < most or (applied + residual - true).norm() < 1e-5 * true.norm()
    assert agreed(layer)
    assert aggregator.stats().steps == most
    assert aggregator.stats().compression_ratio > 4


def of_three(config: Any = AT_ONCE, **options: Any) -> PowerSGD:
    """Over one parameter of three elements."""
    return PowerSGD([nn.Parameter(torch.ones(3))], config, **options)


def stepped(aggregator: Any) -> bool:
    return optimizer_step(torch.optim.SGD([nn.Parameter(torch.ones(3))]), aggregator)


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: of_three(Config(rank=0)), "^rank must be .* got 0"),
    (lambda: of_three(Config(1, -1)), "^min_compression_rate must be .* got -1"),
    (lambda: of_three(Config(1, 2, 0)), "^num_iters_per_step must be .* got 0"),
    (lambda: of_three(Config(1, 2, 1, 0.5)), "^start_compressing_after_num_steps must be .* got 0.5"),  # type: ignore[arg-type]
    (lambda: of_three({"rank": 1}), "Config"),
    (lambda: PowerSGD([], AT_ONCE), "got none"),
    (lambda: PowerSGD(torch.ones(3), AT_ONCE), "got Tensor"),
    (lambda: PowerSGD(["weight"], AT_ONCE), "got a str among them"),  # type: ignore[list-item]
    (lambda: PowerSGD([torch.ones(3)] * 2, AT_ONCE), "more than once"),
    (lambda: of_three(grad_scaler=2.0), "grad_scaler.*2.0"),
    (lambda: of_three().aggregate([]), "expected 1 gradients, one per parameter, got 0"),
    (lambda: of_three().aggregate([torch.ones(4)]), r"gradient 0 has shape \(4,\), its parameter \(3,\)"),
    (lambda: of_three().aggregate([torch.ones(3).to_sparse()]), "sparse=False"),
    (lambda: stepped(thinwire.PowerSGD()), "expected an Aggregator"),
    (lambda: stepped(of_three()), "1 parameters that the aggregator lacks, and lacks 1"),
]


@in_each_process(2)
def test_mistakes_are_refused_at_once_and_unscaled_too_early_is_told() -> None:
    for call, message in MISTAKES:
        with pytest.raises(thinwire.ThinwireError, match=message):
            call()
    model, scaler = new_model(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    powersgd = PowerSGD(model.parameters(), AT_ONCE, grad_scaler=scaler)
    torch.autograd.backward(scaler.scale(model(torch.ones(1, 24)).sum()))
    scaler.unscale_(optimizer)
    with pytest.raises(thinwire.StepError, match="unscale_"):
        optimizer_step(optimizer, powersgd)


def test_without_a_process_group_there_is_nothing_to_join() -> None:
    with pytest.raises(thinwire.AttachError, match="no process group to join"), thinwire.join(of_three()):
        pass
    assert AllReduce().aggregate([]) == []


def test_a_process_group_that_is_missing_or_made_later_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    powersgd = of_three()
    with monkeypatch.context() as several:
        several.setenv("WORLD_SIZE", "2")
        with pytest.raises(thinwire.AttachError, match="init_process_group"):
            of_three()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(thinwire.StepError, match="create it afterwards"):
        powersgd.aggregate([torch.ones(3)])


@in_each_process(2)
def test_a_gradient_missing_on_one_process_can_be_saved_all_the_same() -> None:
    """There the error stays in memory, where the others have left it in their gradients."""
    powersgd = PowerSGD([torch.zeros(48, 32)], AT_ONCE)
    for step in range(3):
        missing = step == 2 and dist.get_rank() == 1
        torch.manual_seed(step)
        powersgd.aggregate([None if missing else torch.randn(48, 32)])
    ((name, residual),) = powersgd.state_dict()["error"]
    assert name == "parameter[0]"
    assert torch.equal(*gathered(residual))
