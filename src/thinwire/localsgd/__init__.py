"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

`core` is common to what users enter: `local_sgd`, and with members that come and go `elastic` and `steps`,
on `member`. `members` are who averages. A `schedule` says when which `fragment` is sent, as a `flight`.
"""

from thinwire.localsgd.local_sgd import DiLoCo, LocalSGD
from thinwire.localsgd.settings import Nesterov, Streaming, Warmup

__all__ = ["DiLoCo", "LocalSGD", "Nesterov", "Streaming", "Warmup"]
