"""What the loss is multiplied by, so that memory can be kept in units of the unscaled loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.amp.grad_scaler import GradScaler

from thinwire.errors import ConfigError

__all__ = ["LossScale", "loss_scale_of"]

LossScale: TypeAlias = Callable[[torch.device], torch.Tensor]
"""Tells it for the step under way, as a tensor of one element on a device."""


def loss_scale_of(grad_scaler: object) -> LossScale | None:
    """What the loss is multiplied by, without reading it back from the device; None if it is not.

    Args:
        grad_scaler: A `GradScaler`, a function that returns the scale of the step under way, or None.

    Raises:
        ConfigError: It is something else; or (from the result) the function returns no positive number.
    """
    if grad_scaler is None:
        return None
    if isinstance(grad_scaler, GradScaler):
        return lambda device: grad_scaler.scale(torch.ones((), device=device))
    if not callable(grad_scaler):
        raise ConfigError(
            "grad_scaler must be a torch.amp.GradScaler, a function that returns the loss scale, or None, "
            f"got {grad_scaler!r}"
        )

    def told(device: torch.device) -> torch.Tensor:
        scale = grad_scaler()
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            return scale.detach().reshape(()).to(device, torch.float32)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise ConfigError(
                f"the function given as grad_scaler must return a number above 0, got {scale!r}"
            )
        return torch.full((), scale, device=device, dtype=torch.float32)

    return told
