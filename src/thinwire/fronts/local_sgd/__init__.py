"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

`local_sgd` is what users enter, or `diloco`. `schedule` says when what is averaged over whom; a `fragment` is
a slice of the model, by `layers`, and its last average; a `flight` is its change on the way; `consensus`
compares the processes before that.
"""

from thinwire.fronts.local_sgd.diloco import DiLoCo
from thinwire.fronts.local_sgd.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
