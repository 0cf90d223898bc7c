"""Loops that drop averaged gradients, with DDP and FSDP2: inside `sync.dry()` they leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from adapters.test_sharded import attached, backward, runs_on_cpus, whole, wide
from processes import in_each_process
from thinwire import GradientSync, PowerSGD, TopK
from training import are_alike, ddp_of, gradient_of


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


def check_no_trace(start: Callable[[], tuple[Any, GradientSync]], make_pass: Callable[..., object]) -> None:
    """Compare a model that also makes dry passes, as of a GAN's generator, with one that makes none."""
    (model, sync), (straight, other) = start(), start()
    for step in range(4):
        with sync.dry():
            make_pass(model, 100 + step)
        assert are_alike(gradients_of(model))
        means = []
        for trained in (model, straight):
            trained.zero_grad()
            make_pass(trained, step)
            means.append(gradients_of(trained))
            trained.zero_grad()
        assert all(map(torch.equal, *means))
    assert sync.steps == other.steps == 4
    assert sync.stats().compression_ratio > 1.5


@in_each_process(2)
def test_a_ddp_model() -> None:
    def start() -> tuple[Any, GradientSync]:
        model = ddp_of()
        return model, thinwire.attach(model, TopK(density=1 / 20, chunk=100))

    check_no_trace(start, gradient_of)


@runs_on_cpus
@in_each_process(4)
def test_a_sharded_model() -> None:
    check_no_trace(lambda: attached(PowerSGD(matrix_rank=2), wide()), backward)
