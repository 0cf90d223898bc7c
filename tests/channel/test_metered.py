"""What is counted of each collective, and how long the host has waited."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch

from thinwire.channel import CollectiveTraffic, InProcessTransport, Metered, Traffic, Work, run_members
from thinwire.channel.transport import Collective
from thinwire.errors import CommunicationError

Counts: TypeAlias = dict[Collective, CollectiveTraffic]


def sent_by_all_collectives(num_members: int) -> list[Traffic]:
    members = InProcessTransport.group(num_members)

    def body(rank: int) -> Traffic:
        metered = Metered(members[rank])
        assert (metered.rank, metered.size) == (rank, num_members)
        assert metered.control_device == torch.device("cpu")
        mean, total, copied = torch.full((6,), float(rank)), torch.ones(3, dtype=torch.int64), torch.zeros(5)
        rows = torch.empty(num_members, 7, dtype=torch.uint8)
        exchanged = torch.empty(num_members, 2, dtype=torch.float16)
        for work in (
            metered.mean(mean, "a mean"),
            metered.all_reduce(total, "a sum"),
            metered.all_reduce(total.clone(), "a maximum", operation="max"),
            metered.all_gather(rows, torch.full((7,), rank, dtype=torch.uint8), "a gather"),
            metered.all_to_all(exchanged, torch.full_like(exchanged, rank), "an exchange"),
            metered.broadcast(copied, 0, "a copy"),
        ):
            work.wait()
        assert mean.tolist() == [(num_members - 1) / 2] * 6
        assert total.tolist() == [num_members] * 3
        assert rows[:, 0].tolist() == list(range(num_members))
        assert exchanged[:, 0].tolist() == list(range(num_members))
        return metered.traffic

    return run_members(num_members, body)


@pytest.mark.parametrize(
    ("num_members", "expected"),
    [
        (
            4,
            {
                "all_reduce": CollectiveTraffic(3, 24 + 24 + 24, 3 * 36),  # a ring: 2 · 3/4
                "all_gather": CollectiveTraffic(1, 14, 21),  # those of three others
                "all_to_all": CollectiveTraffic(1, 8, 12),  # all rows but its own
                "broadcast": CollectiveTraffic(1, 20, 20),
            },
        ),
        (
            1,
            {
                "all_reduce": CollectiveTraffic(3, 72),
                "all_gather": CollectiveTraffic(1, 3),
                "all_to_all": CollectiveTraffic(1, 2),
                "broadcast": CollectiveTraffic(1, 20),
            },
        ),
    ],
    ids=["four members", "one"],
)
def test_counts_by_collective(num_members: int, expected: Counts) -> None:
    """Messages as of an all-reduce that puts as much on the wire: of 4 members, 3/2 of its bytes."""
    for traffic in sent_by_all_collectives(num_members):
        assert dict(traffic.by_collective) == expected
        assert traffic.messages == 6
        assert traffic.message_bytes == sum(each.message_bytes for each in expected.values())


def test_counts_go_on_where_another_transport_takes_over() -> None:
    traffic = Traffic()
    for _ in range(2):
        (alone,) = InProcessTransport.group(1)
        Metered(alone, traffic).mean(torch.zeros(2), "a test").wait()
    assert dict(traffic.by_collective) == {"all_reduce": CollectiveTraffic(2, 16)}


class Clock:
    """A work that takes as long as it is told; so long does the host wait."""

    now = 0.0

    def wait(self) -> None:
        self.now += 1.5
        raise RuntimeError("the backend failed")


def test_waiting_is_timed_even_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("thinwire.channel.metered.time.perf_counter", lambda: clock.now)

    class Failing(InProcessTransport):
        def mean(self, tensor: torch.Tensor, purpose: str) -> Work:
            return clock

    (alone,) = Failing.group(1)
    metered = Metered(alone)
    work = metered.mean(torch.zeros(2), "a test")
    with pytest.raises(RuntimeError, match="the backend failed"):
        work.wait()
    assert metered.traffic.waiting_seconds == 1.5


def test_what_could_not_be_sent_is_not_counted() -> None:
    class Broken(InProcessTransport):
        def mean(self, tensor: torch.Tensor, purpose: str) -> Work:
            raise CommunicationError("the peer has gone")

    (alone,) = Broken.group(1)
    metered = Metered(alone)
    with pytest.raises(CommunicationError, match="the peer has gone"):
        metered.mean(torch.zeros(2), "a test")
    assert not metered.traffic.by_collective
    metered.all_reduce(torch.zeros(2), "a test").wait()
    assert metered.traffic.messages == 1
