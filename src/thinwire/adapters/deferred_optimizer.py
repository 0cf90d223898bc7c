"""An optimizer that steps some parameters at a time, and modules that say when theirs are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch import nn

from thinwire.errors import StepError
from thinwire.torch_private import children_and_parameters, counted_step, note_step

ParameterDict = dict[str, nn.Parameter | None]


class DeferredOptimizer:
    """An optimizer whose `step()` was taken over: it steps some at a time, as of an earlier call."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, poison: bool) -> None:
        self.optimizer, self._poison = optimizer, poison
        self.is_deferred = False  # whether step() was called since the last backward pass
        self._before, self._step = vars(optimizer).get("step"), optimizer.step
        self._settings: list[dict[str, Any]] = []  # of each group, when step() was called
        self._values: dict[nn.Parameter, torch.Tensor] = {}  # of those that are poisoned

    def take_over(self, send: Callable[[], bool]) -> None:
        """Let the optimizer's `step()` call another function, and step later if that has sent gradients."""

        def step(optimizer: torch.optim.Optimizer, closure: object = None) -> None:
            kind = type(optimizer).__name__
            if closure is not None:
                raise StepError(f"{kind}.step(closure) can't wait; call backward(), then step()")
            # A scaler leaves unscaling to a fused optimizer, for the time of the call.
            if getattr(optimizer, "grad_scale", None) is not None:
                raise StepError(
                    f"a GradScaler steps {kind}, which can't wait; leave it out, or use thinwire.attach"
                )
            note_step(optimizer)
            if send() and not self.is_deferred:
                self._defer()

        # A method, as schedulers of learning rates expect.
        self.optimizer.step = MethodType(counted_step(step), self.optimizer)  # type: ignore[method-assign]

    def check_called(self) -> None:
        """Refuse to step parameters for which this optimizer's `step()` is still to come."""
        if not self.is_deferred:
            raise StepError(
                f"a parameter was read before {type(self.optimizer).__name__}.step() was called, and after "
                "that of another optimizer; call one right after the other"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters of the optimizer."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _defer(self) -> None:
        self.is_deferred = True
        # A copy of learning rates, and of all else that groups have now: a scheduler may fill a tensor.
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
        """Step some parameters alone, by these gradients, with the settings that groups had."""
        before = [(group, dict(group)) for group in self.optimizer.param_groups]
        gradients_before = [parameter.grad for parameter in gradients]
        try:
            for (group, _), settings in zip(before, self._settings, strict=False):  # one may be new
                group.update(settings)
                group["params"] = [parameter for parameter in group["params"] if parameter in gradients]
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
                if parameter in self._values:
                    parameter.detach().copy_(self._values.pop(parameter))
            device = next(iter(gradients)).device.type
            with torch.autocast(device, enabled=False):  # of the forward pass that reads them
                self._step()
        finally:
            for group, was in before:
                group.update(was)
            for parameter, gradient_before in zip(gradients, gradients_before, strict=True):
                parameter.grad = gradient_before

    def forget(self) -> None:
        """Drop the step that was deferred."""
        self.is_deferred = False
        for parameter, value in self._values.items():
            parameter.detach().copy_(value)
        self._values.clear()

    def give_back(self) -> None:
        """Let `step()` be the optimizer's own again."""
        del self.optimizer.step
        if self._before is not None:  # a learning rate scheduler's
            self.optimizer.step = self._before  # type: ignore[method-assign]


class ReadParameters(ParameterDict):
    """A module's parameters, which are stepped before anyone reads them."""

    # Not hooks on modules alone: attention reads the weight of a layer that it never calls, and so do tied
    # heads. `dict(…)` would copy past `items`, but for `__iter__`.

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
        """Step those that wait."""
        for parameter in super().values():
            self._step(parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied module is no longer this optimizer's.
        return dict, (dict(self.items()),)


def read_all(module: nn.Module, _: object) -> None:
    """Read all parameters of a module: a hook for one whose forward pass reads a list of its own."""
    list(children_and_parameters(module)[1].values())
