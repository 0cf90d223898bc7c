"""Which processes share a machine, and the intra-node and inter-node groups of a process.

The user gives the machines, or they are found from the launcher's variables and host names.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist

from thinwire.checks import listed
from thinwire.comm.agreement import CALL, agree
from thinwire.comm.collectives import gather_numbers, gather_values
from thinwire.comm.in_process import InProcessTransport
from thinwire.comm.process_group import ProcessGroupTransport, groups_made_for
from thinwire.comm.transport import Transport
from thinwire.errors import AgreementError, ConfigError
from thinwire.torch_private import num_groups, timeout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

Layout: TypeAlias = "bool | Sequence[Sequence[int]] | DeviceMesh"
"""Which processes share a machine: True to detect it, False to treat each process as a separate machine; or
the global ranks of each machine; or a mesh of two dimensions, (machines, processes of each)."""

# Launchers' variables: the number of processes of job and machine, the local rank, the machine's number.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ""),  # Open MPI
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", ""),  # MVAPICH
    ("PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", ""),  # MPICH, Intel MPI
    ("PMI_SIZE", "PMI_LOCAL_SIZE", "PMI_LOCAL_RANK", "PALS_NODEID"),  # Cray
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_NODEID"),  # srun
)
PURPOSE = "attach(), which processes share a machine"


@dataclass(frozen=True)
class Machines:
    """The two groups of a process, if all machines have the same number of processes, more than one."""

    intra_node: Transport  # the processes of this machine: its rank there is the local rank
    inter_node: Transport  # the processes of this local rank, one on each machine
    rows: tuple[tuple[int, ...], ...] = ()  # the ranks on each machine

    @classmethod
    def in_process(cls, machines: int, processes: int) -> list[Machines]:
        """Return the groups of in-process members, machine by machine."""
        intra_node = [InProcessTransport.group(processes) for _ in range(machines)]
        inter_node = [InProcessTransport.group(machines) for _ in range(processes)]
        rows = tuple(tuple(range(m * processes, (m + 1) * processes)) for m in range(machines))
        return [
            cls(intra_node[machine][local_rank], inter_node[local_rank][machine], rows)
            for machine in range(machines)
            for local_rank in range(processes)
        ]


# The groups.


def machines_of(transport: ProcessGroupTransport, layout: Layout = True) -> Machines | None:
    """Return this process's two groups; None if each process sends by itself. Collective.

    It raises `AgreementError` if processes disagree on the layout, `ConfigError` if the given layout does not
    divide the group.

    Cost: nothing on one machine, or with one process on each; otherwise two gathers of 32 bytes, and two new
    groups, which later calls reuse.
    """
    if layout is False:
        return None
    ranks = dist.get_process_group_ranks(transport.group)
    rows = machines_by_launcher(transport, ranks) if layout is True else _given(transport, ranks, layout)
    return _grouped(transport, rows, None if isinstance(layout, bool | list | tuple) else layout)


def ranks_by_machine(transport: ProcessGroupTransport) -> list[list[int]]:
    """Return the group's ranks on each machine, found like `machines_of`; all in one if unknown."""
    everyone = dist.get_process_group_ranks(transport.group)
    return [[everyone.index(rank) for rank in row] for row in machines_by_launcher(transport, everyone)]


def machines_of_subgroups(
    transport: ProcessGroupTransport, subgroup: ProcessGroupTransport
) -> Machines | None:
    """Return the same as `machines_of`, given each process's subgroup of its machine. Collective."""
    ranks = dist.get_process_group_ranks(transport.group)
    own = dist.get_process_group_ranks(subgroup.group)
    rows = sorted(set(map(tuple, gather_values(own, transport, "which processes are a subgroup"))))
    if sorted(rank for row in rows for rank in row) != sorted(ranks):
        raise ConfigError(
            f"the subgroups {[list(row) for row in rows][:8]} overlap, or leave out processes of the group; "
            "divide the whole group: torch.distributed.new_subgroups(group_size=…)"
        )
    return _grouped(transport, rows)


def _grouped(
    transport: ProcessGroupTransport, rows: Sequence[Sequence[int]], mesh: Any = None
) -> Machines | None:
    """Return the groups of this process's row and column: those of a mesh of these rows, or new ones."""
    sizes = [len(row) for row in rows]
    if len(rows) < 2 or max(sizes) == 1:
        return None
    if min(sizes) < max(sizes):
        uneven = (
            f"machines have {listed(sizes)} processes of the group, so each process sends by itself; with "
            "equal numbers, a machine would send its sum only once"
        )
        if not transport.rank:
            logger.warning("%s", uneven)
        return None
    # Torch sorts the ranks of a group. With [[0, 3], [2, 1]] as given, rank 1 would have local rank 0 in its
    # machine's group, but average with rank 3, whose local rank is 1.
    made, key = groups_made_for(transport.group), tuple(tuple(sorted(row)) for row in rows)
    if mesh is not None and all(list(row) == sorted(row) for row in rows):
        groups = [mesh.get_group(dim) for dim in (1, 0)]
    else:
        if key not in made:
            made[key] = list(_new_groups(transport, key))
        groups = made[key]
    intra_node, inter_node = (ProcessGroupTransport(group, transport.gradient_device) for group in groups)
    return Machines(intra_node, inter_node, key)


def _new_groups(
    transport: ProcessGroupTransport, rows: Sequence[Sequence[int]]
) -> Iterator[dist.ProcessGroup]:
    is_whole_job = transport.size == dist.get_world_size()
    if not is_whole_job:
        # Torch names a group of a part of the job by how many groups the process is in. If rank 0 had one
        # more, for its logs, ranks 0 and 1 would wait for each other under different names. So a process in
        # fewer groups makes groups of its own.
        most = max(count for (count,) in gather_numbers([num_groups()], transport, PURPOSE))
        while num_groups() < most:
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
    backend, device = dist.get_backend_config(transport.group), transport.gradient_device
    timeout = timeout_of(transport.group, device or torch.device("cpu"))
    for lists in ([list(row) for row in rows], [list(column) for column in zip(*rows, strict=True)]):
        if is_whole_job:  # all processes of the job make all groups, as torch requires
            yield dist.new_subgroups_by_enumeration(lists, timeout, backend)[0]  # type: ignore[no-untyped-call]
        else:
            own = next(ranks for ranks in lists if dist.get_rank() in ranks)
            yield cast(
                dist.ProcessGroup, dist.new_group(own, timeout, backend, use_local_synchronization=True)
            )


# The layout given by the user.


def _given(
    transport: ProcessGroupTransport, ranks: Sequence[int], layout: Sequence[Sequence[int]] | DeviceMesh
) -> list[list[int]]:
    mesh = getattr(layout, "mesh", None)
    rows = mesh.tolist() if isinstance(mesh, torch.Tensor) else layout
    if mesh is not None and mesh.dim() != 2:
        raise ConfigError(
            f"machines must be a mesh of two dimensions, (machines, processes of each), got {mesh.dim()}"
        )
    if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple | range) for row in rows):
        raise ConfigError(
            "machines must be True, False, the ranks on each machine ([[0, 1], [2, 3]]) or a mesh, got "
            f"{rows!r}"
        )
    given = [rank for row in rows for rank in row]
    if sorted(given) != sorted(ranks):
        missing, unknown = sorted(set(ranks) - set(given)), sorted(set(given) - set(ranks))
        wrong = f"has {unknown[:8]}, which are not in it" if unknown else "has some twice"
        raise ConfigError(
            f"machines must list each process of the model's group {list(ranks)[:8]} once; it "
            f"{f'leaves out {missing[:8]}' if missing else wrong}"
        )
    agree(transport, {CALL: "attach()", "machines": repr([list(row) for row in rows])}, PURPOSE)
    return [list(row) for row in rows]


# The layout from the launcher's variables.


class LaunchedProcess(NamedTuple):
    """A process's machine, from environment variables; -1 for unknown numbers."""

    local_size: int
    local_rank: int
    machine: int
    host: int  # a hash of the machine's name; 0 if the machine's number is enough

    @classmethod
    def here(cls) -> LaunchedProcess:
        """Read torchrun's variables, and those of a launcher that has started the whole job."""
        job_size, size, rank, machine, host = str(dist.get_world_size()), -1, -1, -1, _hash_of_host()
        for job_variable, size_variable, rank_variable, machine_variable in LAUNCHERS:
            # If a launcher's processes have started others, its variables do not describe these.
            if os.environ.get(job_variable) == job_size and os.environ.get(size_variable):
                machine, rank = _number(machine_variable), _number(rank_variable)
                # The processes of this machine, or of all machines in SLURM's format: 4(x2),3.
                counts = [
                    int(count)
                    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ[size_variable])
                    for _ in range(int(times or 1))
                ]
                size = counts[machine if 0 <= machine < len(counts) else 0]
                host = 0 if machine >= 0 else host  # containers of one machine may have different names
                break
        size = _number("LOCAL_WORLD_SIZE", size) or size
        rank = _number("LOCAL_RANK", rank)
        if (number := _number("GROUP_RANK")) >= 0:
            machine, host = number, _hash_of_host()
        return cls(size, rank, machine, host)


def _number(variable: str, default: int = -1) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _hash_of_host() -> int:
    return int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big")


def machines_by_launcher(transport: Transport, ranks: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each machine from the launcher's variables; one machine without variables."""
    here, job_size = LaunchedProcess.here(), dist.get_world_size()
    # This variable is the same on all processes, even if machines differ in size.
    is_flat = _number("GROUP_WORLD_SIZE") in (1, job_size)
    if transport.size < 3 or here.local_size in (-1, job_size) or is_flat:
        return [list(ranks)]
    everyone = {
        rank: LaunchedProcess(*local)
        for rank, local in zip(ranks, _gather(transport, here, "by the launcher's variables"), strict=True)
    }
    together = defaultdict[tuple[int, int], list[int]](list)
    for rank, local in everyone.items():
        together[local.machine, local.host if local.machine < 0 else 0].append(rank)
    return [row for row_ranks in together.values() for row in _checked(row_ranks, everyone)]


def _checked(ranks: list[int], everyone: Mapping[int, LaunchedProcess]) -> list[list[int]]:
    """Return the machines of ranks with one host name: several if machines are clones of one image."""
    local = [everyone[rank] for rank in ranks]
    sizes = {rank.local_size for rank in local}
    local_sizes = " or ".join(map(str, sorted(sizes)))
    if len({rank.host for rank in local}) > 1:
        wrong = f"processes {ranks[:8]} share a machine, but their host names differ"
    elif len(sizes) == 1 and len(ranks) <= local[0].local_size:
        return [ranks]
    elif local[0].machine >= 0:
        wrong = f"processes {ranks[:8]} share a machine, but LOCAL_WORLD_SIZE is {local_sizes} there"
    elif rows := _filled_in_turn(ranks, everyone):
        return rows
    else:
        wrong = f"processes {ranks[:8]} have one host name, but LOCAL_WORLD_SIZE is {local_sizes}"
    raise AgreementError(
        f"the launcher's variables don't define machines: {wrong}; pass machines=[[…], …], the ranks on "
        "each machine, or set GROUP_RANK to each machine's number"
    )


def _filled_in_turn(ranks: Sequence[int], everyone: Mapping[int, LaunchedProcess]) -> list[list[int]]:
    """Return the machines if ranks fill them one after the other with local ranks 0, 1, …; else none."""
    rows: list[list[int]] = []
    for rank in ranks:
        if everyone[rank].local_rank == 0:
            rows.append([])
        if not rows or everyone[rank].local_rank != len(rows[-1]):
            return []
        rows[-1].append(rank)
    return rows if all(everyone[rank].local_size == len(row) for row in rows for rank in row) else []


# The layout from host names: only reported, not used, since cloned machines have the same name.


def why_by_itself(transport: Transport, ranks: Sequence[int]) -> str:
    """Return why each process sends by itself, if host names show shared machines; else "". Collective.

    Cost: two gathers of up to 32 bytes, for four or more processes without a launcher's variables.
    """
    if transport.size < 4 or LaunchedProcess.here().local_size != -1:
        return ""
    rows: dict[int, list[int]] = {}
    own = _hash_of_host()
    for rank, (host,) in zip(ranks, _gather(transport, [own], "by host names"), strict=True):
        rows.setdefault(host, []).append(rank)
    sizes = set(map(len, rows.values()))
    # Machines of different sizes could not share messages anyway.
    if len(rows) == 1 or len(sizes) > 1 or sizes == {1}:
        return ""
    return (
        f"processes {rows[own][:8]} have one host name, {socket.gethostname()}, but each sends by itself: "
        "no LOCAL_WORLD_SIZE says that they share a machine. If they do, start them with torchrun, or pass "
        f"machines=[{listed(rows.values())}]"
    )


def _gather(transport: Transport, numbers: Sequence[int], how: str) -> list[list[int]]:
    """Return the numbers of each process; raise if some find their machines in a different way."""
    agree(transport, {CALL: "attach()", "machines": how}, PURPOSE)
    return [list(map(int, other)) for other in gather_numbers(numbers, transport, PURPOSE)]
