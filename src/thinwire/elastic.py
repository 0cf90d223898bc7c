"""Training whose members come and go: over a group that changes between averagings.

`LocalSGD` and `DiLoCo` average models every few steps, `Steps` averages gradients at each step.

`TorchftGroup` finds the members through torchft's lighthouse (`pip install '.[elastic]'` in a clone).
`InProcessGroup` has them in one process, for tests.
"""

from thinwire.errors import LeftError
from thinwire.localsgd.elastic import DiLoCo, LocalSGD
from thinwire.localsgd.members.group import Group, InProcessGroup, InProcessLighthouse
from thinwire.localsgd.members.presence import MembershipStats
from thinwire.localsgd.members.torchft_group import TorchftGroup
from thinwire.localsgd.steps import Steps

__all__ = [
    "DiLoCo",
    "Group",
    "InProcessGroup",
    "InProcessLighthouse",
    "LeftError",
    "LocalSGD",
    "MembershipStats",
    "Steps",
    "TorchftGroup",
]
