"""What can't be averaged locally is refused before anything has changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.algorithms import Algorithm
from thinwire.channel import ProcessGroupTransport, Transport
from thinwire.checks import whole_number
from thinwire.errors import AttachError, ConfigError, StateError
from thinwire.fronts.ddp_model import is_sharded
from thinwire.fronts.local_sgd.fragment import Averaged
from thinwire.sync.checksum import check_undamaged
from thinwire.sync.state import DTYPES

__all__ = [
    "OUTER_EXAMPLE",
    "STATE_VERSION",
    "Outer",
    "checked_optimizer",
    "checked_state",
    "checked_transports",
    "new_outer",
    "unwrapped",
]

Outer: TypeAlias = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

STATE_VERSION = 2
KEYS = {"version", "step", "pending_steps", "last_average", "sync", "outer", "checksum"}
OUTER_EXAMPLE = "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"


def unwrapped(model: object) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the module, and the DDP model around it if there is one.

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
    if isinstance(group, ProcessGroupTransport) and isinstance(inner, ProcessGroupTransport):
        members, others = (set(dist.get_process_group_ranks(each.group)) for each in (group, inner))
        if others - members:
            raise ConfigError(
                f"processes {sorted(others - members)} of the subgroup are not in the process group; make "
                "subgroups of it: torch.distributed.new_subgroups(group_size=…)"
            )
    return group, inner


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
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigError(
            f"{type(optimizer).__name__} wraps an optimizer and takes no hooks; pass the one inside it"
        )
    held = _held(optimizer)
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


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def new_outer(
    make: Outer, parameters: list[torch.Tensor], saved: Mapping[str, Any] | None, algorithm: Algorithm
) -> torch.optim.Optimizer:
    """Return the outer optimizer of `parameters`; warn of a momentum that does not go with `algorithm`.

    Args:
        make: What the user gave.
        parameters: All that it must hold.
        saved: Its state, None to start anew.
        algorithm: How the changes that it is given are averaged.

    Raises:
        ConfigError: `make` does not make an optimizer of exactly these.
        StateError: The state is of another optimizer.
    """
    outer: object = make(parameters)
    if not isinstance(outer, torch.optim.Optimizer):
        raise ConfigError(f"outer must make a torch.optim.Optimizer, got {outer!r}; {OUTER_EXAMPLE}")
    if _held(outer) != set(map(id, parameters)):
        raise ConfigError(
            f"outer must make an optimizer of all the tensors it is given and no others; {OUTER_EXAMPLE}"
        )
    has_momentum = any(
        group.get("momentum", 0) or group.get("betas", (0,))[0] for group in outer.param_groups
    )
    if has_momentum and algorithm.sends_few_entries:
        warnings.warn(
            f"the outer optimizer has momentum, and {algorithm} sends an entry only now and then: momentum "
            "moves it on in all the steps in which nothing was sent of it; "
            "leave momentum out: outer=lambda parameters: torch.optim.SGD(parameters, lr=1)",
            stacklevel=3,
        )
    if saved is not None:
        try:
            outer.load_state_dict(dict(saved))
        except ValueError as error:
            raise StateError(f"the state is of another outer optimizer: {error}") from error
    return outer


def checked_state(state: object, averaged: Sequence[Averaged], *, has_outer: bool) -> dict[str, Any]:
    """Return a state, with its true checksum, once all of it has been checked.

    Args:
        state: As the user gave it.
        averaged: What it must be of.
        has_outer: Whether there is an outer optimizer to take its state.

    Raises:
        StateError: It is none of LocalSGD's, of another version, damaged, or of another model.
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
    checked = {**state, "checksum": check_undamaged(state)}
    for name in ("step", "pending_steps"):
        whole_number(name, state[name], minimum=0, error=StateError)
    if state["outer"] is not None and not has_outer:
        raise StateError("the state has an outer optimizer's state; pass outer= as when it was saved")
    _check_last_average(state["last_average"], {each.name: each.spec.shape for each in averaged})
    return checked


def _check_last_average(tensors: object, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not isinstance(tensors, Mapping):
        raise StateError(f"last_average must map names to tensors, got {type(tensors).__name__}")
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
