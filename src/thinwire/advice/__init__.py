"""Will compression pay? Predicted by `advise`, or found out by the run itself with `auto`."""

from thinwire.advice.automatic import Auto, auto
from thinwire.advice.loss import ExpectedLoss, LossGap
from thinwire.advice.measure import advise
from thinwire.advice.result import Advice, Prediction

__all__ = ["Advice", "Auto", "ExpectedLoss", "LossGap", "Prediction", "advise", "auto"]
