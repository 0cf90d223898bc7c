"""How a sync treats its steps: what all adapters let the user choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypedDict, cast, get_args

import torch
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm
from thinwire.checks import shown
from thinwire.comm import Layout, Transport
from thinwire.errors import ConfigError
from thinwire.sync.weights import Weight, checked_weight, number_of
from thinwire.tensors import accelerators
from thinwire.tensors.accelerators import to_device_async

OnNonfinite = Literal["nan", "zero", "raise"]

HostCheck: TypeAlias = "bool | Literal['auto']"
"""Whether the host waits in each step to learn if it was healthy."""


class StepOptions(TypedDict, total=False):
    """Options of `thinwire.attach` that every other way to attach takes by name."""

    host_check: HostCheck
    on_nonfinite: OnNonfinite
    machines: Layout


def _is_enabled(grad_scaler: object) -> bool:
    """Return whether it is a `GradScaler` that scales; the methods of one that is not enabled do nothing."""
    return isinstance(grad_scaler, GradScaler) and grad_scaler.is_enabled()


def checked_on_nonfinite(on_nonfinite: object, grad_scaler: object = None) -> OnNonfinite:
    """Return a choice of `on_nonfinite`, if there is such, and it goes with what scales the loss."""
    if not isinstance(on_nonfinite, str) or on_nonfinite not in get_args(OnNonfinite):
        raise ConfigError(f'on_nonfinite must be "nan", "zero" or "raise", got {on_nonfinite!r}')
    # A scaler finds out by looking at the gradients, after all that is done here.
    if on_nonfinite != "nan" and _is_enabled(grad_scaler):
        raise ConfigError(
            f'got on_nonfinite="{on_nonfinite}" and a GradScaler, which must see gradients that are not '
            "finite to skip the step and lower its scale; leave out on_nonfinite"
        )
    return cast(OnNonfinite, on_nonfinite)


LossScale: TypeAlias = Callable[[torch.device], torch.Tensor]
"""Returns it for the step under way, as a tensor of one element on a device."""


def loss_scale_of(grad_scaler: object) -> LossScale | None:
    """Return a function of what the loss is multiplied by, for a device; None if it is not."""
    if isinstance(grad_scaler, GradScaler):
        if not _is_enabled(grad_scaler):
            return None
        # `get_scale` would read it back, and wait for the device; to scale a one does not.
        return lambda device: grad_scaler.scale(torch.ones((), device=device))
    if grad_scaler is None:
        return None
    if not callable(grad_scaler):
        raise ConfigError(
            "grad_scaler must be a torch.amp.GradScaler, a function that returns the loss scale, or None, "
            f"got {shown(grad_scaler)}"
        )

    def scale_on(device: torch.device) -> torch.Tensor:
        scale = grad_scaler()  # in each step: it may follow a schedule of the user's
        in_fp32 = torch.tensor(number_of(scale), dtype=torch.float32)
        if not 0 < in_fp32.item() < math.inf:
            raise ConfigError(
                f"the function given as grad_scaler must return a number above 0 within fp32, got {scale!r}"
            )
        return to_device_async(device, in_fp32)

    return scale_on


@dataclass(frozen=True)
class Settings:
    """How steps are treated."""

    loss_scale: LossScale | None = None
    is_skipped: bool = False  # whether a `GradScaler` leaves out steps that are not finite
    may_be_unused: bool = False
    host_check: HostCheck = True
    on_nonfinite: OnNonfinite = "nan"
    health_group: Transport | None = None  # shards of a model, which agree whether a step is healthy
    typed: Mapping[str, str] = field(default_factory=dict)
    weight: Weight | None = None  # None: all processes count alike

    def __post_init__(self) -> None:
        if self.host_check not in ("auto", True, False):
            raise ConfigError(f'host_check must be "auto", True or False, got {self.host_check!r}')
        if self.host_check != "auto":  # but NumPy's own, 1 and 0 as well
            object.__setattr__(self, "host_check", bool(self.host_check))
        checked_on_nonfinite(self.on_nonfinite)
        other = 'on_nonfinite="raise": the host can\'t raise what it does not learn'
        if self.may_be_unused:
            other = "find_unused_parameters=True: which parameters are unused is the host's to find out"
        if not self.host_check and (self.may_be_unused or self.on_nonfinite == "raise"):
            raise ConfigError(f"host_check=False does not go with {other}; leave out one of them")

    def resolved(self, algorithm: Algorithm, device: torch.device) -> Settings:
        """Return these with an "auto" resolved: by what is the same on all processes, and on all shards."""
        if self.host_check != "auto":
            return self
        # On the CPU it makes no one wait, and what the host knows it can count.
        can_do_without = algorithm.decides_on_device and accelerators.is_accelerator(device)
        needs_host = self.may_be_unused or self.on_nonfinite == "raise"
        return replace(self, host_check=needs_host or not can_do_without)

    @classmethod
    def of(
        cls,
        *,
        grad_scaler: object = None,
        host_check: HostCheck = "auto",
        on_nonfinite: OnNonfinite = "nan",
        typed: Mapping[str, str] | None = None,
        weight: object = None,
    ) -> Settings:
        """Return the settings of a user, by the arguments that adapters take; see `attach`."""
        checked_on_nonfinite(on_nonfinite, grad_scaler)
        return cls(
            loss_scale_of(grad_scaler),
            _is_enabled(grad_scaler),
            host_check=host_check,
            on_nonfinite=on_nonfinite,
            typed=typed or {},
            weight=checked_weight(weight),
        )

    def described(self) -> Mapping[str, str]:
        """Return the settings that must be the same on all processes, by subject."""
        kind = "not given" if self.weight is None else "a function" if callable(self.weight) else "a number"
        # `health_group` joins others than those that are compared.
        return {
            "loss scale": "not known" if self.loss_scale is None else "known",
            "find_unused_parameters": str(self.may_be_unused),
            "host_check": str(self.host_check),
            "on_nonfinite": self.on_nonfinite,
            "weight": kind,
        }
