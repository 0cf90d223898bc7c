"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

`local_sgd` is what users enter. `schedule` says when what is averaged over whom; a `fragment` is a slice of
the model, its last average and what averages its changes; `consensus` compares the processes before that.
"""

from thinwire.fronts.local_sgd.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
