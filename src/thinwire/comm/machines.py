"""The intra-node and inter-node groups of a process, on machines that are found or given by the user."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.distributed as dist

from thinwire.comm.agreement import CALL, agree
from thinwire.comm.collectives import gather_bytes, gather_numbers
from thinwire.comm.in_process import InProcessTransport
from thinwire.comm.local_ranks import PURPOSE, machines_by_launcher
from thinwire.comm.process_group import ProcessGroupTransport, made_of
from thinwire.comm.transport import Transport
from thinwire.errors import ConfigError
from thinwire.torch_private import num_groups, timeout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

Layout: TypeAlias = "bool | Sequence[Sequence[int]] | DeviceMesh"
"""Which processes share a machine: True to find it out, False to treat each as a separate machine; or the
global ranks of each machine; or a mesh of two dimensions, (machines, processes of each)."""


@dataclass(frozen=True)
class Machines:
    """The two groups of a process on a machine of several, if all machines have as many."""

    intra_node: Transport  # the processes of this machine: its rank there is the local rank
    inter_node: Transport  # those of this local rank, one on each machine
    rows: tuple[tuple[int, ...], ...] = ()  # the ranks on each machine

    @classmethod
    def in_process(cls, machines: int, processes: int) -> list[Machines]:
        """Return the groups of members of this process, machine by machine."""
        intra_node = [InProcessTransport.group(processes) for _ in range(machines)]
        inter_node = [InProcessTransport.group(machines) for _ in range(processes)]
        rows = tuple(tuple(range(m * processes, (m + 1) * processes)) for m in range(machines))
        return [
            cls(intra_node[machine][local_rank], inter_node[local_rank][machine], rows)
            for machine in range(machines)
            for local_rank in range(processes)
        ]


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
    rows = machines_by_launcher(transport, ranks) if layout is True else _given(transport, ranks, layout)
    if not isinstance(layout, bool | list | tuple) and len(rows) > 1 and len(rows[0]) > 1:
        groups = (cast("DeviceMesh", layout).get_group(dim) for dim in (1, 0))
        return _machines(groups, transport, rows), ""
    return _grouped(transport, rows)


def ranks_by_machine(transport: ProcessGroupTransport) -> list[list[int]]:
    """Return the group's ranks on each machine, as `machines_of` finds them; all in one if it can't tell."""
    everyone = dist.get_process_group_ranks(transport.group)
    return [[everyone.index(rank) for rank in row] for row in machines_by_launcher(transport, everyone)]


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
    return _machines(made[key], transport, key), ""


def _machines(
    groups: Iterable[dist.ProcessGroup], transport: ProcessGroupTransport, rows: Sequence[Sequence[int]]
) -> Machines:
    intra_node, inter_node = (ProcessGroupTransport(group, transport.gradient_device) for group in groups)
    return Machines(intra_node, inter_node, tuple(map(tuple, rows)))


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
