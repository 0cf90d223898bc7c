"""The settings of a sync's steps, which all adapters let the user choose."""

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
"""Whether the host waits in each step to learn whether it was healthy."""


class StepOptions(TypedDict, total=False):
    """Options of `thinwire.attach` that all other ways to attach take by name."""

    host_check: HostCheck
    on_nonfinite: OnNonfinite
    machines: Layout


def _is_enabled(grad_scaler: object) -> bool:
    """Return whether it is an enabled `GradScaler`; the methods of a disabled one do nothing."""
    return isinstance(grad_scaler, GradScaler) and grad_scaler.is_enabled()


def checked_scaler(grad_scaler: object) -> GradScaler | None:
    """Return the scaler, or None; raise for anything else."""
    if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
        raise ConfigError(f"grad_scaler must be a torch.amp.GradScaler or None, got {shown(grad_scaler)}")
    return grad_scaler


def checked_on_nonfinite(on_nonfinite: object, grad_scaler: object = None) -> OnNonfinite:
    """Return `on_nonfinite`; raise if it is not a choice, or conflicts with the loss scaler."""
    if not isinstance(on_nonfinite, str) or on_nonfinite not in get_args(OnNonfinite):
        raise ConfigError(f'on_nonfinite must be "nan", "zero" or "raise", got {on_nonfinite!r}')
    # A scaler finds out from the gradients: zeros or an error would hide the overflow from it.
    if on_nonfinite != "nan" and _is_enabled(grad_scaler):
        raise ConfigError(
            f'got on_nonfinite="{on_nonfinite}" and a GradScaler, which must see gradients that are not '
            "finite to skip the step and lower its scale; leave out on_nonfinite"
        )
    return cast(OnNonfinite, on_nonfinite)


LossScale: TypeAlias = Callable[[torch.device], torch.Tensor]
"""Returns the current step's loss scale, as a tensor of one element on a device."""


def loss_scale_of(grad_scaler: object) -> LossScale | None:
    """Return a function that returns the loss scale on a device; None if there is no scale."""
    if isinstance(grad_scaler, GradScaler):
        if not _is_enabled(grad_scaler):
            return None
        # `get_scale` would read it back and wait for the device; scaling a one does not.
        return lambda device: grad_scaler.scale(torch.ones((), device=device))
    if grad_scaler is None:
        return None
    if not callable(grad_scaler):
        raise ConfigError(
            "grad_scaler must be a torch.amp.GradScaler, a function that returns the loss scale, or None, "
            f"got {shown(grad_scaler)}"
        )

    def scale_on(device: torch.device) -> torch.Tensor:
        scale = grad_scaler()  # in each step: it may follow the user's schedule
        in_fp32 = torch.tensor(number_of(scale), dtype=torch.float32, device="cpu")
        if not 0 < in_fp32.item() < math.inf:
            raise ConfigError(
                f"the function given as grad_scaler must return a number above 0 within fp32, got {scale!r}"
            )
        return to_device_async(device, in_fp32)

    return scale_on


@dataclass(frozen=True)
class Settings:
    """The settings of a sync's steps."""

    loss_scale: LossScale | None = None
    scaler_skips: bool = False  # whether a `GradScaler` skips steps that are not finite
    may_be_unused: bool = False
    host_check: HostCheck = True
    on_nonfinite: OnNonfinite = "nan"
    health_group: Transport | None = None  # a model's shards, if several: all agree if a step is healthy
    # The names by which the user gave the algorithm's settings, by ours: errors show them.
    names_given: Mapping[str, str] = field(default_factory=dict)
    weight: Weight | None = None  # None: all processes count the same
    of_adapter: Mapping[str, str] = field(default_factory=dict)  # the adapter's own, by subject

    def __post_init__(self) -> None:
        if self.host_check not in ("auto", True, False):
            raise ConfigError(f'host_check must be "auto", True or False, got {self.host_check!r}')
        if self.host_check != "auto":  # NumPy's bools, 1 and 0 are accepted, too
            object.__setattr__(self, "host_check", bool(self.host_check))
        checked_on_nonfinite(self.on_nonfinite)
        if self.health_group is not None and self.health_group.size == 1:
            object.__setattr__(self, "health_group", None)
        other = 'on_nonfinite="raise": the host can\'t raise an error that it does not see'
        if self.may_be_unused:
            other = "find_unused_parameters=True: the host must find out which parameters are unused"
        if not self.host_check and (self.may_be_unused or self.on_nonfinite == "raise"):
            raise ConfigError(f"host_check=False can't be combined with {other}; leave out one of them")

    def resolved(self, algorithm: Algorithm, device: torch.device) -> Settings:
        """Return these with "auto" resolved, from facts that are the same on all processes and shards."""
        if self.host_check != "auto":
            return self
        # On the CPU the check costs no wait, and the host can count such steps.
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
        names_given: Mapping[str, str] | None = None,
        weight: object = None,
    ) -> Settings:
        """Return the settings from the user's arguments of an adapter; see `attach`."""
        checked_on_nonfinite(on_nonfinite, grad_scaler)
        return cls(
            loss_scale_of(grad_scaler),
            _is_enabled(grad_scaler),
            host_check=host_check,
            on_nonfinite=on_nonfinite,
            names_given=names_given or {},
            weight=checked_weight(weight),
        )

    def described(self) -> Mapping[str, str]:
        """Return the settings that must be the same on all processes, by subject."""
        # `health_group` is left out: it connects other processes than those compared.
        described = {
            "find_unused_parameters": str(self.may_be_unused),
            "host_check": str(self.host_check),
            "on_nonfinite": self.on_nonfinite,
            **self.of_adapter,
        }
        if self.loss_scale is not None:
            described["grad_scaler"] = "set"
        if self.weight is not None:
            described["weight"] = "set by a function" if callable(self.weight) else "set to a number"
        return described
