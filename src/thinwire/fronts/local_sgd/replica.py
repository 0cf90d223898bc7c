"""What a process holds of its replica of the model: all of it, or (of a sharded model) a shard."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire.channel import Transport
from thinwire.sync import Engine, GradientSync

__all__ = ["Replica"]


class Replica:
    """A replica that is on one process; see `ShardedReplica` for the other kind.

    Attributes:
        replicas: The processes that meet in an averaging, or a transport; None for the default group.
        shards: Joins the processes of the replica; None where it is on one.
        is_sharded: Whether FSDP2 holds the parameters.
    """

    shards: Transport | None = None
    is_sharded = False

    def __init__(self, replicas: dist.ProcessGroup | Transport | None) -> None:
        self.replicas = replicas

    def show_shards(self) -> None:
        """Let the model's parameters be what this process holds of them, as they are between steps."""

    def alike(
        self, purpose: str, described: Callable[[], dict[str, str]], action: Callable[[], None]
    ) -> None:
        """Do something with the other replicas, and go on only if it went well for all shards.

        Args:
            purpose: What is done, for errors.
            described: What must then be the same on all shards, by subject.
            action: Collective over the replicas.

        Raises:
            AgreementError: Replicas differ, or shards do.
        """
        action()

    def sync_of(self, engine: Engine) -> GradientSync:
        """Return the handle of an engine, which saves and loads the state of the whole model."""
        return GradientSync(engine)

    def shape_of(self, name: str, held: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a whole parameter or buffer.

        Args:
            name: Its name.
            held: What this process has of it.
        """
        return tuple(held.shape)

    def whole(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name what has the shapes of whole parameters, of what this process has. Collective."""
        return dict(held)

    def own(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name this process's part of what has the shapes of whole parameters."""
        return dict(whole)

    def whole_outer(self, outer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the state of an outer optimizer, as if it had whole parameters. Collective.

        Args:
            outer: The optimizer.
            names: Of its parameters, by identity.
        """
        # A copy: an optimizer hands out its own tensors, which go on changing.
        state = copy.deepcopy(outer.state_dict())
        for name, parameter, kept in _by_parameter(outer, names, state):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    kept[key] = self.whole({name: value})[name]
        return state

    def own_outer(
        self, outer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the part of a state that `whole_outer` has returned which is of this process's shard.

        Args:
            outer: The optimizer that is to take it.
            names: Of its parameters, by identity.
            state: Of whole parameters; left as it is.
        """
        own = copy.deepcopy(dict(state))
        for name, parameter, kept in _by_parameter(outer, names, own):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.shape == self.shape_of(name, parameter):
                    kept[key] = self.own({name: value})[name]
        return own


def _by_parameter(
    outer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Return of each parameter that the state has something of: its name, itself, and what that is."""
    # A state calls parameters by their place in the optimizer's groups, one after the other.
    parameters = [parameter for group in outer.param_groups for parameter in group["params"]]
    return [
        (names[id(parameters[place])], parameters[place], kept)
        for place, kept in state["state"].items()
        if place < len(parameters)  # else it is of another optimizer, which that one refuses
    ]
