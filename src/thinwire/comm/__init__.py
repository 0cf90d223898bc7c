"""Transports carry tensors between the members of a group; everything else is built on them.

`ProcessGroupTransport` is the real one; only this package calls `torch.distributed`. With
`InProcessTransport` the members live in one process, so that tests of many processes take milliseconds.
`Metered` and `Recording` wrap either.
"""

from thinwire.comm.agreement import CALL, Description, agree
from thinwire.comm.collectives import copy_from, gather_numbers, gather_stacked, gather_values, true_for_all
from thinwire.comm.in_process import InProcessTransport, run_members
from thinwire.comm.machines import Layout, Machines, machines_of
from thinwire.comm.metered import Metered, Note, Recording, Traffic
from thinwire.comm.process_group import ProcessGroupTransport, checked_group
from thinwire.comm.transport import CombinedWork, Message, Transport, Work

__all__ = [
    "CALL",
    "CombinedWork",
    "Description",
    "InProcessTransport",
    "Layout",
    "Machines",
    "Message",
    "Metered",
    "Note",
    "ProcessGroupTransport",
    "Recording",
    "Traffic",
    "Transport",
    "Work",
    "agree",
    "checked_group",
    "copy_from",
    "gather_numbers",
    "gather_stacked",
    "gather_values",
    "machines_of",
    "run_members",
    "true_for_all",
]
