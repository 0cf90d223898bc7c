"""Will compression pay? Predicted from this model, these processors and a probe of this network."""

from thinwire.advice.loss import ExpectedLoss, LossGap
from thinwire.advice.measure import advise
from thinwire.advice.result import Advice, Prediction

__all__ = ["Advice", "ExpectedLoss", "LossGap", "Prediction", "advise"]
