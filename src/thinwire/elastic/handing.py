"""What a newcomer starts from, from member to member: a header and tensors, in parts of bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.channel.reconfigurable import ReconfigurableTransport
from thinwire.elastic.plain import MAX_HEADER_BYTES, packed, sizes, unpacked
from thinwire.errors import StateError

__all__ = ["receive_state", "send_state"]

# So that between these two the timeout is one of a part, not of the whole: who stands still is found out, and
# a slow link is not taken for that. (The other members wait meanwhile, in one message.)
PART_BYTES = 1 << 22
PURPOSE = "handing a newcomer what it starts from"


def send_state(
    state: Mapping[str, Any], transport: ReconfigurableTransport, newcomers: Sequence[int]
) -> None:
    """Send a state to members that call `receive_state`, one after the other.

    Args:
        state: Tensors and plain values.
        transport: Over the group.
        newcomers: Their ranks.

    Raises:
        StateError: There is something else in it.
        CommunicationError: A message failed.
    """
    header, tensors = packed(state)
    described = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for newcomer in newcomers:
        transport.send(torch.tensor([len(header)]), newcomer, PURPOSE).wait()
        for tensor in [described, *tensors]:
            for part in torch.split(tensor, PART_BYTES):
                transport.send(part, newcomer, PURPOSE).wait()


def receive_state(transport: ReconfigurableTransport, source: int) -> Any:
    """Return the state that a member sends by `send_state`.

    Args:
        transport: Over the group.
        source: The rank of the member.

    Raises:
        StateError: What comes is not of that form, or too large.
        CommunicationError: A message failed.
    """
    length = torch.zeros(1, dtype=torch.int64)
    transport.receive(length, source, PURPOSE).wait()
    if not 0 < int(length) <= MAX_HEADER_BYTES:
        raise StateError(
            f"what the group sends to start from begins with a header of {int(length)} bytes, expected 1 to "
            f"{MAX_HEADER_BYTES}; install the same Thinwire on all members"
        )
    header = bytes(_received(int(length), transport, source).tolist())
    return unpacked(header, [_received(size, transport, source) for size in sizes(header)])


def _received(num_bytes: int, transport: ReconfigurableTransport, source: int) -> torch.Tensor:
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    for part in torch.split(tensor, PART_BYTES):
        transport.receive(part, source, PURPOSE).wait()
    return tensor
