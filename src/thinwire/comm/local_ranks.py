"""Which processes share a machine, by the launcher's variables and by host names."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from thinwire.comm.agreement import CALL, check_same
from thinwire.comm.collectives import gather_bytes, gather_numbers
from thinwire.comm.transport import Transport
from thinwire.errors import AgreementError

# Variables of launchers that start a whole job: the processes of the job; those of this machine; the local
# rank; the number of the machine.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ""),  # Open MPI
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", ""),  # MVAPICH
    ("PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", ""),  # MPICH, Intel MPI
    ("PMI_SIZE", "PMI_LOCAL_SIZE", "PMI_LOCAL_RANK", "PALS_NODEID"),  # Cray
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_NODEID"),  # srun
)
PURPOSE = "attach(), which processes share a machine"
MAGIC = 0x6D616368
NUMBERS_BELOW = 1 << 20  # of processes on a machine, so that two go into one number


class LocalRank(NamedTuple):
    """What the environment of a process says of its machine; -1 where it says nothing."""

    local_size: int
    local_rank: int
    machine: int
    host: int  # a hash of the machine's name; 0 if the machine's number is enough

    @classmethod
    def here(cls, variables: Mapping[str, str]) -> LocalRank:
        """Read torchrun's variables, and those of a launcher of all of the job's processes."""
        job_size, size, rank, machine, host = str(dist.get_world_size()), -1, -1, -1, _hash_of_host()
        for job_variable, size_variable, rank_variable, machine_variable in LAUNCHERS:
            # If a launcher's processes have started others, it knows nothing of these.
            if variables.get(job_variable) == job_size and variables.get(size_variable):
                machine = _number(variables, machine_variable)
                size = _local_size(variables[size_variable], machine)
                rank = _number(variables, rank_variable)
                host = 0 if machine >= 0 else host  # containers of one machine may have names of their own
                break
        size = _number(variables, "LOCAL_WORLD_SIZE", size) or size
        rank = _number(variables, "LOCAL_RANK", rank)
        if (number := _number(variables, "GROUP_RANK")) >= 0:
            machine, host = number, _hash_of_host()
        return cls(size, rank, machine, host)


def _number(variables: Mapping[str, str], name: str, default: int = -1) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else default


def _hash_of_host() -> int:
    return int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big")


def _local_size(text: str, machine: int) -> int:
    """Return the processes of a machine: of a number, or of all machines as SLURM has it: 4(x2),3."""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]
    return counts[machine] if 0 <= machine < len(counts) else counts[0]


def machines_by_launcher(transport: Transport, ranks: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each machine by the launcher's variables; one machine if these say nothing."""
    here, job_size = LocalRank.here(os.environ), dist.get_world_size()
    # The same on all processes, on machines of different sizes too.
    is_flat = _number(os.environ, "GROUP_WORLD_SIZE") in (1, job_size)
    if transport.size < 3 or here.local_size in (-1, job_size) or is_flat:
        return [list(ranks)]
    sizes = here.local_size * NUMBERS_BELOW + here.local_rank + 1
    everyone = dict[int, LocalRank]()
    for rank, (both, machine, host) in zip(
        ranks, _gather(transport, MAGIC, (sizes, here.machine, here.host), PURPOSE), strict=True
    ):
        everyone[rank] = LocalRank(both // NUMBERS_BELOW, both % NUMBERS_BELOW - 1, machine, host)
    together = defaultdict[tuple[int, int], list[int]](list)
    for rank, local in everyone.items():
        together[local.machine, local.host if local.machine < 0 else 0].append(rank)
    return [row for row_ranks in together.values() for row in _checked(row_ranks, everyone)]


def _checked(ranks: list[int], everyone: Mapping[int, LocalRank]) -> list[list[int]]:
    """Return the machines of ranks that seem to share one: several if clones of one image have one name."""
    local = [everyone[rank] for rank in ranks]
    sizes = {rank.local_size for rank in local}
    if len({rank.host for rank in local}) > 1:
        wrong = f"processes {ranks[:8]} share a machine, and their host names differ"
    elif len(sizes) == 1 and len(ranks) <= local[0].local_size:
        return [ranks]
    elif local[0].machine >= 0:
        wrong = f"processes {ranks[:8]} share a machine, and LOCAL_WORLD_SIZE is {_listed(sizes)} there"
    elif rows := _filled_in_turn(ranks, everyone):
        return rows
    else:
        wrong = f"processes {ranks[:8]} have one host name, and a machine has {_listed(sizes)} processes"
    raise AgreementError(
        f"by the launcher's variables {wrong}; pass machines=[[…], …], the ranks on each machine, or set "
        "GROUP_RANK to the number of each process's machine"
    )


def _listed(sizes: set[int]) -> str:
    return " or ".join(map(str, sorted(sizes)))


def _filled_in_turn(ranks: Sequence[int], everyone: Mapping[int, LocalRank]) -> list[list[int]]:
    """Return the machines if ranks fill one after the other with local ranks 0, 1, …; else none."""
    rows: list[list[int]] = []
    for rank in ranks:
        if everyone[rank].local_rank == 0:
            rows.append([])
        if not rows or everyone[rank].local_rank != len(rows[-1]):
            return []
        rows[-1].append(rank)
    return rows if all(everyone[rank].local_size == len(row) for row in rows for rank in row) else []


def why_by_itself(transport: Transport, ranks: Sequence[int]) -> str:
    """Say why each process sends by itself, if by host names processes share machines; else "". Collective.

    Cost: a gather of 32 bytes, of four or more processes that no launcher has told of machines.
    """
    if transport.size < 4 or LocalRank.here(os.environ).local_size != -1:
        return ""
    rows: dict[int, list[int]] = {}
    purpose, own = "attach(), which processes have one host name", _hash_of_host()
    for rank, (host, *_) in zip(ranks, _gather(transport, MAGIC + 1, (own, 0, 0), purpose), strict=True):
        rows.setdefault(host, []).append(rank)
    sizes = set(map(len, rows.values()))
    # Machines of different sizes could not share their messages.
    if len(rows) == 1 or len(sizes) > 1 or sizes == {1}:
        return ""
    # Only said, not taken for granted: machines that were cloned have one host name.
    shown = ", ".join(map(str, list(rows.values())[:8])) + (", …" if len(rows) > 8 else "")
    return (
        f"processes {rows[own][:8]} have one host name, {socket.gethostname()}, and each sends by itself: no "
        "LOCAL_WORLD_SIZE says that they share a machine. If they do, start them with torchrun, or pass "
        f"machines=[{shown}]"
    )


def _gather(
    transport: Transport, magic: int, numbers: tuple[int, int, int], purpose: str
) -> list[tuple[int, ...]]:
    """Return three numbers of each process; refuse if some are in a different call."""
    # Four numbers are as long as the digest that `agree` gathers: a process in a different call has sent one,
    # and asks for words next.
    everyone = gather_numbers([magic, *numbers], transport, purpose)
    if any(other[0] != magic for other in everyone):
        description = json.dumps({CALL: "attach()"}).encode()
        check_same([json.loads(data) for data in gather_bytes(description, transport, purpose)], purpose)
    return [tuple(map(int, other[1:])) for other in everyone]
