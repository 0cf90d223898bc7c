"""What can't be averaged locally is refused before anything has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.channel.process_group import checked_group
from thinwire.checks import whole_number
from thinwire.checksum import check_undamaged
from thinwire.ddp import is_sharded
from thinwire.errors import AttachError, ConfigError, StateError
from thinwire.local_sgd.replica import Averaged
from thinwire.state import DTYPES

__all__ = [
    "Loaded",
    "checked_groups",
    "checked_optimizer",
    "checked_state",
    "unwrapped",
]

STATE_VERSION = 2
KEYS = {"version", "step", "pending_steps", "last_average", "sync", "outer", "checksum"}


def unwrapped(model: object) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The module, and the DDP model around it if there is one.

    Raises:
        AttachError: It is sharded.
        ConfigError: It is no module.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        return inner.module, inner
    if not isinstance(inner, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {model!r}")
    if is_sharded(inner):
        raise AttachError(
            f"{type(inner).__name__} is sharded by FSDP, so no process has whole parameters to average; pass "
            "the plain module if it fits on each device, without fully_shard or FullyShardedDataParallel"
        )
    return inner, None


def checked_groups(
    process_group: object, subgroup: object, model: nn.Module
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The group to average over and the subgroup within it.

    Raises:
        AttachError: This process is not a member of one, or torch.distributed is not initialised.
        ConfigError: The subgroup is not part of the group, or the group is not the DDP model's.
    """
    group = checked_group(process_group)
    if isinstance(model, DistributedDataParallel):
        if process_group is not None and group is not model.process_group:
            raise ConfigError(
                "process_group is not that of the DDP model; leave it out, or build both with the same one"
            )
        group = model.process_group
    if subgroup is None:
        return group, None
    inner = checked_group(subgroup)
    outside = set(dist.get_process_group_ranks(inner)) - set(dist.get_process_group_ranks(group))
    if outside:
        raise ConfigError(
            f"processes {sorted(outside)} of the subgroup are not in the process group; make subgroups of "
            "it: torch.distributed.new_subgroups(group_size=…)"
        )
    return group, inner


def checked_optimizer(
    optimizer: object, averaged: Sequence[Averaged], module: nn.Module
) -> torch.optim.Optimizer:
    """The optimizer whose steps are counted.

    Raises:
        ConfigError: It is none, wraps another one, or does not train this model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"expected a torch.optim.Optimizer, got {optimizer!r}")
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigError(
            f"{type(optimizer).__name__} wraps an optimizer and takes no hooks; pass the one inside it"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held & {id(each.tensor) for each in averaged}:
        raise ConfigError(
            "the optimizer holds none of the model's trainable parameters; build it from this model: "
            "optimizer = torch.optim.SGD(model.parameters(), …)"
        )
    foreign = len(held - {id(p) for p in module.parameters()})
    if foreign:
        raise ConfigError(
            f"the optimizer holds {foreign} parameters that are not the model's: they would never be "
            "averaged; put all that is trained into one module and pass that"
        )
    return optimizer


class Loaded(NamedTuple):
    """A state that has been checked."""

    step: int
    pending_steps: int
    last_average: Mapping[str, torch.Tensor]
    sync: Mapping[str, Any]
    outer: Mapping[str, Any] | None
    checksum: str


def checked_state(state: object, averaged: Sequence[Averaged], *, has_outer: bool) -> Loaded:
    """Check a state whole before any of it is used.

    Raises:
        StateError: It is none of LocalSGD's, of another version, or of another model.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError("expected a state made by LocalSGD.state_dict()")
    if state["version"] != STATE_VERSION:
        raise StateError(
            f"the state is of version {state['version']!r}, this Thinwire reads version {STATE_VERSION}; "
            "load it with the Thinwire that saved it"
        )
    if state.keys() != KEYS:
        raise StateError("expected a state made by LocalSGD.state_dict()")
    settings = {field: state[field] for field in Loaded._fields if field != "checksum"}
    loaded = Loaded(**settings, checksum=check_undamaged(state))
    for name, value in (("step", loaded.step), ("pending_steps", loaded.pending_steps)):
        whole_number(name, value, least=0, error=StateError)
    if loaded.outer is not None and not has_outer:
        raise StateError("the state has an outer optimizer's state; pass outer= as when it was saved")
    _check_tensors(loaded.last_average, averaged)
    return loaded


def _check_tensors(tensors: object, averaged: Sequence[Averaged]) -> None:
    if not isinstance(tensors, Mapping):
        raise StateError(f"last_average must map names to tensors, got {type(tensors).__name__}")
    shapes = {each.name: each.spec.shape for each in averaged}
    differing = sorted(map(str, shapes.keys() ^ tensors.keys()))
    if differing:
        raise StateError(
            f"the state and the model differ in {differing[:4]}; load the state of the same model, with the "
            "same average_buffers="
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shapes[name]:
            raise StateError(
                f"the state's {name} is not a tensor of shape {shapes[name]}, as the model's is; "
                "load the state of the same model"
            )
        if tensor.dtype not in DTYPES:
            raise StateError(f"the state's {name} is of {tensor.dtype}; load a state as state_dict() made it")
        if not tensor.isfinite().all():
            raise StateError(f"the state's {name} is not finite: it is damaged; load an earlier one")
