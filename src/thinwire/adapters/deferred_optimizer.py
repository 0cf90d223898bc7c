"""An optimizer that steps some parameters at a time, and modules that intercept reads of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from thinwire.errors import StepError
from thinwire.torch_private import (
    children_and_parameters,
    closure_not_compiled,
    counted_step,
    has_step_hooks,
    makes_state,
    note_step,
    put_parameters,
)

ParameterDict = dict[str, nn.Parameter | None]


def why_whole(optimizer: torch.optim.Optimizer) -> str:
    """Return why a step can't be split: its hooks would run for each part; "" if it can."""
    if not has_step_hooks(optimizer):
        return ""
    return (
        f"{type(optimizer).__name__} has step hooks, and overlap_forward splits each step into several; "
        "remove the hooks, and leave out LocalSGD and DiLoCo, which add some"
    )


class DeferredOptimizer:
    """An optimizer whose `step()` is replaced: it steps some parameters at a time, for an earlier call."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, poison: bool) -> None:
        self.optimizer, self._poison = optimizer, poison
        self.is_deferred = False  # whether step() was called since the last backward pass
        self._step = optimizer.step
        self._settings: list[dict[str, Any]] = []  # each group's, copied when step() was called
        self._values: dict[nn.Parameter, torch.Tensor] = {}  # the values behind poisoned parameters

    def replaced_step(self, send: Callable[[], bool]) -> AbstractContextManager[object]:
        """Return a context in which `step()` calls `send`, and steps later if that has sent gradients."""

        def step(optimizer: torch.optim.Optimizer, *given: object, **options: object) -> None:
            kind, closure = type(optimizer).__name__, [*given, *options.values()]
            if why := why_whole(optimizer):  # hooks may be new
                raise StepError(why)
            if makes_state(optimizer, options):
                self._step()
                return
            if closure not in ([], [None]):
                raise StepError(f"{kind}.step(closure) can't be deferred; call backward(), then step()")
            # A scaler makes a fused optimizer unscale during the call.
            if getattr(optimizer, "grad_scale", None) is not None:
                raise StepError(
                    f"a GradScaler steps {kind}, and such a step can't be deferred; train without "
                    "GradScaler, or use thinwire.attach"
                )
            note_step(optimizer)
            if send() and not self.is_deferred:
                self._defer()

        # A bound method, as learning-rate schedulers expect.
        replacement = MethodType(counted_step(closure_not_compiled(step)), self.optimizer)
        return patch.object(self.optimizer, "step", replacement)

    def check_called(self) -> None:
        """Raise if this optimizer's `step()` was not called yet."""
        if not self.is_deferred:
            raise StepError(
                "a parameter was read after another optimizer's step, but before "
                f"{type(self.optimizer).__name__}.step(); step all optimizers one right after the other"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters of the optimizer."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _defer(self) -> None:
        self.is_deferred = True
        # A deep copy of learning rates and all other settings: a scheduler may write to a tensor in place.
        self._settings = [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        for parameter in self.parameters():
            if not self._poison or not parameter.requires_grad:
                continue
            self._values[parameter] = parameter.detach().clone()
            parameter.detach().fill_(torch.nan)

    def step(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Step only some parameters, with these gradients and the settings at the call of `step()`."""
        before = [(group, dict(group)) for group in self.optimizer.param_groups]
        gradients_before = [parameter.grad for parameter in gradients]
        try:
            for (group, _), settings in zip(before, self._settings, strict=False):  # a group may be new
                group.update(settings)
                group["params"] = [parameter for parameter in group["params"] if parameter in gradients]
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
                if parameter in self._values:
                    parameter.detach().copy_(self._values.pop(parameter))
            device = next(iter(gradients)).device.type
            with torch.autocast(device, enabled=False):  # the forward pass that reads them may have it on
                self._step()
        finally:
            for group, was in before:
                group.update(was)
            for parameter, gradient_before in zip(gradients, gradients_before, strict=True):
                parameter.grad = gradient_before

    def forget(self) -> None:
        """Drop the deferred step."""
        self.is_deferred = False
        for parameter, value in self._values.items():
            parameter.detach().copy_(value)
        self._values.clear()


class ReadParameters(ParameterDict):
    """A module's parameters, which are stepped before they are read."""

    # Module hooks are not enough: attention reads the weight of a layer that it never calls, and so do tied
    # heads. Without `__iter__`, `dict(…)` would copy without calling `items`.

    def __init__(self, parameters: ParameterDict, step: Any) -> None:
        super().__init__(parameters)
        self._step = step

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self._step(super().__getitem__(name))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._step(super().get(name))
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def items(self) -> Any:
        self.step_all()
        return super().items()

    def values(self) -> Any:
        self.step_all()
        return super().values()

    def step_all(self) -> None:
        """Step all pending parameters."""
        for parameter in super().values():
            self._step(parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied module does not belong to this optimizer.
        return dict, (dict(self.items()),)


def forget_reads(module: nn.Module) -> None:
    """Let a module read its parameters as before `ReadParameters`."""
    put_parameters(module, dict(children_and_parameters(module)[1]))


def read_all(module: nn.Module, _: object) -> None:
    """Read all parameters of a module: a hook for modules whose forward pass reads their own list."""
    list(children_and_parameters(module)[1].values())
