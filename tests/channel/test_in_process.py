"""Members of a group in one process: they take turns, and what goes wrong is named instead of hanging."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from thinwire.channel import InProcessTransport, run_members
from thinwire.errors import CommunicationError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_gathered_dtype = pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)


def test_members_run_in_the_order_of_ranks_until_they_wait() -> None:
    members, events = InProcessTransport.group(3), []

    def body(rank: int) -> int:
        events.append(f"{rank} begins")
        work = members[rank].mean(torch.ones(1), "a test")
        work.wait()
        work.wait()  # again: nothing
        events.append(f"{rank} ends")
        return 10 * rank

    assert run_members(3, body) == [0, 10, 20]
    assert events == [
        "0 begins", "1 begins", "2 begins", "2 ends", "0 ends", "1 ends",
    ]  # fmt: skip


@pytest.mark.parametrize("interrupts_last", [False, True])
def test_ctrl_c_ends_all_members_before_it_goes_on(interrupts_last: bool) -> None:
    """The one that runs, the one that waits, and the one that has not begun."""
    members, ended = InProcessTransport.group(3), []
    threads: list[threading.Thread] = []

    def body(rank: int) -> None:
        threads.append(threading.current_thread())
        try:
            if rank == 1 + interrupts_last:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(10_000):  # as a computation does that sends nothing
                    time.sleep(0.001)
            members[rank].mean(torch.ones(1), "a test").wait()
        except KeyboardInterrupt:
            ended.append(rank)
            # What cleans up may send as well.
            with pytest.raises(KeyboardInterrupt):
                members[rank].mean(torch.ones(1), "a test").wait()
            raise

    with pytest.raises(KeyboardInterrupt):
        run_members(3, body)
    assert sorted(ended) == ([0, 1, 2] if interrupts_last else [0, 1])
    assert len(threads) == len(ended)
    assert not any(thread.is_alive() for thread in threads)


def test_a_group_of_one_needs_no_threads() -> None:
    (alone,) = InProcessTransport.group(1)

    def body(rank: int) -> tuple[int, float]:
        tensor = torch.tensor([3.0])
        alone.mean(tensor, "a test").wait()
        return threading.get_ident(), tensor.item()

    assert run_members(1, body) == [(threading.get_ident(), 3.0)]


@every_dtype
@pytest.mark.parametrize("numel", [0, 1, 5])
def test_all_reduce(dtype: torch.dtype, numel: int) -> None:
    members = InProcessTransport.group(3)

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.arange(numel).to(dtype) + rank
        largest = torch.arange(numel).to(dtype) * (rank if rank < 2 else 0)
        works = [
            members[rank].all_reduce(total, "a sum"),
            members[rank].all_reduce(largest, "a maximum", operation="max"),
        ]
        for work in reversed(works):  # in any order
            work.wait()
        return total, largest

    for total, largest in run_members(3, body):
        assert total.dtype == largest.dtype == dtype
        assert total.tolist() == [3 * each + 3 for each in range(numel)]
        assert largest.tolist() == list(range(numel))


def test_the_mean_does_not_overflow_where_the_sum_would() -> None:
    members = InProcessTransport.group(2)

    def body(rank: int) -> float:
        tensor = torch.full((1,), 60_000.0, dtype=torch.float16)
        members[rank].mean(tensor, "a test").wait()
        return tensor.item()

    assert run_members(2, body) == [60_000.0, 60_000.0]


@every_gathered_dtype
@pytest.mark.parametrize("numel", [0, 1, 4])
def test_all_gather_all_to_all_and_broadcast(dtype: torch.dtype, numel: int) -> None:
    members = InProcessTransport.group(3)

    def tensor_of(rank: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * rank + seed)
        return torch.randint(0, 200, (3, numel), generator=generator).to(dtype)

    def body(rank: int) -> list[torch.Tensor]:
        gathered, exchanged = torch.empty(2, 3, numel, dtype=dtype)
        copied = tensor_of(rank, 2)
        brought = [tensor_of(rank, 0)[0].clone(), tensor_of(rank, 1)]
        works = [
            members[rank].all_gather(gathered, brought[0], "a gather"),
            members[rank].all_to_all(exchanged, brought[1], "an exchange"),
            members[rank].broadcast(copied, 1, "a copy"),
        ]
        for work in works:
            work.wait()
        assert torch.equal(brought[0], tensor_of(rank, 0)[0])
        assert torch.equal(brought[1], tensor_of(rank, 1))
        return [gathered, exchanged, copied]

    for rank, (gathered, exchanged, copied) in enumerate(run_members(3, body)):
        assert torch.equal(gathered, torch.stack([tensor_of(other, 0)[0] for other in range(3)]))
        assert torch.equal(exchanged, torch.stack([tensor_of(other, 1)[rank] for other in range(3)]))
        assert torch.equal(copied, tensor_of(1, 2))


def test_several_groups_at_once() -> None:
    """Pairs and the whole, as hierarchies have them; each keeps its own order of messages."""
    everyone, pairs = InProcessTransport.group(4), [InProcessTransport.group(2) for _ in range(2)]

    def body(rank: int) -> list[float]:
        pair, whole = pairs[rank // 2][rank % 2], everyone[rank]
        of_pair, of_all = torch.tensor([float(rank)]), torch.tensor([float(rank)])
        late = whole.all_reduce(of_all, "of all")
        pair.all_reduce(of_pair, "of a pair").wait()
        late.wait()
        pair.all_reduce(of_pair, "of a pair").wait()
        return [of_pair.item(), of_all.item()]

    assert run_members(4, body) == [[2.0, 6.0], [2.0, 6.0], [10.0, 6.0], [10.0, 6.0]]


def test_members_that_wait_for_each_other_for_ever_are_named() -> None:
    members = InProcessTransport.group(3)

    def body(rank: int) -> None:
        if rank != 1:
            members[rank].mean(torch.ones(1), "step 7").wait()

    with pytest.raises(CommunicationError, match=r"step 7: members \[1\] of 3 have not sent .* \[0, 2\]"):
        run_members(3, body)


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_the_first_error_is_raised_and_those_who_wait_learn_why(guilty: int) -> None:
    members, learned = InProcessTransport.group(3), []

    def body(rank: int) -> None:
        members[rank].mean(torch.ones(1), "round 1").wait()
        if rank == guilty:
            raise ValueError(f"member {rank} is out of memory")
        try:
            members[rank].mean(torch.ones(1), "round 2").wait()
        except CommunicationError as error:
            learned.append(str(error))
            raise

    with pytest.raises(ValueError, match=f"member {guilty} is out of memory"):
        run_members(3, body)
    assert len(learned) == 2
    assert all(rf"round 2: members [{guilty}] of 3 have not sent message 2" in words for words in learned)


def test_a_member_may_catch_the_error_and_go_on() -> None:
    members, alone = InProcessTransport.group(2), InProcessTransport.group(2)

    def body(rank: int) -> str:
        try:
            if rank == 0:
                members[rank].mean(torch.ones(1), "round 1").wait()
        except CommunicationError:
            return "told"
        return "ended"

    assert run_members(2, body) == ["told", "ended"]
    assert [transport.size for transport in alone] == [2, 2]


@pytest.mark.parametrize(
    "send",
    [
        lambda member, rank: member.mean(torch.zeros(3 + rank), "a test"),
        lambda member, rank: member.mean(
            torch.zeros(3, dtype=[torch.float32, torch.float64][rank]), "a test"
        ),
        lambda member, rank: member.all_reduce(torch.zeros(3), "a test", operation=["sum", "max"][rank]),
        lambda member, rank: member.broadcast(torch.zeros(3), rank, "a test"),
        lambda member, rank: (
            member.all_gather(torch.zeros(2, 3), torch.zeros(3), "a test")
            if rank
            else member.mean(torch.zeros(3), "a test")
        ),
    ],
    ids=["shape", "type", "operation", "source", "collective"],
)
def test_unlike_messages_are_refused(send: Callable[[InProcessTransport, int], object]) -> None:
    members = InProcessTransport.group(2)
    with pytest.raises(CommunicationError, match=r"message 1 differs between members: member 1 sends"):
        run_members(2, lambda rank: send(members[rank], rank))


def test_waiting_outside_run_members_is_refused_and_not_hung() -> None:
    first, _ = InProcessTransport.group(2)
    with pytest.raises(CommunicationError, match=r"members \[1\] of 2 have not sent.*run_members"):
        first.mean(torch.zeros(3), "a test").wait()


def test_what_is_sent_may_be_taken_later_outside() -> None:
    """All have sent: nobody has to wait."""
    members = InProcessTransport.group(2)
    tensors = [torch.tensor([1.0]), torch.tensor([3.0])]
    works = [member.mean(tensor, "a test") for member, tensor in zip(members, tensors, strict=True)]
    for work in works:
        work.wait()
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]


@pytest.mark.parametrize("enabled", [True, False])
def test_members_have_the_callers_grad_mode(enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        assert run_members(3, lambda rank: torch.is_grad_enabled()) == [enabled] * 3


def test_no_thread_and_no_message_is_left() -> None:
    members, before = InProcessTransport.group(3), threading.active_count()

    def body(rank: int) -> None:
        for _ in range(5):
            members[rank].mean(torch.ones(2), "a test").wait()

    run_members(3, body)
    assert threading.active_count() == before
    assert members[0]._room.meetings == {}
