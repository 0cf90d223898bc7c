"""What can't be averaged locally is refused before anything has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from thinwire.channel import ProcessGroupTransport, Transport
from thinwire.errors import ConfigError
from thinwire.fronts.local_sgd.averaged import Averaged
from thinwire.fronts.local_sgd.outer import held_by
from thinwire.fronts.local_sgd.schedule import Schedule
from thinwire.sync.nonfinite import OnNonfinite, checked_on_nonfinite

__all__ = [
    "check_on_nonfinite",
    "check_warmup",
    "checked_device",
    "checked_optimizer",
    "checked_transports",
]


def checked_transports(
    process_group: object, subgroup: object, ddp: DistributedDataParallel | None, device: torch.device
) -> tuple[Transport, Transport | None]:
    """Return what carries messages over the group, and within the subgroup if there is one.

    Args:
        process_group: As the user gave it, or a transport.
        subgroup: As the user gave it, or a transport.
        ddp: The DDP model, whose group it must be.
        device: Of what is averaged.

    Raises:
        AttachError: This process is not a member of one, or torch.distributed is not initialised.
        ConfigError: The subgroup is not part of the group, or the group is not the DDP model's.
    """

    def transport_of(given: Any) -> Transport:
        return given if isinstance(given, Transport) else ProcessGroupTransport(given, device)

    group = transport_of(ddp.process_group if ddp is not None and process_group is None else process_group)
    if ddp is not None and getattr(group, "group", None) is not ddp.process_group:
        raise ConfigError(
            "process_group is not that of the DDP model; leave it out, or build both with the same one"
        )
    inner = None if subgroup is None else transport_of(subgroup)
    # Of other transports nobody knows who is at their ends.
    if isinstance(group, ProcessGroupTransport) and isinstance(inner, ProcessGroupTransport):
        members, others = (set(dist.get_process_group_ranks(each.group)) for each in (group, inner))
        if others - members:
            raise ConfigError(
                f"processes {sorted(others - members)} of the subgroup are not in the process group; make "
                "subgroups of it: torch.distributed.new_subgroups(group_size=…)"
            )
    return group, inner


def checked_device(outer_device: Any) -> torch.device | None:
    """Return where last averages are kept; None for where the model is.

    Raises:
        ConfigError: It is no device.
    """
    try:
        return None if outer_device is None else torch.device(outer_device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f'outer_device must be a device such as "cpu", or None, got {outer_device!r}'
        ) from error


def check_on_nonfinite(on_nonfinite: OnNonfinite, grad_scaler: GradScaler | None, schedule: Schedule) -> None:
    """Refuse what is to become of gradients where none are averaged, or not by all.

    Args:
        on_nonfinite: As the user gave it.
        grad_scaler: The scaler, if there is one.
        schedule: What is averaged over whom.

    Raises:
        ConfigError: It is no choice, or not one with this model, scaler or subgroup.
    """
    if checked_on_nonfinite(on_nonfinite, grad_scaler) != "nan" and not schedule.has_ddp:
        raise ConfigError(
            f'on_nonfinite="{on_nonfinite}" is about gradients that a DDP model averages, and this model '
            "is a plain module, whose parameters are averaged; leave it out"
        )
    if on_nonfinite == "raise" and schedule.has_subgroup:
        raise ConfigError(
            'on_nonfinite="raise" does not go with a subgroup: processes of other subgroups would not '
            'raise; use "zero"'
        )


def check_warmup(warmup_algorithm: object, schedule: Schedule) -> None:
    """Refuse an algorithm of the warm-up where none averages gradients.

    Args:
        warmup_algorithm: As the user gave it.
        schedule: What is averaged over whom.

    Raises:
        ConfigError: There is no warm-up, or it does not average gradients.
    """
    if warmup_algorithm is None:
        return
    given = f"warmup_algorithm={warmup_algorithm}"
    if not schedule.warmup_steps:
        raise ConfigError(
            f"{given} is for the warm-up, and warmup_steps is 0; say how many steps it has, or leave it out"
        )
    if not schedule.has_ddp:
        raise ConfigError(
            f"{given} averages the gradients of a DDP model in the warm-up; of this model, a plain module, "
            "the parameters are averaged; wrap it in DistributedDataParallel, or leave it out"
        )


def checked_optimizer(
    optimizer: object, averaged: Sequence[Averaged], module: nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer whose steps are counted.

    Args:
        optimizer: As the user gave it.
        averaged: Of which it must hold some.
        module: To which all that it holds must belong.

    Raises:
        ConfigError: It is none, wraps another one, or does not train this model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch.optim.Optimizer, got {optimizer!r}")
    # Wrappers may derive from Optimizer without calling its __init__.
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigError(
            f"{type(optimizer).__name__} wraps an optimizer and takes no hooks; pass the one inside it"
        )
    held = held_by(optimizer)
    if not held & {id(each.tensor) for each in averaged}:
        raise ConfigError(
            "the optimizer holds none of the model's trainable parameters; build it from this model: "
            "optimizer = torch.optim.SGD(model.parameters(), …)"
        )
    # Fewer than the model's are fine: several optimizers may train it.
    foreign = len(held - {id(p) for p in module.parameters()})
    if foreign:
        raise ConfigError(
            f"the optimizer holds {foreign} parameters that are not the model's: they would never be "
            "averaged; put all that is trained into one module and pass that"
        )
    return optimizer
