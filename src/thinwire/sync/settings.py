"""How a sync treats its steps: what all fronts let the user choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.channel import Transport
from thinwire.checks import true_or_false
from thinwire.errors import ConfigError
from thinwire.sync.loss_scale import LossScale, loss_scale_of
from thinwire.sync.nonfinite import OnNonfinite, checked_on_nonfinite


@dataclass(frozen=True)
class Settings:
    """How steps are treated."""

    loss_scale: LossScale | None = None
    may_be_unused: bool = False
    host_check: bool = True
    on_nonfinite: OnNonfinite = "nan"
    together: Transport | None = None
    typed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.may_be_unused and not true_or_false("host_check", self.host_check):
            raise ConfigError(
                "host_check=False does not go with find_unused_parameters=True: which parameters nobody used "
                "is the host's to find out; leave out one of them"
            )
        if checked_on_nonfinite(self.on_nonfinite) == "raise" and not self.host_check:
            raise ConfigError(
                'host_check=False does not go with on_nonfinite="raise": the host can\'t raise what it does '
                "not learn; leave out one of them"
            )
        object.__setattr__(self, "host_check", true_or_false("host_check", self.host_check))

    @classmethod
    def of(cls, *, grad_scaler: object, host_check: bool, on_nonfinite: OnNonfinite, **rest: Any) -> Settings:
        """Return what a user has chosen, by the three arguments that all fronts take; see `attach`."""
        checked_on_nonfinite(on_nonfinite, grad_scaler)
        return cls(loss_scale_of(grad_scaler), host_check=host_check, on_nonfinite=on_nonfinite, **rest)

    def described(self) -> Mapping[str, str]:
        """Return what must be the same on all processes, by subject."""
        # `together` joins others than those that are compared.
        return {
            "loss scale": "not known" if self.loss_scale is None else "known",
            "find_unused_parameters": str(self.may_be_unused),
            "host_check": str(self.host_check),
            "on_nonfinite": self.on_nonfinite,
        }
