"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

`local_sgd` is what users enter, or `diloco`. `schedule` says when what is averaged over whom; a `fragment` is
a slice of the model and its last average; `averagings` sends its changes, once the processes have compared
their steps, and applies what comes back; `loop` is what hangs on the user's optimizer and DDP model.
"""

from thinwire.fronts.local_sgd.diloco import DiLoCo
from thinwire.fronts.local_sgd.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
