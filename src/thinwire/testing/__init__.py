"""Faults on a schedule: what a training script does when a process dies, stalls, overflows or is slow.

    sync = thinwire.attach(ddp_model, algorithm)
    with faults(sync, [fail_at(process=1, step=30, kind="kill")]):
        train(ddp_model)

The same schedule is given to every process; each picks its own faults from it. They strike where a message
of gradients is about to be sent: by DDP's hook, `thinwire.powersgd` or `LocalSGD`.
"""

from thinwire.comm.in_process import InProcessTransport, run_members
from thinwire.comm.metered import Note, Recording
from thinwire.simulation import Simulation
from thinwire.testing.faults import Fault, InjectedError, Kind, Synced, fail_at, faults, random_faults

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
    "random_faults",
    "run_members",
]
