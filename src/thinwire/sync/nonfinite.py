"""What becomes of a step whose mean gradients are not finite."""

from __future__ import annotations

from typing import Literal, cast, get_args

from torch.amp.grad_scaler import GradScaler

from thinwire.errors import ConfigError

OnNonfinite = Literal["nan", "zero", "raise"]


def checked_on_nonfinite(on_nonfinite: object, grad_scaler: object = None) -> OnNonfinite:
    """Return a choice of `on_nonfinite`, if there is such, and it goes with what scales the loss."""
    if not isinstance(on_nonfinite, str) or on_nonfinite not in get_args(OnNonfinite):
        raise ConfigError(f'on_nonfinite must be "nan", "zero" or "raise", got {on_nonfinite!r}')
    # A scaler finds out by looking at the gradients, after all that is done here.
    if on_nonfinite != "nan" and isinstance(grad_scaler, GradScaler) and grad_scaler.is_enabled():
        raise ConfigError(
            f'got on_nonfinite="{on_nonfinite}" and a GradScaler, which must see gradients that are not '
            "finite to skip the step and lower its scale; leave out on_nonfinite"
        )
    return cast(OnNonfinite, on_nonfinite)
