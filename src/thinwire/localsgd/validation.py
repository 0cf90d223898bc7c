"""What can't be averaged locally is refused before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.checks import shown
from thinwire.errors import ConfigError
from thinwire.localsgd.fragment import Averaged
from thinwire.localsgd.outer import held_by
from thinwire.localsgd.schedule import Schedule
from thinwire.localsgd.settings import Warmup
from thinwire.sync.settings import checked_on_nonfinite


def check_gradient_settings(schedule: Schedule, grad_scaler: GradScaler | None, warmup: Warmup) -> None:
    """Refuse settings of gradients where none are averaged, or not by all."""
    on_nonfinite = checked_on_nonfinite(warmup.on_nonfinite, grad_scaler)
    if on_nonfinite != "nan" and not schedule.has_ddp:
        raise ConfigError(
            f'on_nonfinite="{on_nonfinite}" is about gradients that a DDP model averages, and this model '
            "is a plain module, whose parameters are averaged; leave it out"
        )
    if on_nonfinite == "raise" and schedule.has_subgroup:
        raise ConfigError(
            'on_nonfinite="raise" does not go with a subgroup: processes of other subgroups would not '
            'raise; use "zero"'
        )
    if warmup.algorithm is not None and not schedule.has_ddp:
        raise ConfigError(
            f"algorithm={warmup.algorithm} averages the gradients of a DDP model in the warm-up; of this "
            "model, a plain module, the parameters are averaged; wrap it in DistributedDataParallel, or "
            "leave it out"
        )


def check_trains(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse the optimizer of a different model."""
    if not held_by(optimizer) & {id(each) for each in parameters}:
        raise ConfigError(
            "the optimizer holds none of the model's trainable parameters; build it from this model: "
            "optimizer = torch.optim.SGD(model.parameters(), …)"
        )


def checked_optimizer(
    optimizer: object, averaged: Sequence[Averaged], module: nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer whose steps are counted."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch.optim.Optimizer, got {shown(optimizer)}")
    # Wrappers may derive from Optimizer without calling its __init__.
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigError(
            f"{type(optimizer).__name__} wraps an optimizer and takes no hooks; pass the one inside it"
        )
    check_trains(optimizer, (each.tensor for each in averaged))
    # Fewer than the model's are fine: several optimizers may train it.
    foreign = len(held_by(optimizer) - {id(p) for p in module.parameters()})
    if foreign:
        raise ConfigError(
            f"the optimizer holds {foreign} parameters that are not the model's: they would never be "
            "averaged; put all that is trained into one module and pass that"
        )
    return optimizer
