"""What the loss is multiplied by, so that memory can be kept in units of the unscaled loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.amp.grad_scaler import GradScaler

from thinwire.checks import shown
from thinwire.errors import ConfigError
from thinwire.tensors.accelerators import sent_to

LossScale: TypeAlias = Callable[[torch.device], torch.Tensor]
"""Returns it for the step under way, as a tensor of one element on a device."""


def loss_scale_of(grad_scaler: object) -> LossScale | None:
    """Return a function of what the loss is multiplied by, for a device; None if it is not."""
    if grad_scaler is None:
        return None
    if isinstance(grad_scaler, GradScaler):
        # `get_scale` would read it back, and wait for the device; to scale a one does not.
        return lambda device: grad_scaler.scale(torch.ones((), device=device))
    if not callable(grad_scaler):
        raise ConfigError(
            "grad_scaler must be a torch.amp.GradScaler, a function that returns the loss scale, or None, "
            f"got {shown(grad_scaler)}"
        )

    def scale_on(device: torch.device) -> torch.Tensor:
        scale = grad_scaler()  # in each step: it may follow a schedule of the user's
        words = f"the function given as grad_scaler must return a number above 0 within fp32, got {scale!r}"
        # Both would pass as numbers: float("2") is one, and so is True.
        if isinstance(scale, str | bool):
            raise ConfigError(words)
        try:
            in_fp32 = torch.tensor(float(scale), dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(words) from error
        if not 0 < in_fp32.item() < math.inf:
            raise ConfigError(words)
        return sent_to(device, in_fp32)

    return scale_on
