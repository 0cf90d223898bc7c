"""Will compression pay? `advise` predicts it, `auto` measures it in the run itself."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.advice.advice_page import Advice
from thinwire.advice.losses import ExpectedLoss, LossGap
from thinwire.advice.prediction import Prediction

if TYPE_CHECKING:
    from thinwire.advice.automatic import Auto, auto
    from thinwire.advice.forecast import advise
else:

    def __getattr__(name: str) -> Any:
        """Import what needs torch when it is first used: `thinwire advise` answers without it."""
        modules = {"Auto": "automatic", "auto": "automatic", "advise": "forecast"}
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"thinwire.advice.{modules[name]}"), name)


__all__ = ["Advice", "Auto", "ExpectedLoss", "LossGap", "Prediction", "advise", "auto"]


def __dir__() -> list[str]:
    """Return the public names, those not yet imported too."""
    return __all__
