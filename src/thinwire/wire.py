"""The bytes of a collective on the wire, and over Gloo its round trips.

Without torch: `thinwire advise` computes with these, and answers before torch would have been imported.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Collective: TypeAlias = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]

HEAD_BYTES = 1 << 19  # a rank sends this much at the same time: 40 ms at 100 Mbit/s
# Among more than two ranks, long messages use Gloo's ring, which was not slower than p2p.
MAX_P2P_SIZE, MAX_P2P_BYTES = 16, 1 << 20
# Longer sums use Gloo's own all-reduce, which runs in its thread during the backward pass.
MAX_P2P_SUM_OF_TWO_BYTES, MAX_P2P_SUM_BYTES = 1 << 22, 1 << 19
# A sum up to this size is sent whole to all peers, so that it takes one message: 5 ms at 100 Mbit/s.
MAX_GATHERED_SUM_BYTES = 1 << 16


def compression_ratio(gradient_bytes: float, message_bytes: float) -> float:
    """Return uncompressed over compressed bytes; 1.0 where nothing was sent."""
    return gradient_bytes / message_bytes if message_bytes else 1.0


def wire_bytes(collective: Collective, handed_bytes: int, members: int) -> int:
    """Return the bytes that each member sends, and receives, on the wire; for an all-reduce, as a ring.

    Examples:
        >>> [wire_bytes(kind, 300, 3) for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast")]
        [400, 600, 200, 300]
    """
    # A ring all-reduce is a reduce-scatter and an all-gather, each of (members − 1) / members.
    others = members - 1
    return {
        "all_reduce": 2 * handed_bytes * others // members,
        "all_gather": handed_bytes * others,
        "all_to_all": handed_bytes * others // members,
        "broadcast": handed_bytes if others else 0,
    }[collective]


def p2p_limits(kind: str, size: int) -> tuple[float, float]:
    """Return the most bytes sent whole to each peer, and the most bytes sent by p2p at all."""
    if size > MAX_P2P_SIZE:
        return 0, 0
    if kind == "all_reduce":
        if size <= 2:
            return MAX_P2P_SUM_OF_TWO_BYTES, MAX_P2P_SUM_OF_TWO_BYTES
        return MAX_GATHERED_SUM_BYTES / (size - 1), MAX_P2P_SUM_BYTES
    most = MAX_P2P_BYTES if kind == "all_gather" and size > 2 else math.inf
    return most, most


def round_trips_over_gloo(collective: Collective, handed_bytes: float, size: int) -> tuple[float, int]:
    """Return how many round trips a message waits, and the bytes of its head if its rest is requested."""
    whole, most = p2p_limits(collective, size)
    if handed_bytes > most:
        return (size - 1) * (2 if collective == "all_reduce" else 1), 0
    if handed_bytes > whole:
        return 1.0, 0
    sent_bytes = (size - 1) * handed_bytes / (size if collective == "all_to_all" else 1)
    return 0.5, HEAD_BYTES if sent_bytes > HEAD_BYTES else 0
