"""Overflows leave no trace through Lightning and Accelerate either: as `sync/test_overflow.py`.

The runs have different loss scales, so equal errors are in units of the unscaled loss (FACTS 4).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch.plugins.precision.amp import MixedPrecision
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from accelerated import several_processes
from integrations.test_accelerate import new_handler
from integrations.test_lightning import Regression, fit
from pool import in_each_process
from sync.test_nonfinite import loss_of, new_model
from sync.test_overflow import HUGE, POWER, STEPS, Trained, assert_the_same, overflows, trained_by
from thinwire.integrations.lightning import ThinwireStrategy

OVERFLOWING = {1: 1, 2: 0, 4: 1}  # batches, and the process on which each overflows


class Overflowing(Regression):
    """Overflows in some batches on one process."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = super().training_step(batch)
        return loss * HUGE if OVERFLOWING.get(batch_idx) == self.global_rank else loss


@in_each_process(2)
def test_overflows_leave_no_trace_in_lightning(tmp_path: Path) -> None:
    every = torch.randn(6, 8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    kept = every[[number for number in range(6) if number not in OVERFLOWING]]
    disturbed = _lightning(tmp_path, 2.0**14, every, Overflowing)
    healthy = _lightning(tmp_path, 1.0, kept, Regression)
    assert_the_same(disturbed, healthy, skipped=3)
    assert (disturbed.scales, healthy.scales) == ([2.0**11], [1.0])


def _lightning(folder: Path, scale: float, rows: Tensor, model: type[Regression]) -> Trained:
    strategy, scaler = ThinwireStrategy(POWER), GradScaler("cpu", init_scale=scale)
    _, trained = fit(
        strategy,
        folder,
        epochs=1,
        plugins=[WithScaler(scaler)],
        model=model,
        data=DataLoader(rows.flatten(0, 1), batch_size=8),  # type: ignore[arg-type]
        use_distributed_sampler=False,
    )
    return trained_by(strategy.sync, trained, [scaler.get_scale()])


class WithScaler(MixedPrecision):
    """Loss scaling without 16-bit arithmetic, so that results can be compared to the bit."""

    def __init__(self, scaler: GradScaler) -> None:
        super().__init__("16-mixed", "cpu", scaler)

    def autocast_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)


@in_each_process(2)
def test_overflows_leave_no_trace_in_accelerate() -> None:
    scalers = [GradScaler("cpu", init_scale=2.0**14), GradScaler("cpu", init_scale=1.0)]
    disturbed, healthy = _accelerate(scalers[0], overflows(2)), _accelerate(scalers[1], {})
    assert_the_same(disturbed, healthy, skipped=5)


def _accelerate(scaler: GradScaler, overflowing: dict[int, int]) -> Trained:
    with several_processes():
        handler = new_handler()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        accelerator.scaler = scaler  # on CPUs Accelerate makes none of its own
        plain = new_model()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.05))

        def step(loss: Tensor) -> None:
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        for number in range(STEPS):
            if number in overflowing:
                loss = loss_of(model, 77 + number)
                step(loss * HUGE if overflowing[number] == dist.get_rank() else loss)
            step(loss_of(model, number))
        return trained_by(handler.sync, model, [scaler.get_scale()])
