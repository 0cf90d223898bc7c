"""Copies of one member's tensors, and stacks of all members'."""

from __future__ import annotations

import pytest
import torch

from comm.every_collective import tensor_of
from thinwire.comm import (
    InProcessTransport,
    Recording,
    copy_from,
    gather_numbers,
    gather_stacked,
    run_members,
)
from thinwire.errors import CommunicationError


def tensors_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(3, 4, generator=generator).t(),  # not contiguous
        torch.tensor(float("nan")) if rank else torch.tensor(-0.0),
        torch.randint(0, 1 << 40, (5,), generator=generator),
        torch.rand(7, generator=generator) < 0.5,
        torch.randn(6, generator=generator).bfloat16().requires_grad_(),
        torch.empty(0, 3),
    ]


@pytest.mark.parametrize(("sources", "source"), [({0}, 0), ({2}, 2), ({0, 1}, 1), ({0, 1, 2}, 2)])
def test_all_become_what_the_source_has_to_the_bit(sources: set[int], source: int) -> None:
    """Of several sources the last one counts."""
    members = InProcessTransport.group(3)

    def body(rank: int) -> tuple[list[torch.Tensor], list[str]]:
        recording, tensors = Recording(members[rank]), tensors_of(rank)
        addresses = [tensor.data_ptr() for tensor in tensors]
        with torch.no_grad():
            copy_from(rank in sources, tensors, recording)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        return tensors, [note.collective for note in recording.notes]

    for tensors, collectives in run_members(3, body):
        for got, expected in zip(tensors, tensors_of(source), strict=True):
            assert got.dtype == expected.dtype
            got_bits, expected_bits = (
                tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (got, expected)
            )
            assert torch.equal(got_bits, expected_bits)
        assert collectives == ["all_reduce", "broadcast"]


def test_that_nobody_offers_is_told_on_all() -> None:
    members, heard = InProcessTransport.group(2), []

    def body(rank: int) -> None:
        tensor = torch.full((2,), float(rank))
        with pytest.raises(CommunicationError, match="no process of the group offers its tensors"):
            copy_from(False, [tensor], members[rank])
        assert tensor.tolist() == [rank, rank]
        heard.append(rank)

    run_members(2, body)
    assert sorted(heard) == [0, 1]


def test_numbers_come_by_rank_exact_as_doubles_are() -> None:
    members = InProcessTransport.group(3)
    gathered = run_members(3, lambda rank: gather_numbers([rank, 2.0**52 + rank], members[rank], "a test"))
    assert gathered == [[[rank, 2.0**52 + rank] for rank in range(3)]] * 3


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_stacks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    members = InProcessTransport.group(3)

    expected = torch.stack([tensor_of(rank, dtype, *shape) for rank in range(3)])
    for stacked in run_members(3, lambda rank: gather_stacked(tensor_of(rank, dtype, *shape), members[rank])):
        assert stacked.dtype == dtype
        assert torch.equal(stacked, expected)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.zeros(4, 2), r"\(4, 2\) torch\.float32"),
        (torch.zeros(4, 3, dtype=torch.float64), r"\(4, 3\) torch\.float64"),
    ],
    ids=["shape", "dtype"],
)
def test_different_tensors_are_refused_on_all_before_any_is_sent(other: torch.Tensor, words: str) -> None:
    members, heard = InProcessTransport.group(2), []

    def body(rank: int) -> None:
        recording = Recording(members[rank])
        with pytest.raises(CommunicationError, match=words) as caught:
            gather_stacked(other if rank else torch.zeros(4, 3), recording)
        assert len(recording.notes) == 1  # of the shapes
        heard.append(str(caught.value))

    run_members(2, body)
    assert len(heard) == 2
    assert all("process 0: (4, 3) torch.float32; process 1: " in said for said in heard)
    assert all("pad or cast first" in said for said in heard)
