"""Loops that drop averaged gradients, with DDP and FSDP2: inside `sync.dry()` they leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
from adapters.test_sharded import attached, backward, runs_on_cpus, whole, wide
from processes import in_each_process
from thinwire import GradientSync, PowerSGD, Quantize, hooks
from thinwire.algorithms import Algorithm
from training import are_alike

LOW_RANK, FEW_BITS = PowerSGD(matrix_rank=1), Quantize(bits=4, error_feedback=True)
MACHINES: dict[int, Any] = {2: False, 4: [[0, 1], [2, 3]]}


def network(*sizes: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1])


class Ledger:
    """What a model's optimizer was given, and what the true means were, while the model stands still."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.parameters = dict(model.module.named_parameters())
        self.given = {name: torch.zeros_like(each) for name, each in self.parameters.items()}
        self.true = {name: torch.zeros_like(each) for name, each in self.parameters.items()}

    def note(self, loss: Tensor) -> None:
        """Note what an optimizer step applies: gradients as they are, of this loss of this process."""
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        for name, gradient in zip(self.parameters, gradients, strict=True):
            mean = gradient.clone()
            dist.all_reduce(mean)
            self.true[name] += mean / dist.get_world_size()
            self.given[name] += self.parameters[name].grad

    def gap(self, sync: GradientSync) -> float:
        """The largest part of a parameter's true gradients that is counted twice, or lost."""
        owed = dict(sync.state_dict()["error"])
        assert any(error.any() for error in owed.values())
        assert sync.stats().compression_ratio > 1.5
        gaps = []
        for name, true in self.true.items():
            with_owed = self.given[name] + owed[name] if name in owed else self.given[name]
            gaps.append(float((with_owed - true).norm() / true.norm()))
        return max(gaps)


def batches(steps: int, size: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        yield torch.randn(16, size, generator=generator)


def attached_ddp(algorithm: Algorithm, *sizes: int) -> tuple[DistributedDataParallel, GradientSync]:
    torch.manual_seed(0)
    model = DistributedDataParallel(network(*sizes))
    return model, thinwire.attach(model, algorithm, machines=MACHINES[dist.get_world_size()])


@pytest.mark.parametrize("algorithm", [LOW_RANK, FEW_BITS], ids=str)
@in_each_process(2)
def test_a_gan_of_two_ddp_models(algorithm: Algorithm) -> None:
    check_gan(algorithm)


@in_each_process(4)
def test_a_gan_on_machines_of_several_processes() -> None:
    check_gan(LOW_RANK)


def check_gan(algorithm: Algorithm) -> None:
    (generator, _), (judge, sync) = attached_ddp(algorithm, 8, 32, 16), attached_ddp(algorithm, 16, 64, 64, 1)
    ledger, ones = Ledger(judge), torch.ones(16, 1)
    for noise, real in zip(batches(8, 8), batches(8, 16), strict=True):
        both = torch.cat([real + 1, generator.module(noise).detach()])

        def loss_of(network: nn.Module, both: Tensor = both) -> Tensor:
            return cross_entropy(network(both), torch.cat([ones, 0 * ones]))

        judge.zero_grad()
        torch.autograd.backward(loss_of(judge))
        ledger.note(loss_of(judge.module))
        generator.zero_grad()
        with sync.dry():
            torch.autograd.backward(cross_entropy(judge(generator(noise)), ones))
        both_models = [*generator.parameters(), *judge.parameters()]
        assert are_alike([p.grad for p in both_models if p.grad is not None])
    assert sync.steps == 8
    assert ledger.gap(sync) < 1e-6


@in_each_process(2)
def test_sharpness_aware_steps() -> None:
    """The first pass's gradient only moves the weights to where the second one's is taken."""
    model, sync = attached_ddp(FEW_BITS, 16, 48, 48, 4)
    ledger, parameters = Ledger(model), list(model.parameters())
    for batch in batches(6, 16):
        start = [p.detach().clone() for p in parameters]
        model.zero_grad()
        with sync.dry():
            model(batch).square().mean().backward()
        with torch.no_grad():
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=0.05 / float(norm))  # type: ignore[arg-type]
        model.zero_grad()
        model(batch).square().mean().backward()
        ledger.note(model.module(batch).square().mean())
        with torch.no_grad():
            for parameter, was in zip(parameters, start, strict=True):
                parameter.copy_(was)
    assert sync.steps == 6
    assert ledger.gap(sync) < 1e-6


@in_each_process(2)
def test_a_step_that_is_left_out_for_its_norm() -> None:
    model, sync = attached_ddp(LOW_RANK, 16, 48, 48, 4)
    ledger, norms = Ledger(model), []
    for step, batch in enumerate(batches(8, 16)):
        factor = 1e4 if step in (3, 5) else 1.0
        model.zero_grad()
        with sync.dry() as keep:
            (factor * model(batch).square().mean()).backward()
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]
            if norms[-1] < 100:
                ledger.note(model.module(batch).square().mean())
                keep()
    assert [step for step, norm in enumerate(norms) if norm >= 100] == [3, 5]
    assert sync.steps == 6
    assert ledger.gap(sync) < 1e-6


@in_each_process(2)
def test_the_state_of_torchs_hook() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(network(16, 48, 4))
    state = hooks.PowerSGDState(None, 1, start_powerSGD_iter=0)
    model.register_comm_hook(state, hooks.powerSGD_hook)
    ledger = Ledger(model)
    for step, batch in enumerate(batches(8, 16)):
        model.zero_grad()
        if step == 3:
            with state.sync.dry():
                (1e3 * model(batch).square().mean()).backward()
            assert state.iter == 3
        else:
            model(batch).square().mean().backward()
            ledger.note(model.module(batch).square().mean())
    assert state.iter == 7
    assert ledger.gap(state.sync) < 1e-4


@runs_on_cpus
@in_each_process(4)
def test_a_sharded_model() -> None:
    (model, sync), (straight, other) = (attached(PowerSGD(matrix_rank=2), wide()) for _ in range(2))
    for step in range(4):
        for each in (model, straight):
            each.zero_grad()
        with sync.dry():
            backward(model, 100 + step, scale=1e3)
        model.zero_grad()
        for each in (model, straight):
            backward(each, step)
        pairs = zip(model.parameters(), straight.parameters(), strict=True)
        assert all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs if a.grad is not None)
    assert sync.steps == other.steps == 4
    assert sync.stats().compression_ratio > 1.5
