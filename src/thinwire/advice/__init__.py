"""Will compression pay? `advise` predicts it, `auto` measures it in the run itself."""

from thinwire.advice.advice_page import Advice
from thinwire.advice.automatic import Auto, auto
from thinwire.advice.forecast import advise
from thinwire.advice.losses import ExpectedLoss, LossGap
from thinwire.advice.prediction import Prediction

__all__ = ["Advice", "Auto", "ExpectedLoss", "LossGap", "Prediction", "advise", "auto"]
