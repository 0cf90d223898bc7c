"""Shells around other frameworks; each needs its own optional package."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

# The warning of all of them about a checkpoint.
SAVED_WITHOUT = "%s was saved without Thinwire: training continues from it, without the algorithm's state"

# `thinwire` itself does the same.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        """Import a shell when it is first named."""
        if name in ("accelerate", "lightning", "transformers"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
