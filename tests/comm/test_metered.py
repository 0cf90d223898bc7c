"""What is counted of messages, and how long the host has waited."""

from __future__ import annotations

import pytest
import torch

from thinwire.comm import InProcessTransport, Metered, Transport, run_members


def send_all_kinds(transport: Transport) -> None:
    """To be called on all members, which may be one."""
    rows = torch.empty(transport.size, 7, dtype=torch.uint8)
    exchanged = torch.empty(transport.size, 2, dtype=torch.float16)
    for work in (
        transport.mean(torch.zeros(6), "a mean"),
        transport.all_reduce(torch.ones(3, dtype=torch.int64), "a sum"),
        transport.all_reduce(torch.ones(3, dtype=torch.int64), "a maximum", operation="max"),
        transport.all_gather(rows, torch.zeros(7, dtype=torch.uint8), "a gather"),
        transport.all_to_all(exchanged, torch.zeros_like(exchanged), "an exchange"),
        transport.broadcast(torch.zeros(5), 0, "a copy"),
    ):
        work.wait()


@pytest.mark.parametrize(
    ("num_members", "message_bytes"), [(4, 24 + 24 + 24 + 14 + 8 + 20), (1, 24 + 24 + 24 + 3 + 2 + 20)]
)
def test_counts_messages_and_bytes(num_members: int, message_bytes: int) -> None:
    """As of an all-reduce that puts as much on the wire: of 4 members, 3/2 of its bytes."""
    members = [Metered(member) for member in InProcessTransport.group(num_members)]
    run_members(num_members, lambda rank: send_all_kinds(members[rank]))
    for traffic in (member.traffic for member in members):
        assert (traffic.messages, traffic.message_bytes) == (6, message_bytes)
        assert traffic.members == num_members
