"""What a recording transport notes, and that it changes nothing."""

from __future__ import annotations

import torch

from thinwire.channel import InProcessTransport, Note, Recording, run_members


def test_every_collective_is_noted_and_carried() -> None:
    members = InProcessTransport.group(2)

    def body(rank: int) -> list[Note]:
        recording = Recording(members[rank])
        assert (recording.rank, recording.size) == (rank, 2)
        assert recording.control_device == torch.device("cpu")
        mean, largest, copied = torch.tensor([2.0 * rank]), torch.tensor([rank]), torch.tensor([rank == 1])
        rows, exchanged = torch.empty(2, 3, dtype=torch.uint8), torch.empty(2, 4, dtype=torch.bfloat16)
        for work in (
            recording.mean(mean, "a mean"),
            recording.all_reduce(largest, "a maximum", operation="max"),
            recording.all_gather(rows, torch.full((3,), rank, dtype=torch.uint8), "a gather"),
            recording.all_to_all(exchanged, torch.full_like(exchanged, rank), "an exchange"),
            recording.broadcast(copied, 1, "a copy"),
        ):
            work.wait()
        assert (mean.item(), largest.item(), copied.item()) == (1.0, 1, True)
        assert rows.tolist() == [[0, 0, 0], [1, 1, 1]]
        assert exchanged.tolist() == [[0.0] * 4, [1.0] * 4]
        return recording.notes

    expected = [
        Note("all_reduce", (1,), torch.float32, "a mean"),
        Note("all_reduce", (1,), torch.int64, "a maximum"),
        Note("all_gather", (3,), torch.uint8, "a gather"),
        Note("all_to_all", (2, 4), torch.bfloat16, "an exchange"),
        Note("broadcast", (1,), torch.bool, "a copy"),
    ]
    assert run_members(2, body) == [expected, expected]
    assert [note.handed_bytes for note in expected] == [4, 8, 3, 16, 1]
