"""Thinwire trains PyTorch models data-parallel over slow networks.

It sends small messages (low-rank PowerSGD factors, gradients in 16 to 1 bits) instead of uncompressed
gradients, and gives back the same model. Start with `attach`.
"""

from __future__ import annotations

from importlib import import_module

from thinwire.version import __version__

# Without the module `typing`: every Python process under `thinwire attach` imports this one.
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

# All that users import from. What is public is what these list in their `__all__`, and nothing else is.
PUBLIC_MODULES = (
    "advice",
    "algorithms",
    "checkpoint",
    "ddp_comm_hooks",
    "elastic",
    "errors",
    "hooks",
    "integrations.accelerate",
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
# In which module each name of `__all__` is: it is imported with the first use of one, since few runs use all.
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
    """Return the public names: what completes `thinwire.` in an editor."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name[:2] == "__")})


# Hidden from type checkers, to which any name would be an attribute of this module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a public name or module when it is first used."""
        if name in _HOME_OF:
            # Kept, so that it is looked up once.
            globals()[name] = getattr(import_module(f"thinwire.{_HOME_OF[name]}"), name)
            return globals()[name]
        if name in _MODULES:
            return import_module(f"thinwire.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
