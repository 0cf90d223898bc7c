"""Faults on a schedule, to test a training script when a process dies, stalls, overflows or is slow.

    sync = thinwire.attach(ddp_model, algorithm)
    with faults(sync, [fail_at(process=1, step=30, kind="kill")]):
        train(ddp_model)

Give the same schedule to every process; each picks its own faults from it. They strike just before a message
of gradients is sent, by DDP's hook, `thinwire.powersgd` or `LocalSGD`.
"""

from thinwire.comm.in_process import InProcessTransport, run_members
from thinwire.comm.metered import Note, Recording
from thinwire.simulation import Simulation
from thinwire.testing.faults import Fault, InjectedError, Kind, Synced, fail_at, faults

__all__ = [
    "Fault",
    "InProcessTransport",
    "InjectedError",
    "Kind",
    "Note",
    "Recording",
    "Simulation",
    "Synced",
    "fail_at",
    "faults",
    "run_members",
]
