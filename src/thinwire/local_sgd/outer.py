"""The outer optimizer: it steps the last averaged parameters, with minus their mean change as gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from thinwire.errors import ConfigError, StateError

__all__ = ["Outer", "check_outer", "new_outer"]

Outer: TypeAlias = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

EXAMPLE = "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"


def check_outer(outer: object) -> None:
    """Refuse what can't make an optimizer.

    Raises:
        ConfigError: It is neither a function nor None.
    """
    if outer is not None and (isinstance(outer, torch.optim.Optimizer) or not callable(outer)):
        raise ConfigError(f"outer must be a function that makes an optimizer, got {outer!r}; {EXAMPLE}")


def new_outer(
    make: Outer, parameters: list[torch.Tensor], saved: Mapping[str, Any] | None
) -> torch.optim.Optimizer:
    """The outer optimizer of `parameters`.

    Args:
        make: What the user gave.
        parameters: All that it must hold.
        saved: Its state, None to start anew.

    Raises:
        ConfigError: `make` does not make an optimizer of exactly these.
        StateError: The state is of another optimizer.
    """
    outer: object = make(parameters)
    if not isinstance(outer, torch.optim.Optimizer):
        raise ConfigError(f"outer must make a torch.optim.Optimizer, got {outer!r}; {EXAMPLE}")
    held = {id(p) for group in outer.param_groups for p in group["params"]}
    if held != set(map(id, parameters)):
        raise ConfigError(
            f"outer must make an optimizer of all the tensors it is given and no others; {EXAMPLE}"
        )
    if saved is not None:
        try:
            outer.load_state_dict(dict(saved))
        except ValueError as error:
            raise StateError(f"the state is of another outer optimizer: {error}") from error
    return outer
