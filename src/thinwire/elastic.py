"""Training with members that come and go: the group may change between averagings.

`LocalSGD` and `DiLoCo` average models every few steps, `Steps` averages gradients at each step.

`TorchftGroup` finds the members through torchft's lighthouse (`pip install '.[elastic]'` in a clone).
`InProcessGroup` keeps them in one process, for tests.
"""

from thinwire.errors import LeftError
from thinwire.local_sgd.elastic_members import DiLoCo, LocalSGD
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.groups.torchft_group import TorchftGroup
from thinwire.local_sgd.member_status import MembershipStats
from thinwire.local_sgd.steps import Steps
from thinwire.testing.in_process_group import InProcessGroup, InProcessLighthouse

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
