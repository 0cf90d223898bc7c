"""The inner optimizers: which are refused, what members compare, and what newcomers receive."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from thinwire.checks import shown
from thinwire.comm import ProcessGroupTransport, Transport
from thinwire.errors import ConfigError, StateError
from thinwire.local_sgd.fragment import Averaged
from thinwire.tensors.layout import local_tensor
from thinwire.torch_private import closure_not_compiled, num_messages, takes_step_hooks

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

# A fresh copy differs from the weights by a few steps, a momentum by about their whole norm.
MAX_DISTANCE = 0.3
# Prodigy's initial weights: it measures the distance from them, and never restores them.
ONLY_READ = "state['p0']"

# Settings that schedules change. Others are internal counts or estimates of some optimizers.
SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
MAX_GAP = 1e-6  # relative: the same schedule may be rounded differently

InnerSettings: TypeAlias = Mapping[str, list[float]]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, group by group, in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def checked_optimizers(
    optimizer: Optimizers, averaged: Sequence[Averaged], module: nn.Module, *, is_sharded: bool
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that train a module, in step order: the steps of the last one are counted."""
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    for inner in optimizers:
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(f"expected a torch.optim.Optimizer, got {shown(inner)}")
        _check_sends_nothing(inner, is_sharded=is_sharded)
        if not takes_step_hooks(inner):
            raise ConfigError(
                f"{type(inner).__name__} wraps an optimizer and takes no hooks; pass the wrapped optimizer"
            )
        held = set(map(id, parameters_of(inner)))
        if not held & {id(parameter.tensor) for parameter in averaged}:
            raise ConfigError(
                "the optimizer holds none of the model's trainable parameters; build it from this model: "
                "optimizer = torch.optim.SGD(model.parameters(), …)"
            )
    check_owned(optimizers, set(map(id, module.parameters())))
    if not optimizers or len(set(map(id, optimizers))) < len(optimizers):
        raise ConfigError(f"expected one optimizer or several, each once, got {list(optimizers)}")
    return optimizers


def check_owned(optimizers: Sequence[torch.optim.Optimizer], owned: set[int]) -> None:
    """Refuse parameters that are not the model's, whose parameters have these ids."""
    # Some of the model's may be missing: another optimizer may train them.
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if not owned.issuperset(map(id, group["params"])):  # in each step, so without a Python loop
                foreign = len({*map(id, group["params"])} - owned)
                raise ConfigError(
                    f"{type(optimizer).__name__}'s parameter group {number} has parameters that are not the "
                    f"model's ({foreign}), so they would never be averaged; put everything that is trained "
                    "into one module, and make the optimizer of its parameters"
                )


def _check_sends_nothing(optimizer: torch.optim.Optimizer, *, is_sharded: bool) -> None:
    # An optimizer of a sharded model may gather a matrix from the shards of one replica. (A mesh is
    # recognised by its name: its type takes seconds to import.)
    joins = [
        key
        for key, value in vars(optimizer).items()
        if not is_sharded and (isinstance(value, dist.ProcessGroup) or type(value).__name__ == "DeviceMesh")
    ]
    # Torch's PostLocalSGDOptimizer and ZeroRedundancyOptimizer, Horovod and Apex have these attributes.
    names = ("averager", "process_set", "process_group")
    joins += [key for key in names if getattr(optimizer, key, None) is not None]
    if joins:
        raise _communicates(optimizer, f" (it has {joins[0]!r})")


def _communicates(optimizer: torch.optim.Optimizer, seen: str = "") -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} communicates in its step{seen}, which would replace the averaging of "
        "models; pass an optimizer that does not, such as torch.optim.AdamW or Muon, or average gradients "
        "with thinwire.attach"
    )


def refuse_messages(
    optimizers: Sequence[torch.optim.Optimizer], transport: Transport, attached: ExitStack
) -> None:
    """Refuse an optimizer that communicates, in its first step before `attached` is closed.

    Some gather each process's results (Muon), and have no attribute that shows it.
    """
    group = transport.group if isinstance(transport, ProcessGroupTransport) else None
    counts: dict[int, int | None] = {}  # of messages before the first step, None after it

    @closure_not_compiled
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Messages from inside a closure are gradients.
        is_alone = all(argument is None for argument in (*args[1:], *kwargs.values()))
        if is_alone and counts.get(id(optimizer), 0) is not None:
            counts[id(optimizer)] = num_messages(group)

    @closure_not_compiled
    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        count = counts.get(id(optimizer))
        counts[id(optimizer)] = None
        if count is not None and num_messages(group) != count:
            raise _communicates(optimizer)

    for optimizer in optimizers if group is not None else ():
        attached.enter_context(optimizer.register_step_pre_hook(before))
        attached.enter_context(optimizer.register_step_post_hook(after))


# Copies of the weights.


def check_copies(
    optimizers: Sequence[torch.optim.Optimizer],
    lasts: Mapping[int, torch.Tensor],
    seen: set[tuple[int, str, int]],
) -> None:
    """Refuse optimizers whose states have copies of the weights: they would undo an average in the next step.

    Schedule-free's z, Lookahead's slow weights, MADGRAD's x0, and fp32 weights behind a 16-bit model; or
    copies of `lasts`, which maps a parameter's `id` to its last average. States that are none are added to
    `seen`: (optimizer, where, parameter).

    Cost: a few passes over state that is new since the last call, and a host synchronisation; else none.
    """
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("torch.optim"):
            continue  # torch's optimizers keep no copies that they restore
        new = defaultdict(list)
        for where, parameter, tensor in _states_of(optimizer):
            if (id(optimizer), where, id(parameter)) not in seen:
                new[where].append((tensor, parameter))
        for where, pairs in new.items():
            averaged = [(tensor, lasts[id(p)]) for tensor, p in pairs if id(p) in lasts]
            distances = [_distance(pairs), _distance(averaged or pairs)]
            # Weights that are all zero don't show it yet: momentum also starts at zero.
            if math.inf not in distances:
                seen |= {(id(optimizer), where, id(parameter)) for _, parameter in pairs}
            if min(distances) < MAX_DISTANCE:
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps a copy of the weights in {where}, from which its "
                    "next step would undo the average; pass an optimizer without one (for 16-bit "
                    "weights: an fp32 model with torch.autocast), or use thinwire.attach"
                )


def _distance(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the distance of tensors from weights, relative to the weights; infinity if all are zero."""
    distance = norm = 0.0
    for tensor, weights in pairs:
        # An accelerator may have no fp64.
        held = local_tensor(tensor).reshape(-1).float()
        other = local_tensor(weights).reshape(-1).to(held.device, torch.float32)
        distance += float((held - other).square().sum())
        norm += float(other.square().sum())
    return math.sqrt(distance / norm) if norm else math.inf


def _states_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each tensor of an optimizer, or of one that it wraps: (where it is kept, parameter, tensor)."""
    parameters = parameters_of(optimizer)
    candidates: list[tuple[str, Sequence[torch.Tensor], object]] = []
    for holder in with_wrapped(optimizer):
        for group in holder.param_groups:
            lists = {key: value for key, value in group.items() if isinstance(value, list | tuple)}
            candidates += [(f"param_groups[…][{key!r}]", group["params"], lists[key]) for key in lists]
        for key, value in vars(holder).items():
            candidates += [*_by_parameter(key, value), (key, parameters, value)]
        candidates.append(("its parameters", parameters, parameters_of(holder)))
    for where, owners, value in candidates:
        leaves, sizes = _leaves(value), [parameter.numel() for parameter in owners]
        first = leaves[0] if len(leaves) == 1 < len(owners) else None
        if isinstance(first, torch.Tensor) and first.numel() == sum(sizes):  # one flat tensor of all
            leaves = first.reshape(-1).split_with_sizes(sizes)
        # Assume that they belong to the parameters if there are as many.
        for parameter, tensor in zip(owners, leaves, strict=True) if len(leaves) == len(owners) else ():
            if where == ONLY_READ or not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if tensor.numel() != parameter.numel():
                continue
            held, weights = local_tensor(tensor), local_tensor(parameter)
            # A view of the parameter changes with it, and only their optimizers can read quantized states.
            if type(held) is torch.Tensor and (
                held.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr()
            ):
                yield where, parameter, tensor


def with_wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those that it wraps, from the outside in."""
    wrapped = (value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer))
    return [optimizer, *chain(*map(with_wrapped, wrapped))]


def _by_parameter(
    where: str, value: object, owner: torch.Tensor | None = None
) -> Iterator[tuple[str, Sequence[torch.Tensor], object]]:
    """Yield the values that mappings hold under a parameter."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            is_owner = isinstance(key, torch.Tensor)
            yield from _by_parameter(
                where if is_owner else f"{where}[{key!r}]", item, key if is_owner else owner
            )
    elif owner is not None:
        yield where, [owner], value


def _leaves(value: object) -> Sequence[object]:
    """Return the values of nested lists or mappings, in order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list | tuple) else [value]


# Settings that members compare, and state that a newcomer receives.


def inner_settings(optimizers: Sequence[torch.optim.Optimizer]) -> InnerSettings:
    """Return the current settings of optimizers, by the setting's name."""
    settings = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            of_group = f"{type(optimizer).__name__}{f' (group {number})' if number else ''}"
            for key in SCHEDULED:
                if key in group:
                    values = group[key] if isinstance(group[key], list | tuple) else [group[key]]
                    numbers = [float(it) for it in values if isinstance(it, int | float | torch.Tensor)]
                    settings[f"{key} of {of_group}"] = numbers
    return settings


def difference(own: InnerSettings, others: InnerSettings) -> str:
    """Describe the first setting that differs, with both values; empty if none does."""
    for name in sorted({*own, *others}, key=lambda name: not name.startswith("lr ")):
        both = own.get(name, []), others.get(name, [])
        pairs = zip(*both, strict=False)
        if len(both[0]) != len(both[1]) or not all(math.isclose(*pair, rel_tol=MAX_GAP) for pair in pairs):
            here, there = (", ".join(f"{value:.6g}" for value in values) or "not set" for values in both)
            return f"{name} is {here} on this member and {there} on the others"
    return ""


def as_sharded(parameter: Any, held: torch.Tensor) -> torch.Tensor:
    """Return `held`, this process's part of a tensor, sharded as a parameter is."""
    if not hasattr(parameter, "to_local"):
        return held
    # This takes seconds to import; a sharded model has imported it already.
    sharded: torch.Tensor = import_module("thinwire.adapters.sharded.view").sharded_like(parameter, held)
    return sharded


def load_optimizers(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any]) -> None:
    """Load states, for sharded parameters those of this process's shards, into all optimizers or none."""
    if len(states) != len(optimizers):
        raise StateError(
            f"the state has {len(states)} optimizers, expected {len(optimizers)}; start the same script as "
            "the others"
        )
    before = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
    for optimizer, state in zip(optimizers, states, strict=True):
        try:
            # Loading does not check them; the next step would fail.
            if not all(isinstance(values, Mapping) for values in state["state"].values()):
                raise TypeError("a parameter's state is not a mapping")
            parameters = parameters_of(optimizer)
            held = {number: _as_held(values, parameters[number]) for number, values in state["state"].items()}
            optimizer.load_state_dict({**state, "state": held})
        except Exception as error:  # optimizers raise all kinds of errors
            for restored, (state_before, groups) in zip(optimizers, before, strict=True):
                restored.state, restored.param_groups = state_before, groups
            raise StateError(
                f"the state can't be loaded into this member's {type(optimizer).__name__}: {error}"
            ) from error


def _as_held(values: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's state, sharded as the parameter is."""
    shape = local_tensor(parameter).shape if hasattr(parameter, "to_local") else None
    return {
        key: as_sharded(parameter, value.clone()) if getattr(value, "shape", ()) == shape else value
        for key, value in values.items()
    }
