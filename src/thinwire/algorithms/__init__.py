"""How gradients become their mean over the group: frozen configs and pure tensor code.

Nothing here communicates: an algorithm is a generator that yields messages and receives their means.
"""

from thinwire.algorithms.base import Algorithm, Bucket, Memory, Rounds
from thinwire.algorithms.batched import BatchedPowerSGD
from thinwire.algorithms.cast import Cast
from thinwire.algorithms.exact import AllReduce
from thinwire.algorithms.powersgd import PowerSGD

__all__ = ["Algorithm", "AllReduce", "BatchedPowerSGD", "Bucket", "Cast", "Memory", "PowerSGD", "Rounds"]
