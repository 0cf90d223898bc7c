"""Uneven inputs: nothing hangs, nothing owed is lost, all processes end with the same model."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import in_each_process
from thinwire import AllReduce, ConfigError, PowerSGD, hooks
from thinwire.adapters.common import divide_by_contributors
from thinwire.adapters.join import counted
from thinwire.comm import ProcessGroupTransport
from thinwire.powersgd import AlgorithmAggregator
from thinwire.sync.engine import Engine
from training import are_alike, refused

POWER = PowerSGD(matrix_rank=2)

STATELESS = {"allreduce_hook": 1e-6, "fp16_compress_hook": 2e-3, "bf16_compress_hook": 2e-2}


def new_model(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24, bias=False))
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.004, **options})


def batch_of(step: int, process_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + process_rank)
    return torch.randn(8, 24, generator=generator) * (1 + process_rank)


def gradients_of(model: nn.Module, step: int, process_rank: int) -> list[Tensor]:
    model.zero_grad()
    batch = batch_of(step, process_rank).to(next(model.parameters()).dtype)
    torch.autograd.backward(model(batch).square().mean())
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def true_sum(module: nn.Module, num_batches: tuple[int, ...], divide_by_initial: bool) -> list[Tensor]:
    """Sum over the run of the sums over processes, divided as asked; computed in one process."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in module.parameters()]
    for step in range(max(num_batches)):
        contributors = [rank for rank, batches in enumerate(num_batches) if step < batches]
        divisor = len(num_batches) if divide_by_initial else len(contributors)
        for process_rank in contributors:
            for each, gradient in zip(total, gradients_of(module, step, process_rank), strict=True):
                each.add_(gradient / divisor)
    return total


def total_in(
    context: AbstractContextManager[Any], model: nn.Module, batches: tuple[int, ...]
) -> list[Tensor]:
    """Sum of the gradients of this process's batches."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    with context:
        for step in range(batches[dist.get_rank()]):
            for each, gradient in zip(total, gradients_of(model, step, dist.get_rank()), strict=True):
                each.add_(gradient)
    return total


def gap_of(total: list[Tensor], true: list[Tensor]) -> float:
    got, expected = (torch.cat([each.view(-1) for each in side]) for side in (total, true))
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.mark.parametrize("divide_by_initial", [True, False], ids=["by initial size", "by contributors"])
@pytest.mark.parametrize("num_batches", [(0, 5), (4, 2), (0, 0)], ids=str)
@in_each_process(2)
def test_results_plus_what_is_still_owed_are_the_true_sum(
    divide_by_initial: bool, num_batches: tuple[int, int]
) -> None:
    """The telescoping identity over the whole uneven run: a finished process pays on."""
    model = new_model()
    plain, steps = copy.deepcopy(model.module), max(num_batches)
    sync = thinwire.attach(model, POWER)
    total = total_in(thinwire.join(sync, divide_by_initial), model, num_batches)
    error = dict(sync.state_dict()["error"])
    for summed, (name, _) in zip(total, plain.named_parameters(), strict=True):
        summed.add_(error.get(name, torch.zeros(())))
    assert sync.stats().steps == steps
    if num_batches[dist.get_rank()] == steps:  # it has seen all results
        assert gap_of(total, true_sum(plain, num_batches, divide_by_initial)) <= 1e-5
    if steps:
        assert sync.stats().compression_ratio > 1.4
        assert sum(residual.norm().item() for residual in error.values()) > 0


@pytest.mark.parametrize("divisor", ["initial size", "contributors", "initial size, model.join"])
@in_each_process(2)
def test_facts_9_every_hook_divides_as_asked(divisor: str) -> None:
    """FACTS 9: with any hook, torch's join ignores divide_by_initial_world_size=False."""
    num_batches, divide_by_initial = (1, 3), divisor != "contributors"
    plain = copy.deepcopy(new_model().module)
    true = true_sum(plain, num_batches, divide_by_initial)
    for name in (*STATELESS, "powerSGD_hook", "batched_powerSGD_hook", "post_localSGD_hook"):
        model = new_model()
        state: Any = None if name in STATELESS else hooks.PowerSGDState(None, 2, start_powerSGD_iter=0)
        if name == "post_localSGD_hook":
            state = hooks.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=100)
        model.register_comm_hook(state, getattr(hooks, name))
        is_torchs = divisor.endswith("model.join")
        total = total_in(
            model.join() if is_torchs else thinwire.join(model, divide_by_initial), model, num_batches
        )
        if isinstance(state, hooks.PowerSGDState):
            assert state.stats().compression_ratio > 1.5
            error = dict(state.state_dict()["error"])
            for summed, (parameter_name, _) in zip(total, plain.named_parameters(), strict=True):
                summed.add_(error.get(parameter_name, torch.zeros(())))
        assert dist.get_rank() == 0 or gap_of(total, true) < STATELESS.get(name, 1e-5), name


@pytest.mark.parametrize("option", ["find_unused_parameters", "gradient_as_bucket_view"])
@in_each_process(4)
def test_four_processes_end_with_the_same_model(option: str) -> None:
    for is_torchs in (True, False):
        model = new_model(**{option: True})
        before = [p.detach().clone() for p in model.parameters()]
        sync = thinwire.attach(model, POWER)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with model.join() if is_torchs else thinwire.join(model, False):
            for step in range((0, 5, 2, 3)[dist.get_rank()]):
                gradients_of(model, step, dist.get_rank())
                optimizer.step()
        after = [p.detach() for p in model.parameters()]
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert sync.stats().compression_ratio > 1.5
        assert are_alike(after)


@pytest.mark.parametrize("adapter", ["attach", "hook", "aggregator"])
@in_each_process(4)
def test_gradients_of_64_bits_are_divided_by_contributors_in_64_bits(adapter: str) -> None:
    """By three of four: 4/3 has more than 24 bits."""
    num_batches = (1, 1, 1, 0)
    plain = copy.deepcopy(new_model().module).double()
    model = DistributedDataParallel(copy.deepcopy(plain))
    aggregator = AlgorithmAggregator(plain.parameters(), AllReduce())
    if adapter == "attach":
        thinwire.attach(model, AllReduce())
    else:
        model.register_comm_hook(None, hooks.allreduce_hook)
    total = [torch.zeros_like(p) for p in plain.parameters()]
    joined: Any = aggregator if adapter == "aggregator" else model
    with thinwire.join(joined, divide_by_initial_world_size=False):
        for step in range(num_batches[dist.get_rank()]):
            if adapter == "aggregator":
                means = aggregator.aggregate(gradients_of(plain, step, dist.get_rank()))
            else:
                means = gradients_of(model, step, dist.get_rank())
            for each, mean in zip(total, means, strict=True):
                each.add_(mean)
    if dist.get_rank() == 0:
        assert gap_of(total, true_sum(plain, num_batches, divide_by_initial=False)) < 1e-14


@pytest.mark.parametrize("by_contributors", [True, False], ids=["by contributors", "by initial size"])
@in_each_process(2)
def test_without_a_hook_ddp_divides_as_asked(by_contributors: bool) -> None:
    """One batch on one process, three on the other; torch's own join goes on to divide by one."""
    model = DistributedDataParallel(nn.Linear(5, 5, bias=False))
    averages = []

    def step() -> None:
        model.zero_grad()
        model(torch.full((1, 5), 50.0)).sum().backward()
        averages.append(model.module.weight.grad.mean().item())

    with thinwire.join(model, divide_by_initial_world_size=not by_contributors):
        for _ in range(3 if dist.get_rank() else 1):
            step()
    step()
    alone = 50.0 if by_contributors else 25.0
    assert averages == [50.0] + [alone] * (2 if dist.get_rank() else 0) + [50.0]


@pytest.mark.parametrize("name", ["allreduce_hook", "built in"])
@in_each_process(2)
def test_another_hook_that_cannot_divide_as_asked_is_refused(name: str) -> None:
    model = DistributedDataParallel(nn.Linear(5, 5, bias=False))
    if name == "built in":
        model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)  # type: ignore[no-untyped-call]
    else:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with (
        pytest.raises(thinwire.ConfigError) as raised,
        thinwire.join(model, divide_by_initial_world_size=False),
    ):
        raise AssertionError("the loop must not be entered")
    averages = []
    with thinwire.join(model):
        for _ in range(3 if dist.get_rank() else 1):
            model.zero_grad()
            model(torch.full((1, 5), 50.0)).sum().backward()
            averages.append(model.module.weight.grad.mean().item())
    with thinwire.join(model, divide_by_initial_world_size=False, enable=False):
        entered = True
    assert "register one of thinwire.hooks" in str(raised.value)
    assert averages == [50.0] + ([25.0] * 2 if dist.get_rank() else [])
    assert entered


@in_each_process(2)
def test_afterwards_the_model_trains_on_as_before() -> None:
    """Torch leaves its join switched on after the context; ours ends."""
    model = new_model()
    plain = copy.deepcopy(model.module)
    thinwire.attach(model, AllReduce())
    before = list(model._forward_pre_hooks)
    with thinwire.join(model, divide_by_initial_world_size=False):
        assert list(model._forward_pre_hooks) != before
        for step in range(1 + dist.get_rank()):
            gradients_of(model, step, dist.get_rank())
    assert list(model._forward_pre_hooks) == before
    assert not model._join_config.enable
    got = gradients_of(model, 5, dist.get_rank())
    both = [gradients_of(plain, 5, process_rank) for process_rank in range(2)]
    assert gap_of(got, [(a + b) / 2 for a, b in zip(*both, strict=True)]) < 1e-6


@in_each_process(2)
def test_accumulation_inside() -> None:
    model = new_model()
    sync = thinwire.attach(model, POWER)
    with thinwire.join(model, divide_by_initial_world_size=False):
        for step in range(1 if dist.get_rank() == 0 else 3):
            with model.no_sync():
                gradients_of(model, 2 * step, dist.get_rank())
            torch.autograd.backward(model(batch_of(2 * step + 1, dist.get_rank())).square().mean())
    assert sync.stats().steps == 3
    assert sync.stats().compression_ratio > 1.4


@pytest.mark.parametrize("divide_by_initial", [True, False])
@in_each_process(2)
def test_early_termination_raises_on_all(divide_by_initial: bool) -> None:
    model = new_model()
    thinwire.attach(model, POWER)
    words = ["exhausted all inputs", "at least one rank that exhausted inputs"][dist.get_rank()]

    def train() -> None:
        with thinwire.join(model, divide_by_initial, throw_on_early_termination=True):
            for step in range(1 if dist.get_rank() == 0 else 5):
                gradients_of(model, step, dist.get_rank())

    with pytest.raises(RuntimeError, match=words):
        train()
    assert not model._join_config.enable


@in_each_process(2)
def test_what_cannot_be_joined_is_refused_at_once() -> None:
    model = new_model()
    model.module.add_module("norm", nn.SyncBatchNorm(24))  # DDP takes it at construction on GPUs only
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = thinwire.LocalSGD(model.module, optimizer, every_steps=2)
    loose = thinwire.GradientSync(Engine(AllReduce(), ProcessGroupTransport()))
    norm = r"throw_on_early_termination=True"
    cases: dict[str, Any] = {"got Linear": nn.Linear(2, 2), "not attached": loose}
    for words, joined in (*cases.items(), (norm, model), (norm, local)):
        with pytest.raises(thinwire.ThinwireError, match=words), thinwire.join(joined):
            raise AssertionError("the loop must not be entered")
    with thinwire.join(model, throw_on_early_termination=True):
        pass


def test_a_parameter_that_two_joined_models_share_is_the_outer_ones_again() -> None:
    shared, other, scales = torch.zeros(2), torch.zeros(2), [torch.tensor([2.0]), torch.tensor([3.0])]

    def scaled() -> list[float]:
        flats = [torch.ones(1) for _ in range(2)]
        for parameter, flat in zip((shared, other), flats, strict=True):
            divide_by_contributors([parameter], flat)
        return [float(flat) for flat in flats]

    with counted([shared], scales[0]):
        with counted([shared, other], scales[1]):
            assert scaled() == [3, 3]
        assert scaled() == [2, 1]
    assert scaled() == [1, 1]


@in_each_process(2)
def test_an_optimizer_that_sends_is_refused_and_torchs_join_takes_both() -> None:
    model = new_model()
    sync = thinwire.attach(model, POWER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import warns
        zero: Any = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    optimizer = zero(model.parameters(), torch.optim.SGD, lr=0.1)
    start = [p.detach().clone() for p in model.parameters()]
    with refused(ConfigError, "ZeroRedundancyOptimizer.step()", "Join([ddp_model"), thinwire.join(model):
        gradients_of(model, 0, dist.get_rank())
        optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), start, strict=True))
    with Join([model, optimizer]):
        for step in range(1 + 2 * dist.get_rank()):
            gradients_of(model, step, dist.get_rank())
            optimizer.step()
    assert are_alike(model.parameters())
    assert sync.stats().steps == 4
    assert sync.stats().compression_ratio > 1.5
