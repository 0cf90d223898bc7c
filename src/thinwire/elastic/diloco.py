"""`elastic.DiLoCo`: an outer Nesterov step along the mean change of whoever is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm
from thinwire.elastic.group import Group
from thinwire.elastic.local_sgd import LocalSGD
from thinwire.fronts.local_sgd.diloco import FOUR_BITS, Nesterov


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    `elastic.LocalSGD`, which it is, with the outer optimizer and the defaults of `thinwire.DiLoCo`.

    Args:
        model: As of `elastic.LocalSGD`.
        optimizer: Trains the model; or several, as of `elastic.LocalSGD`.
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
        send_optimizer: As of `elastic.LocalSGD`.
        leave_on_sigterm: As of `elastic.LocalSGD`.
        delay_steps: As of `elastic.LocalSGD`.
        warmup_steps: As of `elastic.LocalSGD`.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: A DDP or a sharded model, or one that is all frozen.
        GradientError: A parameter can't be averaged by the algorithm.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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
        send_optimizer: bool = True,
        leave_on_sigterm: bool = True,
        delay_steps: int = 0,
        warmup_steps: int = 0,
    ) -> None:
        self._outer_step = Nesterov(outer_lr, outer_momentum)
        super().__init__(
            model,
            optimizer,
            every_steps=every_steps,
            group=group,
            algorithm=algorithm,
            outer=self._new_outer,
            average_buffers=average_buffers,
            grad_scaler=grad_scaler,
            fragments=fragments,
            outer_device=outer_device,
            weigh_by=weigh_by,
            send_optimizer=send_optimizer,
            leave_on_sigterm=leave_on_sigterm,
            delay_steps=delay_steps,
            warmup_steps=warmup_steps,
        )

    def _new_outer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        lr = 1.0 if self._outer_step.lr is None else self._outer_step.lr  # else chosen at every averaging
        every_steps = self._schedule.every_steps
        return self._outer_step.optimizer(parameters, lr, every_steps, self.sync.algorithm)

    def _outer_lr_for(self, num_members: int) -> float | None:
        """As `LocalSGD._outer_lr_for`: the one given, or one by the number of members."""
        return self._outer_step.lr_for(num_members, self.sync.algorithm)
