"""Training whose members come and go: `LocalSGD` and `DiLoCo` over a group that changes between averagings.

`TorchftGroup` finds the members through torchft's lighthouse (`pip install '.[elastic]'` in a clone).
`InProcessGroup` has them in one process, for tests.
"""

from thinwire.elastic.diloco import DiLoCo
from thinwire.elastic.group import Group
from thinwire.elastic.in_process import InProcessGroup, InProcessLighthouse
from thinwire.elastic.local_sgd import LocalSGD
from thinwire.elastic.membership import MembershipStats
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
    "TorchftGroup",
]
