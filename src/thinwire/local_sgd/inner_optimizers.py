"""The optimizers inside: refuse those that would undo or replace the averaging of models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable

from thinwire.errors import ConfigError
from thinwire.tensors.layout import local_tensor
from thinwire.torch_private import num_messages

# A copy that was just made differs from the weights by a step or a few, a momentum by about all of them.
MAX_DISTANCE = 0.3
# Prodigy's: it measures how far the weights have gone from them, and never goes back to them.
ONLY_READ = {"p0"}


def check_keeps_to_itself(optimizer: torch.optim.Optimizer, *, is_sharded: bool) -> None:
    """Refuse an optimizer whose step sends something to other processes."""
    name, inside = type(optimizer).__name__, next(_inside(optimizer), None)
    use = "the optimizer inside it" if inside is None else f"the {type(inside).__name__} inside it"
    if isinstance(optimizer, Joinable):  # ZeroRedundancyOptimizer
        raise ConfigError(
            f"{name} sends each parameter in its step from the one process that trains it; pass the "
            "optimizer that it was made of, such as torch.optim.AdamW, or average gradients with "
            "thinwire.attach"
        )
    # An optimizer of a sharded model may gather a matrix from the shards of one replica.
    held = () if is_sharded else vars(optimizer).items()
    joins = [key for key, value in held if isinstance(value, dist.ProcessGroup) or _is_mesh(value)]
    # Torch's PostLocalSGDOptimizer, Horovod and Apex have these attributes.
    joins += [key for key in ("averager", "process_set", "process_group") if _has(optimizer, key)]
    if joins:
        raise ConfigError(
            f"{name} communicates in its step (it has {joins[0]!r}), which would replace the averaging of "
            f"models; pass {use}, or average gradients with thinwire.attach"
        )


def _is_mesh(value: object) -> bool:
    return type(value).__name__ == "DeviceMesh"  # importing that takes seconds


def _has(optimizer: torch.optim.Optimizer, key: str) -> bool:
    return getattr(optimizer, key, None) is not None


@contextmanager
def silent_steps(
    optimizers: Sequence[torch.optim.Optimizer], group: dist.ProcessGroup | None
) -> Iterator[None]:
    """Refuse, in its first step while this is open, an optimizer that sends messages over a group.

    Some gather what each process has computed (Muon), and hold nothing that shows it.
    """
    counts: dict[int, int | None] = {}  # of messages before the first step, None after it

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The messages of a closure are gradients.
        if all(argument is None for argument in (*args[1:], *kwargs.values())):
            counts.setdefault(id(optimizer), num_messages(group))

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        count = counts.get(id(optimizer))
        counts[id(optimizer)] = None
        if count is not None and num_messages(group) != count:
            raise ConfigError(
                f"{type(optimizer).__name__} communicates in its step, which would replace the averaging of "
                "models; pass one that does not, such as torch.optim.Muon, or average gradients with "
                "thinwire.attach"
            )

    with ExitStack() as attached:
        for optimizer in optimizers if group is not None else ():
            attached.callback(optimizer.register_step_pre_hook(before).remove)
            attached.callback(optimizer.register_step_post_hook(after).remove)
        yield


class Kept(NamedTuple):
    """A tensor that an optimizer keeps of a parameter."""

    place: str  # such as "state['z']"
    parameter: torch.Tensor
    tensor: torch.Tensor


class CopiesOfWeights:
    """Looks for copies of the weights in what optimizers keep: they would undo an average in the next step.

    Schedule-free's z, Lookahead's slow weights, MADGRAD's x0, and fp32 weights behind a model of 16 bits.
    """

    def __init__(self) -> None:
        self._places: set[tuple[int, str, int]] = set()  # that were looked at

    def check(self, optimizers: Sequence[torch.optim.Optimizer], lasts: Mapping[int, torch.Tensor]) -> None:
        """Refuse copies of the weights, or of `lasts`, by their identity the last averages of parameters.

        Cost: of what is kept since the last call a few passes and a host synchronisation, else none.
        """
        for optimizer in optimizers:
            if type(optimizer).__module__.startswith("torch.optim"):
                continue  # those of torch keep none that they go back to
            by_place = defaultdict(list)
            for state in _kept(optimizer):
                if (id(optimizer), state.place, id(state.parameter)) not in self._places:
                    by_place[state.place].append(state)
            for place, of_one in by_place.items():
                now = _distance([(state.tensor, state.parameter) for state in of_one])
                known = [
                    (state.tensor, lasts[id(state.parameter)])
                    for state in of_one
                    if id(state.parameter) in lasts
                ]
                before = _distance(known) if known else now
                # Weights that are all zero do not tell yet: momentum begins there, too.
                if math.inf not in (now, before):
                    self._places |= {(id(optimizer), place, id(state.parameter)) for state in of_one}
                if min(now, before) < MAX_DISTANCE:
                    raise ConfigError(
                        f"{type(optimizer).__name__} keeps a copy of the weights in {place}, from which its "
                        "next step would undo the average; pass one that keeps none (of 16-bit weights: keep "
                        "the model in fp32, with torch.autocast), or use thinwire.attach"
                    )


def _distance(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return how far tensors are from weights, as a share of those; infinity if all of those are zero."""
    distance = norm = 0.0
    for tensor, weights in pairs:
        # An accelerator may have no fp64.
        held = local_tensor(tensor).reshape(-1).float()
        other = local_tensor(weights).reshape(-1).to(held.device, torch.float32)
        distance += float((held - other).square().sum())
        norm += float(other.square().sum())
    return math.sqrt(distance / norm) if norm else math.inf


def _kept(optimizer: torch.optim.Optimizer) -> Iterator[Kept]:
    """Yield all that an optimizer keeps of a parameter, in its type of numbers and its size."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    candidates: list[tuple[str, object, object]] = []
    for holder in (optimizer, *_inside(optimizer)):
        for group in holder.param_groups:
            lists = {key: value for key, value in group.items() if isinstance(value, list | tuple)}
            for key, values in lists.items():
                candidates += _paired(f"param_groups[…][{key!r}]", group["params"], values)
        for key, value in vars(holder).items():
            candidates += _keyed(key, value)
            candidates += _paired(key, parameters, _flat(value))
        masters = [parameter for group in holder.param_groups for parameter in group["params"]]
        candidates += _paired("its parameters", parameters, masters)
    for place, owner, state in candidates:
        if not isinstance(owner, torch.Tensor) or not isinstance(state, torch.Tensor):
            continue
        is_alike = state.is_floating_point() and state.numel() == owner.numel()
        if is_alike and _is_apart(state, owner) and not any(f"'{key}'" in place for key in ONLY_READ):
            yield Kept(place, owner, state)


def _is_apart(state: torch.Tensor, owner: torch.Tensor) -> bool:
    """Return whether a state has memory of its own: a view has the average when the parameter has."""
    held, other = local_tensor(state), local_tensor(owner)
    # Quantized states are of types that only their optimizers read.
    return (
        type(held) is torch.Tensor and held.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    )


def _inside(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that one wraps, from the outside in."""
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer):
            yield value
            yield from _inside(value)


def _keyed(
    place: str, value: object, owner: torch.Tensor | None = None
) -> Iterator[tuple[str, object, object]]:
    """Yield what mappings hold of a parameter that is a key of theirs."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                yield from _keyed(place, item, key)
            else:
                yield from _keyed(f"{place}[{key!r}]", item, owner)
    elif owner is not None:
        yield place, owner, value


def _flat(value: object) -> list[object]:
    """Return the values of nested lists or mappings, in order."""
    if isinstance(value, Mapping):
        return _flat(list(value.values()))
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for item in value for leaf in _flat(item)]


def _paired(
    place: str, parameters: Sequence[object], values: Sequence[object]
) -> list[tuple[str, object, object]]:
    """Return values with the parameters that they stand for, if there are as many, or one flat one of all."""
    sizes = [parameter.numel() for parameter in parameters if isinstance(parameter, torch.Tensor)]
    if len(values) == 1 and isinstance(values[0], torch.Tensor) and values[0].numel() == sum(sizes):
        values = values[0].reshape(-1).split_with_sizes(sizes)
    if len(values) != len(parameters):
        return []
    return [(place, *pair) for pair in zip(parameters, values, strict=True)]
