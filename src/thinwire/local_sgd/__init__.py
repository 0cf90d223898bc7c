"""Averaging less often: local SGD, post-local SGD, hierarchical averaging and DiLoCo.

`core` is common to what users enter: `local_sgd`, and with members that come and go `elastic` and `steps`,
on `member`. `groups` say who averages. A `schedule` says when which `fragment` is sent, as a
`pending_average`.
"""

from thinwire.local_sgd.local_sgd import DiLoCo, LocalSGD
from thinwire.local_sgd.settings import Nesterov, Streaming, Warmup

__all__ = ["DiLoCo", "LocalSGD", "Nesterov", "Streaming", "Warmup"]
