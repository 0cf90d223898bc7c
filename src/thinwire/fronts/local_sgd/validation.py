"""What can't be averaged locally is refused before anything has changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from thinwire.algorithms import Algorithm
from thinwire.channel import ProcessGroupTransport, Transport
from thinwire.checks import number, whole_count, whole_number
from thinwire.errors import AttachError, ConfigError, StateError
from thinwire.fronts.ddp_model import is_fsdp2, is_sharded
from thinwire.fronts.local_sgd.fragment import Averaged
from thinwire.fronts.local_sgd.replica import Replica
from thinwire.fronts.local_sgd.schedule import Schedule
from thinwire.sync.checksum import check_undamaged
from thinwire.sync.nonfinite import OnNonfinite, checked_on_nonfinite
from thinwire.sync.state import DTYPES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "OUTER_EXAMPLE",
    "STATE_VERSION",
    "Outer",
    "check_on_nonfinite",
    "check_outer",
    "checked_device",
    "checked_optimizer",
    "checked_state",
    "checked_streaming",
    "checked_transports",
    "described_outer",
    "held_by",
    "new_outer",
    "replica_of",
    "unwrapped",
]

Outer: TypeAlias = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

OUTER_EXAMPLE = "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"
STATE_VERSION = 3
KEYS = {"version", "step", "pending_steps", "last_average", "sync", "outer", "checksum"}
# A state of version 2 lacks them.
LATER_KEYS = {"sent_after", "in_flight"}
# Of Streaming DiLoCo (arXiv 2501.18512).
DEFAULT_MIX = 0.5


def unwrapped(model: object) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the module, and the DDP model around it if there is one.

    Raises:
        AttachError: It is sharded by FSDP1.
        ConfigError: It is no module.
    """
    # What torch.compile was given.
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        return inner.module, inner
    if not isinstance(inner, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {model!r}")
    # Its shards are of parameters that were joined end to end, so that none has a name.
    if is_sharded(inner) and not is_fsdp2(inner):
        raise AttachError(
            f"{type(inner).__name__} is sharded by FullyShardedDataParallel (FSDP1); shard it with "
            "torch.distributed.fsdp.fully_shard instead, or pass the plain module if it fits on each device"
        )
    return inner, None


def replica_of(
    module: nn.Module,
    process_group: dist.ProcessGroup | Transport | None,
    mesh: DeviceMesh | None,
    *,
    has_subgroup: bool,
) -> Replica:
    """Return what is known of this process's replica of a model.

    Args:
        module: The model, not wrapped.
        process_group: As the user gave it.
        mesh: As the user gave it.
        has_subgroup: Whether the user gave one.

    Raises:
        ConfigError: A setting does not go with this kind of model.
        AttachError: A sharded model can't be averaged, or the group is not of equal shards.
    """
    if not is_fsdp2(module):
        if mesh is not None:
            raise ConfigError(
                "mesh is for models of fully_shard; pass process_group=mesh.get_group() with this one"
            )
        return Replica(process_group)
    if has_subgroup:
        raise ConfigError(
            "subgroup does not go with a sharded model, whose replicas are its fast groups; leave it out"
        )
    # DTensors take seconds to import; with a sharded model that is done.
    made: Replica = import_module("thinwire.fronts.local_sgd.sharded_replica").ShardedReplica(
        module, process_group, mesh
    )
    return made


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


def checked_streaming(
    every_steps: int, fragments: object, delay_steps: object, mix: object
) -> tuple[int, int, float]:
    """Return the number of fragments, the delay in steps and the share that the model keeps.

    Args:
        every_steps: From one averaging of a fragment to the next.
        fragments: As the user gave it.
        delay_steps: As the user gave it.
        mix: As the user gave it.

    Raises:
        ConfigError: They are of the wrong type or out of range, or do not fit each other.
    """
    num_fragments = whole_count("fragments", fragments, minimum=1)
    delay = whole_count("delay_steps", delay_steps, minimum=0)
    if num_fragments > every_steps:
        raise ConfigError(
            f"fragments={num_fragments} is more than every_steps={every_steps}; each is averaged after a "
            "step of its own, so take at most as many"
        )
    if delay >= every_steps:
        raise ConfigError(
            f"delay_steps must be less than every_steps={every_steps}, got {delay}: a change is to be there "
            "before the next one is sent"
        )
    if mix is None:
        return num_fragments, delay, DEFAULT_MIX if delay else 0.0
    share = float(number("mix", mix, minimum=0))
    if not delay or share >= 1:
        raise ConfigError(
            "mix is the share, from 0 to below 1, that the model keeps of what it has become while an "
            f"average was on its way; got {mix!r} with delay_steps={delay}"
        )
    return num_fragments, delay, share


def check_outer(outer: object) -> None:
    """Refuse what does not make an outer optimizer.

    Raises:
        ConfigError: It is no function.
    """
    if outer is not None and not callable(outer):
        raise ConfigError(f"outer must be a function that makes an optimizer, got {outer!r}; {OUTER_EXAMPLE}")


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


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the identities of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def new_outer(
    make: Outer, parameters: list[torch.Tensor], algorithm: Algorithm, *, stacklevel: int
) -> torch.optim.Optimizer:
    """Return the outer optimizer of `parameters`; warn of a momentum that does not go with `algorithm`.

    Args:
        make: What the user gave.
        parameters: All that it must hold.
        algorithm: How the changes that it is given are averaged.
        stacklevel: Of the user's line, for the warning.

    Raises:
        ConfigError: `make` does not make an optimizer of exactly these.
    """
    outer: object = make(parameters)
    if not isinstance(outer, torch.optim.Optimizer):
        raise ConfigError(f"outer must make a torch.optim.Optimizer, got {outer!r}; {OUTER_EXAMPLE}")
    if held_by(outer) != set(map(id, parameters)):
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
            stacklevel=stacklevel,
        )
    return outer


def described_outer(outer: torch.optim.Optimizer | None) -> str:
    """Return what processes compare of an outer optimizer: its kind, and settings that are plain values."""
    if outer is None:
        return "none"
    # What else there is (functions, tensors) may print differently on every process.
    plain = {name: value for name, value in outer.defaults.items() if isinstance(value, bool | int | float)}
    return f"{type(outer).__name__}({', '.join(f'{name}={value}' for name, value in plain.items())})"


def checked_state(
    state: object, shapes: Sequence[Mapping[str, tuple[int, ...]]], *, has_outer: bool
) -> dict[str, Any]:
    """Return a state, with its true checksum, once all of it has been checked.

    Args:
        state: As the user gave it.
        shapes: Of what it must be of, by fragment and name.
        has_outer: Whether there is an outer optimizer to take its state.

    Raises:
        StateError: It is none of LocalSGD's, of another version, damaged, or of another model; or something
            was in flight, in other fragments.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError("expected a state made by LocalSGD.state_dict()")
    version = state["version"]
    if version not in (2, STATE_VERSION):
        raise StateError(
            f"the state is of version {version!r}, this Thinwire reads version {STATE_VERSION}; "
            "load it with the Thinwire that saved it"
        )
    if state.keys() != (KEYS if version == 2 else KEYS | LATER_KEYS):
        raise StateError("expected a state made by LocalSGD.state_dict()")
    # Before anything is believed of it. With the true checksum, for processes to compare what they loaded.
    checked = {**state, "checksum": check_undamaged(state)}
    step = whole_number("step", state["step"], minimum=0, error=StateError)
    pending_steps = whole_number("pending_steps", state["pending_steps"], minimum=0, error=StateError)
    # Version 2 is of before fragments: there was one, and nothing in flight.
    if version == 2:
        checked |= {"sent_after": (step - pending_steps,), "in_flight": ()}
    if state["outer"] is not None and not has_outer:
        raise StateError("the state has an outer optimizer's state; pass outer= as when it was saved")
    everywhere = {name: shape for of_one in shapes for name, shape in of_one.items()}
    _check_tensors("last_average", state["last_average"], everywhere)
    _check_flights(checked, shapes)
    return checked


def _check_flights(state: Mapping[str, Any], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """Refuse what does not say, of each fragment, when it was sent, and of some, what came back."""
    for key in LATER_KEYS:
        if not isinstance(state[key], list | tuple):
            raise StateError(f"{key} must be a tuple, got {type(state[key]).__name__}")
    for sent_after in state["sent_after"]:
        whole_number("sent_after", sent_after, minimum=-1, error=StateError)
    num_saved = len(state["sent_after"])
    if not num_saved:
        raise StateError("sent_after must hold a number for each fragment, got none")
    # What has landed is of one division of the model, and can't be applied to another's parts.
    if state["in_flight"] and num_saved != len(shapes):
        raise StateError(
            f"the state was saved while one of {num_saved} fragments was in flight, and here are "
            f"{len(shapes)}; pass fragments={num_saved}, or save after average()"
        )
    for item in state["in_flight"]:
        if not isinstance(item, list | tuple) or len(item) != 2 or item[0] not in range(num_saved):
            raise StateError("in_flight must hold pairs of a fragment's number and its mean changes")
        _check_tensors(f"in_flight of fragment {item[0]}", item[1], shapes[item[0]])


def _check_tensors(key: str, tensors: object, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if not isinstance(tensors, Mapping):
        raise StateError(f"{key} must map names to tensors, got {type(tensors).__name__}")
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
        # It would be in every process's model with the first averaging.
        if not tensor.isfinite().all():
            raise StateError(f"the state's {name} is not finite: it is damaged; load an earlier one")
