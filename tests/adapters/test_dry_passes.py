"""Loops that drop averaged gradients, with DDP and FSDP2: inside `sync.dry()` they leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
from adapters.test_sharded import attached, backward, runs_on_cpus, whole, wide
from processes import in_each_process
from thinwire import GradientSync, PowerSGD, Quantize
from training import are_alike, residual_of

FEW_BITS = Quantize(bits=4, error_feedback=True)


def network(*sizes: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1])


class Ledger:
    """What a model's optimizer was given, and what the true means were, while the model stands still."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.module = model.module
        self.given, self.true = torch.zeros(()), torch.zeros(())

    def note(self, loss: Tensor) -> None:
        """Note what an optimizer step applies: gradients as they are, of this loss of this process."""
        parameters = list(self.module.parameters())
        mean = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])
        dist.all_reduce(mean)
        self.true = self.true + mean / dist.get_world_size()
        self.given = self.given + torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    def gap(self, sync: GradientSync) -> float:
        """The part of the true gradients that is counted twice, or lost."""
        residual = residual_of(sync.state_dict(), self.module)
        assert residual.any()
        assert sync.stats().compression_ratio > 1.5
        return float((self.given + residual - self.true).norm() / self.true.norm())


def batches(steps: int, size: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        yield torch.randn(16, size, generator=generator)


def attached_ddp(*sizes: int) -> tuple[DistributedDataParallel, GradientSync]:
    torch.manual_seed(0)
    model = DistributedDataParallel(network(*sizes))
    return model, thinwire.attach(model, FEW_BITS)


@in_each_process(2)
def test_a_gan_of_two_ddp_models() -> None:
    (generator, _), (judge, sync) = attached_ddp(8, 32, 16), attached_ddp(16, 64, 64, 1)
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


@runs_on_cpus
@in_each_process(4)
def test_a_sharded_model() -> None:
    (model, sync), (straight, other) = (attached(PowerSGD(matrix_rank=2), wide()) for _ in range(2))
    for step in range(4):
        for trained in (model, straight):
            trained.zero_grad()
        with sync.dry():
            backward(model, 100 + step, scale=1e3)
        model.zero_grad()
        for trained in (model, straight):
            backward(trained, step)
        pairs = zip(model.parameters(), straight.parameters(), strict=True)
        assert all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs if a.grad is not None)
    assert sync.steps == other.steps == 4
    assert sync.stats().compression_ratio > 1.5
