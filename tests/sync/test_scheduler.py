"""The driver of requests: what travels together, in which order, what is computed jointly and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from thinwire.algorithms import AllGather, AllToAll, Commit, Jointly, Mean, Requests
from thinwire.comm import InProcessTransport, Note, Recording, Transport, run_members
from thinwire.errors import ConfigError
from thinwire.sync.scheduler import CollectiveScheduler

BUCKETS = ("first", "second", "third")


def healthy() -> Commit:
    return Commit(lambda: torch.tensor(True))


def alone() -> Recording:
    return Recording(InProcessTransport.group(1)[0])


def at_commit(
    *buckets: Requests, transport: Transport | None = None, closing: Sequence[Requests] = ()
) -> CollectiveScheduler:
    """An exchange that has come to its commit."""
    exchange = CollectiveScheduler(transport or alone(), "step 0")
    for name, requests in zip(BUCKETS, buckets, strict=False):
        exchange.start(requests, name)
    for requests in closing:
        exchange.close_with(requests)
    while exchange.advance():
        pass
    assert all(task.gate is not None for task in exchange.tasks)
    return exchange


def driven(buckets: Sequence[Requests], transport: Transport, closing: Sequence[Requests] = ()) -> None:
    """Bring an exchange to its commit, and let it pass that."""
    exchange = at_commit(*buckets, transport=transport, closing=closing)
    assert bool(exchange.is_healthy())
    exchange.commit(exchange.tasks)
    exchange.commit_closing()


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


def test_a_bucket_that_has_ended_waits_for_the_others() -> None:
    events: list[str] = []

    def bucket(name: str, rounds: int) -> Requests:
        for _ in range(rounds):
            yield Mean(torch.zeros(2))
        events.append(f"{name} at its commit")
        yield healthy()
        events.append(f"{name} writes")

    transport = alone()
    driven([bucket("first", 0), bucket("second", 3), bucket("third", 1)], transport)
    assert [note.shape for note in transport.notes] == [(2,)] * 4
    assert events == [
        "first at its commit", "third at its commit", "second at its commit",
        "first writes", "second writes", "third writes",
    ]  # fmt: skip


def noting(calls: list[list[int]], function: Callable[[int], int]) -> Callable[[list[int]], list[int]]:
    """A function for `Jointly` that notes the items of each call."""

    def called(items: list[int]) -> list[int]:
        calls.append(list(items))
        return [function(item) for item in items]

    return called


def test_requests_of_one_function_are_computed_in_one_call_for_all_buckets() -> None:
    calls: list[list[int]] = []
    doubled, negated = noting(calls, lambda item: 2 * item), noting(calls, lambda item: -item)
    answers: list[list[int]] = []

    def bucket(items: list[int], function: Callable[[list[Any]], Sequence[Any]], kind: str = "") -> Requests:
        yield Mean(torch.zeros(1))
        found = yield Jointly(function, items, kind)
        found = yield Jointly(doubled, found, kind)
        answers.append(found)
        yield healthy()

    driven([bucket([1, 2], doubled), bucket([], doubled), bucket([3], negated)], alone())
    assert answers == [[4, 8], [], [-6]]
    assert calls == [[1, 2], [2, 4], [3], [-3]]
    calls.clear()  # what is of different kinds is computed apart
    driven([bucket([1], doubled, "a"), bucket([2], doubled, "b"), bucket([3], doubled, "a")], alone())
    assert calls == [[1, 3], [2, 6], [2], [4]]


@pytest.mark.parametrize("rounds", [1, 2])
def test_closing_requests_travel_with_the_second_round_and_commit_last(rounds: int) -> None:
    """In the type of the means that are sent anyway; in their own where none is."""
    events: list[str] = []

    def bucket() -> Requests:
        for _ in range(rounds):
            yield Mean(torch.ones(2, dtype=torch.bfloat16))
        yield healthy()
        events.append("bucket")

    def closing() -> Requests:
        mean = yield Mean(torch.tensor([0.0, 1.0, 1.0]))
        assert mean.tolist() == [0.0, 1.0, 1.0]
        yield healthy()
        events.append("closing")

    transport = alone()
    driven([bucket()], transport, [closing()])
    expected = (
        [("all_reduce", torch.bfloat16, (2,)), ("all_reduce", torch.float32, (3,))]
        if rounds == 1
        else [("all_reduce", torch.bfloat16, (2,)), ("all_reduce", torch.bfloat16, (5,))]
    )
    assert sent(transport.notes) == expected
    assert events == ["bucket", "closing"]


def asks(request: Any) -> Requests:
    yield request


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "integers": (lambda: asks(Mean(torch.zeros(2, dtype=torch.int64))), "expected a floating type"),
    "every second": (lambda: asks(Mean(torch.zeros(8)[::2])), "expected a contiguous tensor; send tensor"),
    "matrix to gather": (lambda: asks(AllGather(torch.zeros(2, 3))), "expected a flat tensor"),
    "rows": (lambda: asks(AllToAll(torch.zeros(3, 4))), "expected a row for each of the 1 members"),
    "unknown": (lambda: asks("all of it"), "'all of it', expected Mean, AllGather or AllToAll"),
    "sparse": (lambda: asks(AllGather(torch.zeros(2).to_sparse())), "expected a dense tensor"),
    "a list": (lambda: asks(AllGather([1.0])), "AllGather of list, expected a dense tensor"),  # type: ignore[arg-type]
    "no generator": (lambda: None, "NoneType, expected a generator; yield each request"),
    "no function": (lambda: (yield Commit(torch.tensor(True))), "Commit takes a function, got Tensor"),  # type: ignore[arg-type]
    "gate in a tuple": (
        lambda: asks((Mean(torch.zeros(1)), healthy())),
        r"requested Commit\(.*expected Mean",
    ),
    "too few results": (
        lambda: asks(Jointly(lambda items: items[1:], [1, 2])),
        "one for each of its 2 items",
    ),
    "no commit": (lambda: asks(AllGather(torch.zeros(0))), "ended without Commit"),
    "a bool": (lambda: asks(Commit(lambda: True)), "returned bool, expected a tensor of one"),  # type: ignore[arg-type, return-value]
    "a number": (lambda: asks(Commit(lambda: torch.tensor(1.0))), "expected a tensor of one bool"),
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
