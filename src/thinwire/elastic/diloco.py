"""`elastic.DiLoCo`: an outer Nesterov step along the mean change of whoever is there."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm
from thinwire.checks import number
from thinwire.elastic.group import Group
from thinwire.elastic.local_sgd import LocalSGD
from thinwire.errors import ConfigError
from thinwire.fronts.local_sgd.diloco import FOUR_BITS, default_outer_lr, default_outer_momentum

__all__ = ["DiLoCo"]


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    `elastic.LocalSGD`, which it is, with the outer optimizer and the defaults of `thinwire.DiLoCo`.

    Args:
        model: As of `elastic.LocalSGD`.
        optimizer: Trains the model (AdamW, Muon).
        every_steps: Steps from one averaging of a parameter to the next.
        group: Who is there; None for `TorchftGroup()`.
        algorithm: How the changes become their mean over the group.
        outer_lr: Learning rate of the outer optimizer; None to choose it at every averaging by the number of
            members, as `thinwire.DiLoCo` does.
        outer_momentum: Its momentum; None to choose as `thinwire.DiLoCo` does.
        outer_device: As of `elastic.LocalSGD`.
        fragments: As of `elastic.LocalSGD`.
        average_buffers: As of `elastic.LocalSGD`.
        grad_scaler: As of `elastic.LocalSGD`.
        weigh_by: As of `elastic.LocalSGD`.
        leave_on_sigterm: As of `elastic.LocalSGD`.
        delay_steps: As of `elastic.LocalSGD`.
        warmup_steps: As of `elastic.LocalSGD`.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: A DDP or a sharded model.
        GradientError: A parameter can't be averaged by the algorithm.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every_steps: int = 30,
        group: Group | None = None,
        algorithm: Algorithm = FOUR_BITS,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer_device: torch.device | str | None = None,
        fragments: int = 1,
        average_buffers: bool = True,
        grad_scaler: GradScaler | None = None,
        weigh_by: Literal["steps", "work"] = "steps",
        leave_on_sigterm: bool = True,
        delay_steps: int = 0,
        warmup_steps: int = 0,
    ) -> None:
        self._outer_lr = None if outer_lr is None else float(number("outer_lr", outer_lr, minimum=0))
        if outer_momentum is not None and not 0 <= number("outer_momentum", outer_momentum, minimum=0) < 1:
            raise ConfigError(f"outer_momentum must be from 0 to below 1, got {outer_momentum!r}")
        self._outer_momentum = outer_momentum
        super().__init__(
            model,
            optimizer,
            every_steps=every_steps,
            group=group,
            algorithm=algorithm,
            outer=self._nesterov,
            average_buffers=average_buffers,
            grad_scaler=grad_scaler,
            fragments=fragments,
            outer_device=outer_device,
            weigh_by=weigh_by,
            leave_on_sigterm=leave_on_sigterm,
            delay_steps=delay_steps,
            warmup_steps=warmup_steps,
        )

    def _nesterov(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        momentum = self._outer_momentum
        if momentum is None:
            is_sparse = self.sync.algorithm.sends_few_entries
            momentum = 0.0 if is_sparse else default_outer_momentum(self._schedule.every_steps)
        lr = 1.0 if self._outer_lr is None else self._outer_lr  # else chosen at every averaging
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def _outer_lr_for(self, num_members: int) -> float | None:
        """As `LocalSGD._outer_lr_for`: with few entries error feedback takes the place of momentum."""
        if self._outer_lr is not None:
            return self._outer_lr
        return default_outer_lr(num_members, is_sparse=self.sync.algorithm.sends_few_entries)
