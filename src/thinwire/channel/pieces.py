"""Long messages between two processes over Gloo, in pieces: both directions of the link are used at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.futures import Future

# Gloo sends a message before it asks for the other's, on one connection. So between two processes of which
# one comes later, as in training, whole messages would cross the link one after the other; pieces overlap.
# Shorter ones cost more at 1 Gbit/s than they win at 100 Mbit/s.
PIECE_BYTES, MAX_PIECES = 1 << 18, 8


@dataclass(frozen=True)
class Pieces:
    """Collectives that carry the pieces of one message, as one `dist.Work`."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        """As `dist.Work.wait`."""
        for each in self.works:
            each.wait()

    def get_future(self) -> Future[object]:
        """As `dist.Work.get_future`."""

        def finished(done: Future[list[Future[object]]]) -> None:
            # All have ended; it is `value` that raises what one has ended with.
            for each in done.value():
                each.value()

        return torch.futures.collect_all([each.get_future() for each in self.works]).then(finished)


def num_pieces(sent: torch.Tensor, size: int) -> int:
    """Return in how many pieces a message travels over Gloo."""
    return max(1, min(MAX_PIECES, sent.nbytes // PIECE_BYTES)) if size == 2 else 1


def gathered(
    rows: torch.Tensor,
    own: torch.Tensor,
    pieces: int,
    start: Callable[[list[torch.Tensor], torch.Tensor], dist.Work],
) -> dist.Work | Pieces:
    """Start an all-gather in so many pieces."""
    if pieces == 1:
        return start(list(rows), own)
    parts = zip(*(each.tensor_split(pieces) for each in (own, *rows)), strict=True)
    return Pieces([start(list(into), piece) for piece, *into in parts])


def swapped(
    received: torch.Tensor,
    sent: torch.Tensor,
    rank: int,
    pieces: int,
    start: Callable[[torch.Tensor, torch.Tensor, list[int]], dist.Work],
) -> dist.Work | Pieces:
    """Start an all-to-all in so many pieces."""
    if pieces == 1:
        return start(received, sent, [])
    # Between two: each has a row for the other one, and its own only changes places.
    other = 1 - rank
    into, rows = received.view(2, -1), sent.view(2, -1)
    into[rank].copy_(rows[rank])
    parts = zip(into[other].tensor_split(pieces), rows[other].tensor_split(pieces), strict=True)
    return Pieces(
        [start(to, piece, [piece.numel() * (each == other) for each in range(2)]) for to, piece in parts]
    )
