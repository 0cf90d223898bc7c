"""Thinwire trains PyTorch models data-parallel over slow networks.

It sends small messages (low-rank PowerSGD factors, gradients in 16 to 1 bits) instead of uncompressed
gradients, and gives back the same model. Start with `attach`.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from thinwire import hooks
from thinwire.advice import Advice, Auto, advise, auto
from thinwire.algorithms import AllReduce, BatchedPowerSGD, Cast, PowerSGD, Quantize, TopK
from thinwire.all_gather import AllGatherGrad, all_gather_grad
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
from thinwire.fronts.attach import attach
from thinwire.fronts.join import join
from thinwire.fronts.local_sgd import DiLoCo, LocalSGD, Nesterov, Streaming, Warmup
from thinwire.fronts.replicas import check_replicas
from thinwire.plan import Plan
from thinwire.sync import GradientSync
from thinwire.sync.stats import Stats
from thinwire.version import __version__
from thinwire.watch import JSONLWriter, MetricsWriter, TensorBoardWriter, Watch, read_run

__all__ = [
    "Advice",
    "AgreementError",
    "AllGatherGrad",
    "AllReduce",
    "AttachError",
    "Auto",
    "BatchedPowerSGD",
    "Cast",
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DiLoCo",
    "GradientError",
    "GradientSync",
    "JSONLWriter",
    "LeftError",
    "LocalSGD",
    "MetricsWriter",
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
    "TensorBoardWriter",
    "ThinwireError",
    "TopK",
    "Warmup",
    "Watch",
    "__version__",
    "advise",
    "all_gather_grad",
    "attach",
    "auto",
    "check_replicas",
    "hooks",
    "join",
    "read_run",
]

# What users import from besides, of which the reference tells.
PUBLIC_MODULES = ("advice", "algorithms", "errors", "plan", "probe", "watch")


def __dir__() -> list[str]:
    """Return the public names: what completes `thinwire.` in an editor."""
    return sorted({*__all__, *PUBLIC_MODULES, *ON_DEMAND, *(name for name in globals() if name[:2] == "__")})


# Not at import: few need them, and some import packages of others.
ON_DEMAND = ("checkpoint", "ddp_comm_hooks", "elastic", "integrations", "powersgd", "simulation", "testing")

# Not seen by type checkers, to which any name would then be an attribute of this module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> ModuleType:
        """Import a part of the package where it is named without an import: `thinwire.checkpoint`, say."""
        if name in ON_DEMAND:
            return import_module(f"thinwire.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
