"""Which parameters a step has used: DDP drops the means of all others, which must be in no residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import in_each_process
from thinwire import PowerSGD, Quantize
from thinwire.algorithms import Algorithm, BatchedPowerSGD

LOW_RANK, FEW_BITS = PowerSGD(matrix_rank=1), Quantize(bits=4, error_feedback=True)


class TwoHeads(nn.Module):
    """A trunk, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32))
        self.heads = nn.ModuleList(nn.Linear(32, 24) for _ in range(2))

    def forward(self, x: Tensor, task: int) -> Tensor:
        out: Tensor = self.heads[task](self.trunk(x))
        return out


Loop = Callable[[DistributedDataParallel, int, Tensor], Iterator[Tensor]]
"""Makes the passes of a step, and yields the parameters whose gradients an optimizer applies then."""


def passed(model: DistributedDataParallel, batch: Tensor, task: int) -> None:
    scale: Any = getattr(model, "loss_scale", 1.0)
    torch.autograd.backward(model(batch, task).square().mean() * scale)


def one_pass_in_no_sync(model: DistributedDataParallel, step: int, batch: Tensor) -> Iterator[Tensor]:
    model.zero_grad()
    with model.no_sync():
        passed(model, batch, 0)
    passed(model, batch + 1, 1)
    yield from model.parameters()


def a_head_each(model: DistributedDataParallel, step: int, batch: Tensor) -> Iterator[Tensor]:
    model.zero_grad()
    passed(model, batch, dist.get_rank() % 2)
    yield from model.parameters()


def two_averaged_passes(model: DistributedDataParallel, step: int, batch: Tensor) -> Iterator[Tensor]:
    model.zero_grad()
    passed(model, batch, 0)
    passed(model, batch + 1, 1)
    yield from model.parameters()


def two_passes_in_unlike_orders(model: DistributedDataParallel, step: int, batch: Tensor) -> Iterator[Tensor]:
    first = dist.get_rank() % 2
    model.zero_grad(set_to_none=False)
    passed(model, batch, first)
    passed(model, batch + 1, 1 - first)
    yield from model.parameters()


def one_head_in_turn(model: DistributedDataParallel, step: int, batch: Tensor) -> Iterator[Tensor]:
    """Each head's optimizer zeroes the gradients of its own parameters only."""
    own = [*model.module.trunk.parameters(), *model.module.heads[step % 2].parameters()]
    for parameter in own:
        parameter.grad = None
    passed(model, batch, step % 2)
    yield from own


def toggled_heads(model: DistributedDataParallel, step: int, batch: Tensor) -> Iterator[Tensor]:
    """What another optimizer trains is frozen meanwhile; gradients are zeroed in place, each at its turn."""
    for task in range(2):
        own = [*model.module.trunk.parameters(), *model.module.heads[task].parameters()]
        model.module.heads[1 - task].requires_grad_(False)
        for parameter in own:
            if parameter.grad is not None:
                parameter.grad.zero_()
        passed(model, batch + task, task)
        yield from own
        model.module.heads[1 - task].requires_grad_(True)


def check_owed(
    algorithm: Algorithm,
    loop: Loop,
    machines: Any = False,
    min_ratio: float = 1.5,
    scale: float = 1.0,
    **options: Any,
) -> None:
    """What plain DDP applies is what Thinwire has applied, and its residual. The models stand still."""
    torch.manual_seed(0)
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.005, **options}
    plain, ours = (DistributedDataParallel(TwoHeads(), **options) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    ours.loss_scale = torch.tensor(scale)
    sync = thinwire.attach(ours, algorithm, machines=machines, grad_scaler=lambda: scale)
    names = [name for name, _ in ours.module.named_parameters()]
    applied = {
        model: [torch.zeros_like(parameter) for parameter in model.parameters()] for model in (plain, ours)
    }
    for step in range(6):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for model, totals in applied.items():
            place_of = {id(parameter): place for place, parameter in enumerate(model.parameters())}
            for parameter in loop(model, step, batch):
                assert parameter.grad is not None
                unscaled = parameter.grad / (scale if model is ours else 1.0)
                totals[place_of[id(parameter)]] += unscaled
    owed = dict(sync.state_dict()["error"])
    assert any(residual.any() for residual in owed.values())
    assert sync.stats().compression_ratio > min_ratio
    for name, exact, given in zip(names, applied[plain], applied[ours], strict=True):
        with_owed = given + owed[name] if name in owed else given
        assert (with_owed - exact).norm() <= 1e-6 * exact.norm(), name


@pytest.mark.parametrize(
    "loop",
    [
        one_pass_in_no_sync,
        a_head_each,
        two_averaged_passes,
        two_passes_in_unlike_orders,
        one_head_in_turn,
        toggled_heads,
    ],
)
@in_each_process(2)
def test_every_order_of_passes_applies_what_ddp_would(loop: Loop) -> None:
    check_owed(LOW_RANK, loop, gradient_as_bucket_view=True)
    check_owed(FEW_BITS, loop)


@in_each_process(2)
def test_it_holds_after_a_warm_up_and_where_parameters_are_mixed_and_losses_scaled() -> None:
    check_owed(PowerSGD(matrix_rank=1, warmup_steps=2), one_head_in_turn, min_ratio=1.2)
    check_owed(BatchedPowerSGD(matrix_rank=2), one_head_in_turn, scale=2.0**12)


@in_each_process(4)
def test_it_holds_on_machines_of_several_processes() -> None:
    check_owed(LOW_RANK, one_head_in_turn, machines=[[0, 1], [2, 3]])
