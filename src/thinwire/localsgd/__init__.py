"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

`local_sgd` has what users enter, `settings` what they give it. `model` is their model, `replica` what a
process holds of it, and `fragment` a slice of it with its last average. `schedule` says what is averaged
when. `members` says who averages, `flight` sends changes, and `outer` is the outer optimizer. `loop` hooks
the user's optimizer and DDP model; `state` is what is saved. `elastic` and `steps` are for members that come
and go, and `member` is one of those.
"""

from thinwire.localsgd.local_sgd import DiLoCo, LocalSGD
from thinwire.localsgd.settings import Nesterov, Streaming, Warmup

__all__ = ["DiLoCo", "LocalSGD", "Nesterov", "Streaming", "Warmup"]
