"""Members of a group in one process: they take turns, and what goes wrong is named instead of hanging."""

from __future__ import annotations

import ctypes
from _thread import interrupt_main
from collections.abc import Callable

import pytest
import torch

from comm.every_collective import check_every_collective
from thinwire.comm import InProcessTransport, Metered, Recording, Transport, run_members
from thinwire.errors import CommunicationError


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("wrapped", [lambda transport: transport, Recording, Metered])
def test_every_collective_carries_every_type(size: int, wrapped: Callable[[Transport], Transport]) -> None:
    members = InProcessTransport.group(size)
    run_members(size, lambda rank: check_every_collective(wrapped(members[rank])))
    for enabled in (True, False):  # members have the caller's grad mode
        with torch.set_grad_enabled(enabled):
            assert run_members(size, lambda _: torch.is_grad_enabled()) == [enabled] * size


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
    assert [f"round 2: members [{guilty}] of 3 have not sent message 2" in it for it in learned] == [True] * 2
    with pytest.raises(CommunicationError, match="round 1: an error, or Ctrl-C, has ended this group"):
        run_members(3, body)  # of which the guilty one has sent less


@pytest.mark.parametrize(
    "send",
    [
        lambda member, rank: member.mean(torch.zeros(3 + rank), "a test"),
        lambda member, rank: member.mean(torch.zeros(3, dtype=[torch.half, torch.float][rank]), "a test"),
        lambda member, rank: member.all_reduce(torch.zeros(3), "a test", operation=["sum", "max"][rank]),
        lambda member, rank: member.broadcast(torch.zeros(3), rank, "a test"),
        lambda it, rank: [it.all_gather, it.all_to_all][rank](torch.zeros(2, 3), torch.zeros(2, 3), "a test"),
    ],
)
def test_unlike_messages_are_refused(send: Callable[[InProcessTransport, int], object]) -> None:
    members = InProcessTransport.group(2)
    with pytest.raises(CommunicationError, match=r"message 1 differs between members: member 1 sends"):
        run_members(2, lambda rank: send(members[rank], rank))


def test_waiting_outside_run_members_is_refused_and_not_hung() -> None:
    with pytest.raises(CommunicationError, match=r"members \[1\] of 2 have not sent.*run_members"):
        InProcessTransport.group(2)[0].mean(torch.zeros(3), "a test").wait()


def test_a_group_that_ctrl_c_has_left_in_the_middle_is_not_used_again() -> None:
    members = InProcessTransport.group(2)

    def body(rank: int) -> None:
        for _ in range(2):
            members[rank].mean(torch.ones(1), "a test").wait()
            if rank:
                interrupt_main()

    for error in (KeyboardInterrupt, CommunicationError):
        with pytest.raises(error):
            run_members(2, body)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "omp_get_max_threads"), reason="needs torch's OpenMP")
def test_members_compute_with_the_number_of_threads_that_torch_was_told() -> None:
    """Matrix products ask OpenMP: with a thread for each core, a step on one core took 100 times as long."""
    threads = run_members(2, lambda _: ctypes.CDLL(None).omp_get_max_threads())
    assert threads == [torch.get_num_threads()] * 2
