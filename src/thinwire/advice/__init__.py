"""Will compression pay? `advise` predicts it, `auto` measures it in the run itself."""

from typing import TYPE_CHECKING

from thinwire.advice.advice_page import Advice
from thinwire.advice.losses import ExpectedLoss, LossGap
from thinwire.advice.prediction import Prediction
from thinwire.lazy import import_later

__all__ = ["Advice", "Auto", "ExpectedLoss", "LossGap", "Prediction", "advise", "auto"]

if TYPE_CHECKING:
    from thinwire.advice.automatic import Auto, auto
    from thinwire.advice.forecast import advise
else:
    _homes = {"Auto": "automatic", "auto": "automatic", "advise": "forecast"}
    __getattr__, __dir__ = import_later(__name__, _homes)
