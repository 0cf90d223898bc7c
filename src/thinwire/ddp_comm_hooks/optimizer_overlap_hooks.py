"""torch's `optimizer_overlap_hooks` has no public names, and its private ones have no use here."""

from __future__ import annotations

from typing import NoReturn

from thinwire.errors import ConfigError

__all__: list[str] = []

# Underscored there, but what users of an optimizer in the backward pass import.
TORCHS = ("_OptimizerHookState", "_apply_optim_in_backward_hook", "_hook_then_optimizer")


def __getattr__(name: str) -> NoReturn:
    # Asked for, and not only missing: an AttributeError would not say what to do instead.
    if name in TORCHS:
        raise ConfigError(
            f"{name} is not offered: the means of all buckets come together, so an optimizer in the hook "
            "would overlap nothing, and take steps that are to be skipped; call it after backward()"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
