"""Will compression pay? Predicted from this model, these processors and a probe of this network.

Or found out by the run itself: `auto`.
"""

from thinwire.advice.automatic import Auto, auto
from thinwire.advice.loss import ExpectedLoss, LossGap
from thinwire.advice.measure import advise
from thinwire.advice.result import Advice, Prediction

__all__ = ["Advice", "Auto", "ExpectedLoss", "LossGap", "Prediction", "advise", "auto"]
