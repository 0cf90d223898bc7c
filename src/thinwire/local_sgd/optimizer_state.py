"""The state of the optimizers inside, as a member that joins is given it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import Any

import torch

from thinwire.errors import StateError
from thinwire.tensors.layout import local_tensor


def as_sharded(parameter: Any, held: torch.Tensor) -> torch.Tensor:
    """Return `held`, this process's part of a tensor, sharded as a parameter is."""
    if not hasattr(parameter, "to_local"):
        return held
    # That takes seconds to import; with a sharded model it is done.
    sharded: torch.Tensor = import_module("thinwire.adapters.sharded.model").sharded_like(parameter, held)
    return sharded


def state_of_shards(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, of sharded parameters that of what this process holds."""
    state = optimizer.state_dict()
    held = {
        number: {key: local_tensor(it) if hasattr(it, "to_local") else it for key, it in of_one.items()}
        for number, of_one in state["state"].items()
    }
    return {**state, "state": held}


def _as_held(states: Mapping[Any, Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return an optimizer's state of each parameter, by number, as this process holds the parameter."""
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    held: dict[Any, Any] = dict(states)
    for number, state in states.items():
        parameter = parameters[number]
        if hasattr(parameter, "to_local"):
            shape = local_tensor(parameter).shape
            held[number] = {
                key: as_sharded(parameter, value.clone()) if getattr(value, "shape", None) == shape else value
                for key, value in state.items()
            }
    return held


def load_optimizers(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any]) -> None:
    """Let optimizers go on from a state: all of them, or none."""
    if len(states) != len(optimizers):
        raise StateError(
            f"the state is of {len(states)} optimizers, expected {len(optimizers)}; start the same script as "
            "the others"
        )
    before = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
    for optimizer, its_state in zip(optimizers, states, strict=True):
        try:
            # Loading does not look into them, and the next step would.
            if not all(isinstance(values, Mapping) for values in its_state["state"].values()):
                raise TypeError("it has a parameter's state that is no mapping")
            optimizer.load_state_dict({**its_state, "state": _as_held(its_state["state"], optimizer)})
        except Exception as error:  # optimizers raise what they like
            for restored, (state, groups) in zip(optimizers, before, strict=True):
                restored.state, restored.param_groups = state, groups
            raise StateError(
                f"the state is of a different {type(optimizer).__name__} than this member's: {error}"
            ) from error
