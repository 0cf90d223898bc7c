"""Thinwire trains PyTorch models data-parallel over slow networks.

It sends small messages (low-rank PowerSGD factors, gradients in 16 to 1 bits) instead of uncompressed
gradients, and gives back the same model. Start with `attach`.
"""

from __future__ import annotations

from importlib import import_module

from thinwire.version import __version__

# Not from `typing`: every Python process under `thinwire attach` imports this module, so it imports little.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from thinwire import hooks
    from thinwire.adapters.attach import attach
    from thinwire.adapters.forward_overlap import overlap_forward
    from thinwire.adapters.join import join
    from thinwire.adapters.replicas import check_replicas
    from thinwire.advice import advise, auto
    from thinwire.algorithms import AllReduce, Cast, PowerSGD, Quantize, TopK
    from thinwire.errors import (
        AgreementError,
        AttachError,
        CheckpointError,
        CommunicationError,
        ConfigError,
        GradientError,
        LeftError,
        MissingExtraError,
        NonfiniteError,
        StateError,
        StepError,
        ThinwireError,
    )
    from thinwire.local_sgd import DiLoCo, LocalSGD, Nesterov, Streaming, Warmup
    from thinwire.plan import Plan
    from thinwire.sync import GradientSync
    from thinwire.sync.stats import Stats
    from thinwire.watch import Watch

__all__ = [
    "AgreementError",
    "AllReduce",
    "AttachError",
    "Cast",
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DiLoCo",
    "GradientError",
    "GradientSync",
    "LeftError",
    "LocalSGD",
    "MissingExtraError",
    "Nesterov",
    "NonfiniteError",
    "Plan",
    "PowerSGD",
    "Quantize",
    "StateError",
    "Stats",
    "StepError",
    "Streaming",
    "ThinwireError",
    "TopK",
    "Warmup",
    "Watch",
    "__version__",
    "advise",
    "attach",
    "auto",
    "check_replicas",
    "hooks",
    "join",
    "overlap_forward",
]

# The modules that users import from. A name is public if one of them lists it in its `__all__`.
PUBLIC_MODULES = (
    "advice",
    "algorithms",
    "checkpoint",
    "ddp_comm_hooks",
    "elastic",
    "errors",
    "hooks",
    "integrations.accelerate",
    "integrations.all_gather",
    "integrations.axolotl",
    "integrations.lightning",
    "integrations.transformers",
    "plan",
    "powersgd",
    "probe",
    "simulation",
    "testing",
    "testing.faults",
    "watch",
)
# The module of each name in `__all__`. It is imported when a name is first used, since few runs use all.
_HOMES = {
    "advice": ("advise", "auto"),
    "algorithms": ("AllReduce", "Cast", "PowerSGD", "Quantize", "TopK"),
    "adapters.attach": ("attach",),
    "adapters.forward_overlap": ("overlap_forward",),
    "adapters.join": ("join",),
    "local_sgd": ("DiLoCo", "LocalSGD", "Nesterov", "Streaming", "Warmup"),
    "adapters.replicas": ("check_replicas",),
    "plan": ("Plan",),
    "sync": ("GradientSync",),
    "sync.stats": ("Stats",),
    "watch": ("Watch",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {name.split(".")[0] for name in PUBLIC_MODULES}


def __dir__() -> list[str]:
    """Return the public names, for an editor to complete `thinwire.` with."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name[:2] == "__")})


# Hidden from type checkers: with `__getattr__` they would accept any name as an attribute of this module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name or module when it is first used."""
        if name in _HOME_OF:
            return getattr(import_module(f"thinwire.{_HOME_OF[name]}"), name)
        if name in _MODULES:
            return import_module(f"thinwire.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
