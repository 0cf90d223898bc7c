"""Which processes share a machine: found from the launcher's variables, or given by the user."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist

from thinwire.comm.agreement import CALL, agree, check_same
from thinwire.comm.collectives import gather_bytes, gather_numbers
from thinwire.comm.in_process import InProcessTransport
from thinwire.comm.process_group import ProcessGroupTransport, made_of
from thinwire.comm.transport import Transport
from thinwire.errors import AgreementError, ConfigError
from thinwire.torch_private import num_groups, timeout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

Layout: TypeAlias = "bool | Sequence[Sequence[int]] | DeviceMesh"
"""Which processes share a machine: True to find it out, False to treat each as a separate machine; or the
global ranks of each machine; or a mesh of two dimensions, (machines, processes of each)."""

# Variables of launchers that start a whole job: how many processes; then how many on this machine, which of
# these this one is, and the number of the machine, if they tell.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ""),  # Open MPI
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", ""),  # MVAPICH
    ("PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", ""),  # MPICH, Intel MPI
    ("PMI_SIZE", "PMI_LOCAL_SIZE", "PMI_LOCAL_RANK", "PALS_NODEID"),  # Cray
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_NODEID"),  # srun
)

PURPOSE = "attach(), which processes share a machine"
MAGIC = 0x6D616368  # before what each process says of its machine
NUMBERS_BELOW = 1 << 20  # of processes on a machine, so that two go into one number


@dataclass(frozen=True)
class Machines:
    """The two groups of a process on a machine of several, if all machines have as many."""

    intra_node: Transport  # the processes of this machine; a process's rank in it is its place
    inter_node: Transport  # those of the same place, one on each machine; the rank in it is the machine
    rows: tuple[tuple[int, ...], ...] = ()  # the ranks on each machine

    @classmethod
    def in_process(cls, machines: int, processes: int) -> list[Machines]:
        """Return the groups of members of this process, machine by machine."""
        insides = [InProcessTransport.group(processes) for _ in range(machines)]
        betweens = [InProcessTransport.group(machines) for _ in range(processes)]
        places = [(machine, place) for machine in range(machines) for place in range(processes)]
        rows = tuple(tuple(range(m * processes, (m + 1) * processes)) for m in range(machines))
        return [cls(insides[m][p], betweens[p][m], rows) for m, p in places]


def machines_of(transport: ProcessGroupTransport, layout: Layout = True) -> tuple[Machines | None, str]:
    """Return this process's two groups, or None and perhaps why each process sends by itself. Collective.

    It raises `AgreementError` if processes disagree on who is where, `ConfigError` if what was given does not
    divide the group.

    Cost: nothing on one machine, or with one process on each; else a gather of 32 bytes, and two new groups,
    which later calls take again.
    """
    if layout is False:
        return None, ""
    ranks = dist.get_process_group_ranks(transport.group)
    rows = _found(transport, ranks) if layout is True else _given(transport, ranks, layout)
    if not isinstance(layout, bool | list | tuple) and len(rows) > 1 and len(rows[0]) > 1:
        groups = (cast("DeviceMesh", layout).get_group(dim) for dim in (1, 0))
        inside, between = (ProcessGroupTransport(group, transport.gradient_device) for group in groups)
        return Machines(inside, between, tuple(map(tuple, rows))), ""
    return _grouped(transport, rows)


def is_told_its_machine() -> bool:
    """Return whether the launcher has told this process how many share its machine."""
    return _Place.here(os.environ).local != -1


def ranks_by_machine(transport: ProcessGroupTransport) -> list[list[int]]:
    """Return the group's ranks on each machine, as `machines_of` finds them; all in one if it can't tell."""
    everyone = dist.get_process_group_ranks(transport.group)
    return [[everyone.index(rank) for rank in row] for row in _found(transport, everyone)]


def machines_of_subgroups(
    transport: ProcessGroupTransport, subgroup: ProcessGroupTransport
) -> tuple[Machines | None, str]:
    """Return the same as `machines_of`, if each process has a subgroup of its machine. Collective."""
    ranks = dist.get_process_group_ranks(transport.group)
    own = json.dumps(dist.get_process_group_ranks(subgroup.group)).encode()
    said = gather_bytes(own, transport, "which processes are a subgroup")
    rows = sorted({tuple(json.loads(data)) for data in said})
    if sorted(rank for row in rows for rank in row) != sorted(ranks):
        raise ConfigError(
            f"the subgroups {[list(row) for row in rows][:8]} overlap, or leave out processes of the group; "
            "make them of all of it: torch.distributed.new_subgroups(group_size=…)"
        )
    return _grouped(transport, rows)


def _grouped(transport: ProcessGroupTransport, rows: Sequence[Sequence[int]]) -> tuple[Machines | None, str]:
    sizes = [len(row) for row in rows]
    if len(rows) < 2 or max(sizes) == 1:
        return None, ""
    if min(sizes) < max(sizes):
        shown = ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")
        uneven = (
            f"machines have {shown} processes of the group, so each process sends by itself; with as many on "
            "each, what a machine has in common would be sent once"
        )
        if not transport.rank:
            logger.warning("%s", uneven)
        return None, uneven
    made, key = made_of(transport.group), tuple(tuple(row) for row in rows)
    if key not in made:
        is_whole_job = transport.size == dist.get_world_size()
        # Torch names a group that not all of the job make by how many groups a process knows.
        known = [] if is_whole_job else gather_numbers([num_groups()], transport, PURPOSE)
        if any(count != known[0] for count in known):
            return None, (
                "processes know different numbers of process groups, and PyTorch can't make groups of a part "
                "of the job then, so each process sends by itself; pass machines= as a mesh of two "
                "dimensions, (machines, processes of each)"
            )
        made[key] = list(_new_groups(transport, rows, is_whole_job=is_whole_job))
    inside, between = (ProcessGroupTransport(group, transport.gradient_device) for group in made[key])
    return Machines(inside, between, key), ""


def _new_groups(
    transport: ProcessGroupTransport, rows: Sequence[Sequence[int]], *, is_whole_job: bool
) -> Iterator[dist.ProcessGroup]:
    """Yield this process's row and its column of the processes."""
    backend, device = dist.get_backend_config(transport.group), transport.gradient_device
    timeout = timeout_of(transport.group, device or torch.device("cpu"))
    for lists in ([list(row) for row in rows], [list(column) for column in zip(*rows, strict=True)]):
        if is_whole_job:  # all processes of the job are here, and make all groups, as torch asks for
            yield dist.new_subgroups_by_enumeration(lists, timeout, backend)[0]  # type: ignore[no-untyped-call]
        else:
            own = next(ranks for ranks in lists if dist.get_rank() in ranks)
            yield cast(
                dist.ProcessGroup, dist.new_group(own, timeout, backend, use_local_synchronization=True)
            )


class _Place(NamedTuple):
    """The place of a process, as the launcher has told it; -1 if it has not."""

    local: int  # processes on this machine
    number: int  # of this process among them
    machine: int
    host: int  # a hash of its name, if it is to be compared

    @classmethod
    def here(cls, told: Mapping[str, str]) -> _Place:
        """Read the place from torchrun's variables, or those of a launcher of all of the job's processes."""
        world, local, number, machine = str(dist.get_world_size()), -1, -1, -1
        for size, *names in LAUNCHERS:
            # If a launcher's processes have started others, it knows nothing of these.
            if told.get(size) == world and told.get(names[0]):
                machine = _whole_number(told, names[2])
                local, number = _on_machine(told[names[0]], machine), _whole_number(told, names[1])
                break
        host = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big")
        if (given := _whole_number(told, "LOCAL_WORLD_SIZE")) > 0:
            local = given
        if (given := _whole_number(told, "LOCAL_RANK")) >= 0:
            number = given
        # Containers of one machine may have names of their own.
        of_machine = host if machine < 0 else 0
        if (given := _whole_number(told, "GROUP_RANK")) >= 0:
            machine, of_machine = given, host
        return cls(local, number, machine, of_machine)


def _whole_number(told: Mapping[str, str], name: str) -> int:
    return int(told[name]) if told.get(name, "").isdecimal() else -1


def _on_machine(told: str, machine: int) -> int:
    """Return the processes of a machine: a number, or as SLURM has it for all of them, such as 4(x2),3."""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", told)
        for _ in range(int(times or 1))
    ]
    return counts[machine] if 0 <= machine < len(counts) else counts[0]


def _found(transport: ProcessGroupTransport, ranks: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each machine by the launcher's variables; one machine if these say nothing."""
    place, world = _Place.here(os.environ), dist.get_world_size()
    # The same on all processes, on machines of different sizes too.
    is_flat = _whole_number(os.environ, "GROUP_WORLD_SIZE") in (1, world)
    if transport.size < 3 or place.local in (-1, world) or is_flat:
        return [list(ranks)]
    # Four numbers are as long as the digest that `agree` gathers: a process in a different call has sent one,
    # and asks for words next.
    both = place.local * NUMBERS_BELOW + place.number + 1
    everyone = gather_numbers([MAGIC, both, place.machine, place.host], transport, PURPOSE)
    if any(said[0] != MAGIC for said in everyone):
        description = json.dumps({CALL: "attach()"}).encode()
        check_same([json.loads(data) for data in gather_bytes(description, transport, PURPOSE)], PURPOSE)
    said = dict[int, _Place]()
    for rank, numbers in zip(ranks, everyone, strict=True):
        _, both, machine, host = map(int, numbers)
        said[rank] = _Place(both // NUMBERS_BELOW, both % NUMBERS_BELOW - 1, machine, host)
    return _by_machine(said)


def _by_machine(said: Mapping[int, _Place]) -> list[list[int]]:
    """Return the ranks of each machine, in their order; by host name if machines have no numbers."""
    together = defaultdict[tuple[int, int], list[int]](list)
    for rank, place in said.items():
        together[place.machine, place.host if place.machine < 0 else 0].append(rank)
    machines = []
    for (machine, _), here in together.items():
        first, wrong = said[here[0]], ""
        other = next((rank for rank in here if said[rank].host != first.host), None)
        unlike = next((rank for rank in here if said[rank].local != first.local), here[-1])
        remedy = "correct the variables, or pass machines=[[…], …], the ranks on each machine"
        if other is not None:
            wrong = (
                f"by the launcher's variables processes {here[0]} and {other} share a machine, and their "
                f"host names differ (LOCAL_WORLD_SIZE is {said[other].local} on process {other})"
            )
        elif len(here) <= first.local == said[unlike].local:
            machines.append(here)
        elif machine < 0 and (found := _of_one_name(here, said)):
            machines += found
        elif machine < 0:
            sizes = " or ".join(map(str, sorted({said[rank].local for rank in here})))
            wrong = (
                f"{len(here)} processes, {here[:8]}, have one host name, and by the launcher's variables a "
                f"machine has {sizes} of them"
            )
            remedy = (
                "give each machine a host name of its own, or set GROUP_RANK to the number of its machine "
                "for each process, or pass machines=[[…], …], the ranks on each machine"
            )
        else:
            wrong = (
                f"processes {here} share a machine, and LOCAL_WORLD_SIZE is {first.local} on process "
                f"{here[0]} and {said[unlike].local} on process {unlike}"
            )
        if wrong:
            raise AgreementError(f"{wrong}; {remedy}")
    return machines


def _of_one_name(here: Sequence[int], said: Mapping[int, _Place]) -> list[list[int]]:
    """Return the machines of processes of one host name, if they are numbered 0, 1, … on each; else none."""
    # Clones of one image have one name. A process takes the next number on its machine, so only if machine
    # after machine is filled it is known which one that is.
    machines: list[list[int]] = []
    for rank in here:
        if said[rank].number == 0:
            machines.append([])
        if not machines or said[rank].number != len(machines[-1]):
            return []
        machines[-1].append(rank)
    is_full = all(said[rank].local == len(row) for row in machines for rank in row)
    return machines if is_full else []


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
    listed = [rank for row in rows for rank in row]
    if sorted(listed) != sorted(ranks):
        missing, unknown = sorted(set(ranks) - set(listed)), sorted(set(listed) - set(ranks))
        wrong = f"has {unknown[:8]}, which are not in it" if unknown else "has some twice"
        raise ConfigError(
            f"machines must list each process of the model's group {list(ranks)[:8]} once; it "
            f"{f'leaves out {missing[:8]}' if missing else wrong}"
        )
    agree(transport, {CALL: "attach()", "machines": repr([list(row) for row in rows])}, PURPOSE)
    return [list(row) for row in rows]
