"""Channels average messages over a group: the one room that calls `torch.distributed`.

`ProcessGroupChannel` is the real one. `InProcessChannel` averages among simulated workers of one
process, so that an algorithm's mathematics can be run at 64 workers in milliseconds.
"""

from thinwire.channel.agreement import CALL, Told
from thinwire.channel.base import Channel, Pending, Traffic
from thinwire.channel.broadcast import copy_from
from thinwire.channel.in_process import InProcessChannel, lockstep
from thinwire.channel.process_group import ProcessGroupChannel

__all__ = [
    "CALL",
    "Channel",
    "InProcessChannel",
    "Pending",
    "ProcessGroupChannel",
    "Told",
    "Traffic",
    "copy_from",
    "lockstep",
]
