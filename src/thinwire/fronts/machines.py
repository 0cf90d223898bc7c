"""Several processes on a machine: what its network card sends then, which is not what one process sends."""

from __future__ import annotations

import os
import warnings
from collections import Counter

import torch.distributed as dist

from thinwire.algorithms.base import TravelsBy
from thinwire.channel import ProcessGroupTransport
from thinwire.sync import Engine


def card_bytes(message_bytes: float, travels_by: TravelsBy, machines: int, per_machine: int) -> float:
    """Return the bytes that leave a machine's network card.

    Sums and gathers are rings, which leave a machine once, however many processes it has. In an exchange each
    process sends to each other one; a gather brings the means back. `message_bytes` are those of a process,
    counted as of an all-reduce.
    """
    members = machines * per_machine
    ring = (members - 1) / members
    if travels_by == "exchange":
        return message_bytes * (per_machine * (1 - 1 / machines) + ring)
    return message_bytes * 2 * ring


def warn_of_shared_cards(engine: Engine, transport: ProcessGroupTransport) -> None:
    """Warn if processes of one machine each send between machines what one could send for all of them."""
    travels_by = engine.algorithm.travels_by
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    if travels_by == "sum" or transport.rank or not given.isdecimal() or int(given) < 2:
        return
    # Launchers number the processes of a job machine by machine.
    ranks = [dist.get_global_rank(transport.group, rank) for rank in range(transport.size)]
    places = Counter(rank // int(given) for rank in ranks)
    machines, per_machine = len(places), max(places.values())
    if machines < 2 or per_machine < 2:
        return
    routes = engine.plan.routes
    compressed = sum(route.message_bytes for route in routes if route.is_compressed)
    whole = engine.plan.message_bytes - compressed
    in_16_bits = 2 * sum(spec.numel for spec in engine.specs)

    def percent_of_16_bits(per_machine: int, compressed: float) -> float:
        sent = card_bytes(compressed, travels_by, machines, per_machine)
        sent += card_bytes(whole, "sum", machines, per_machine)
        return 100 * sent / card_bytes(in_16_bits, "sum", machines, per_machine)

    # A gather is counted with as many members as there are.
    alone = compressed / per_machine if travels_by == "gather" else compressed
    warnings.warn(
        f"{engine.algorithm} sends from every process to every other, and here {machines} machines have "
        f"{per_machine} processes each: a machine's network card sends "
        f"{percent_of_16_bits(per_machine, compressed):.0f} % of what 16 bits would take, and "
        f"{percent_of_16_bits(1, alone):.0f} % with one process on each machine. Use FSDP2 with one replica "
        "per machine, LocalSGD(subgroup=…) or PowerSGD; see docs/choosing.md, section Several processes on a "
        "machine",
        stacklevel=4,
    )
