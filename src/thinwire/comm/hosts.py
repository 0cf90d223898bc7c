"""Whether processes share machines that no launcher has told of: by their host names."""

from __future__ import annotations

import hashlib
import json
import socket

import torch.distributed as dist

from thinwire.comm.agreement import CALL, check_same
from thinwire.comm.collectives import gather_bytes, gather_numbers
from thinwire.comm.machines import is_told_its_machine
from thinwire.comm.process_group import ProcessGroupTransport

PURPOSE = "attach(), which processes have one host name"
MAGIC = 0x686F7374  # before what each process says of its host


def why_by_itself(transport: ProcessGroupTransport) -> str:
    """Say why each process sends by itself, if by host names processes share machines; else "". Collective.

    Cost: a gather of 32 bytes, of four or more processes that no launcher has told of machines.
    """
    if transport.size < 4 or is_told_its_machine():
        return ""
    name = socket.gethostname()
    own = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    # The numbers are as long as the digest that `agree` gathers: see `_found` of the machines.
    everyone = gather_numbers([MAGIC, 0, 0, own], transport, PURPOSE)
    if any(said[0] != MAGIC for said in everyone):
        description = json.dumps({CALL: "attach()"}).encode()
        check_same([json.loads(data) for data in gather_bytes(description, transport, PURPOSE)], PURPOSE)
    rows: dict[float, list[int]] = {}
    for rank, (*_, host) in zip(dist.get_process_group_ranks(transport.group), everyone, strict=True):
        rows.setdefault(host, []).append(rank)
    sizes = {len(row) for row in rows.values()}
    # Machines of different sizes could not share their messages.
    if len(rows) == 1 or len(sizes) > 1 or sizes == {1}:
        return ""
    # This is not taken for granted: machines that were cloned have one host name.
    shown = ", ".join(map(str, list(rows.values())[:8])) + (", …" if len(rows) > 8 else "")
    return (
        f"processes {rows[own][:8]} have one host name, {name}, and each sends by itself: no LOCAL_WORLD_SIZE"
        f" says that they share a machine. If they do, start them with torchrun, or pass machines=[{shown}]"
    )
