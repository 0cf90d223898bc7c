"""The driver of requests: what travels together, in which order, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from thinwire.algorithms import AllGather, AllToAll, Commit, Jointly, Mean, Requests
from thinwire.comm import InProcessTransport, Note, Recording, Transport, run_members
from thinwire.errors import CommunicationError, ConfigError
from thinwire.sync.scheduler import CollectiveScheduler


def healthy() -> Commit:
    return Commit(lambda: torch.tensor(True))


def alone() -> Recording:
    return Recording(InProcessTransport.group(1)[0])


def driven(buckets: Sequence[Requests], transport: Transport) -> None:
    """Bring an exchange to its commit, and let it pass that."""
    exchange = CollectiveScheduler(transport, "step 0")
    for requests in buckets:
        exchange.start(requests, "bucket", rounds=2)
    while exchange.advance():
        pass
    assert all(task.commit is not None for task in exchange.tasks)
    assert bool(exchange.is_healthy())
    exchange.commit(exchange.tasks)


def sent(notes: Sequence[Note]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(note.collective, note.dtype, note.shape) for note in notes]


def test_messages_travel_together_by_operation_type_and_device() -> None:
    """Several at once, of several buckets; every answer reaches who has asked, in order."""
    members = InProcessTransport.group(2)

    def bucket(rank: int, number: int, answers: list[Any]) -> Requests:
        yield Mean(torch.zeros(1))
        base = 100.0 * number + 10 * rank
        answers.append(
            (
                yield (
                    AllGather(torch.tensor([base, base + 1])),
                    Mean(torch.full((2,), base)),
                    AllGather(torch.tensor([rank + number], dtype=torch.uint8)),
                    Mean(torch.full((1,), base, dtype=torch.bfloat16)),
                    AllToAll(torch.tensor([[base], [base + 1]])),
                    Mean(torch.full((1,), base + 2)),
                )
            )
        )
        yield healthy()

    def body(rank: int) -> tuple[list[Any], list[Note]]:
        recording, answers = Recording(members[rank]), list[Any]()
        driven([bucket(rank, number, answers) for number in range(2)], recording)
        return answers, recording.notes[2:]

    results = run_members(2, body)
    for rank, (answers, notes) in enumerate(results):
        assert sent(notes) == [
            ("all_reduce", torch.bfloat16, (2,)),
            ("all_gather", torch.float32, (4,)),
            ("all_to_all", torch.float32, (2, 2)),
            ("all_reduce", torch.float32, (6,)),
            ("all_gather", torch.uint8, (2,)),
        ]
        for number, (rows, means, integers, halves, parts, last) in enumerate(answers):
            base = 100.0 * number
            assert rows.tolist() == [[base, base + 1], [base + 10, base + 11]]
            assert means.tolist() == [base + 5] * 2
            assert integers.tolist() == [[number], [number + 1]]
            assert integers.dtype == torch.uint8
            assert halves.tolist() == [torch.tensor(base + 5).bfloat16().item()]
            assert parts.tolist() == [[base + rank], [base + 10 + rank]]
            assert last.tolist() == [base + 7]
    assert results[0][1] == results[1][1]  # the same messages in the same order


def asks(request: Any) -> Requests:
    yield request


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "integers": (lambda: asks(Mean(torch.zeros(2, dtype=torch.int64))), "expected a floating type"),
    "rows": (lambda: asks(AllToAll(torch.zeros(3, 4))), "expected a row for each of the 1 members"),
    "unknown": (lambda: asks("all of it"), "'all of it', expected Mean, AllGather or AllToAll"),
    "sparse": (lambda: asks(AllGather(torch.zeros(2).to_sparse())), "expected a dense tensor"),
    "too few results": (
        lambda: asks(Jointly(lambda items: items[1:], [1, 2])),
        "one for each of its 2 items",
    ),
    "no commit": (lambda: asks(AllGather(torch.zeros(0))), "ended without Commit"),
    "a bool": (lambda: asks(Commit(lambda: True)), "returned bool, expected a tensor of one"),  # type: ignore[arg-type, return-value]
    "behind the gate": (
        lambda: (request for request in (healthy(), Mean(torch.zeros(1)))),
        "after its Commit",
    ),
}


@pytest.mark.parametrize(("requests", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_can_not_be_served_is_refused_before_anything_is_sent(
    requests: Callable[[], Requests], words: str
) -> None:
    transport = alone()
    with pytest.raises(ConfigError, match=words):
        driven([requests()], transport)
    assert not any(note.handed_bytes for note in transport.notes)


def test_a_message_in_flight_is_waited_for_if_the_next_one_of_its_round_is_refused() -> None:
    transport = Recording(Mock(size=1, start=Mock(side_effect=[Mock(), CommunicationError("refused")])))
    exchange = CollectiveScheduler(transport, "step 0")
    both = asks((AllToAll(torch.zeros(1, 2)), AllGather(torch.zeros(2))))
    with pytest.raises(CommunicationError, match="refused"):
        exchange.start(both, "bucket", rounds=1)
    exchange.close()
    exchange.drain()
    assert [note.awaited_at is None for note in transport.notes] == [False, True]


def test_pipelined_buckets_too_are_advanced_together_until_they_are_finished() -> None:
    """A delayed averaging spreads over its steps as many rounds as the last one took."""

    def bucket() -> Requests:
        yield Mean((yield Mean(torch.zeros(1))))
        yield healthy()

    for next_of, rounds in ((CollectiveScheduler.advance, 2), (CollectiveScheduler.advance_next, 4)):
        exchange = CollectiveScheduler(alone(), "step 0", pipelined=True)
        for _ in range(3):
            exchange.start(bucket(), "bucket", rounds=2)
        assert 1 + sum(iter(partial(next_of, exchange), False)) == rounds
