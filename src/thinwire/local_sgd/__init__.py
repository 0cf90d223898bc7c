"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

An `averager` counts the steps of a loop. When its `schedule` says so, a `membership` averages the tensors of
a `contributor` over a group: one that never changes, or (`elastic_membership`) whoever is there.
"""

from thinwire.local_sgd.local_sgd import DiLoCo, LocalSGD
from thinwire.local_sgd.outer import Nesterov
from thinwire.local_sgd.schedule import Streaming, Warmup

__all__ = ["DiLoCo", "LocalSGD", "Nesterov", "Streaming", "Warmup"]
