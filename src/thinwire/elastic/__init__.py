"""Training whose members come and go: over a group that changes between averagings.

`LocalSGD` and `DiLoCo` average models every so many steps, `Steps` gradients at each.

`TorchftGroup` finds the members through torchft's lighthouse (`pip install '.[elastic]'` in a clone).
`InProcessGroup` has them in one process, for tests.
"""

from thinwire.elastic.diloco import DiLoCo
from thinwire.elastic.group import Group
from thinwire.elastic.in_process import InProcessGroup, InProcessLighthouse
from thinwire.elastic.local_sgd import LocalSGD
from thinwire.elastic.presence import MembershipStats
from thinwire.elastic.steps import Steps
from thinwire.elastic.torchft_group import TorchftGroup
from thinwire.errors import LeftError

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
