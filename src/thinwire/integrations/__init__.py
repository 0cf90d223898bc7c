"""Integrations with other frameworks; each needs its own optional package."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

# The warning that all of them give about a checkpoint.
SAVED_WITHOUT = "%s was saved without Thinwire: training continues from it, without the algorithm's state"

# Lazy, as in `thinwire` itself.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        """Import an integration when it is first used."""
        if name in ("accelerate", "lightning", "transformers"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
