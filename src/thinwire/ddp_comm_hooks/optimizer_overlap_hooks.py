"""torch's `optimizer_overlap_hooks` has no public names, and its private ones have no use here."""

from __future__ import annotations

from typing import NoReturn

from thinwire.errors import ConfigError

__all__: list[str] = []

# torch underscores them, but users of an optimizer in the backward pass import them.
TORCHS = ("_OptimizerHookState", "_apply_optim_in_backward_hook", "_hook_then_optimizer")


def __getattr__(name: str) -> NoReturn:
    # Raise an error that says what to do instead, which an AttributeError would not.
    if name in TORCHS:
        raise ConfigError(
            f"{name} is not supported: the means of all buckets arrive together, so an optimizer in the "
            "hook would overlap nothing, and would take steps that must be skipped; step it after backward()"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
