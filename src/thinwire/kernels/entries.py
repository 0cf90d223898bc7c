"""The protocol of kernels for few entries: which are the largest, and their mean."""

from __future__ import annotations

from typing import Protocol

import torch

from thinwire.tensors.chunks import Chunks


class EntryKernels(Protocol):
    """The arithmetic of averaging few entries, of the tensors that its backend serves: fp32 or fp64, flat.

    What members have sent comes out the same to the bit whatever the backend.
    """

    def largest(self, flat: torch.Tensor, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the entries of largest magnitude of each chunk: positions, ascending, and values.

        NaN counts as the largest, then infinity. Of equal ones any may be taken.

        Args:
            flat: The bucket, only read.
            chunks: Of it.

        Returns:
            Positions in the chunk, int64, and values, as `flat`; (chunks, kept).
        """

    def add(
        self,
        result: torch.Tensor,
        places: torch.Tensor,
        values: torch.Tensor,
        sent: torch.Tensor,
        kept: torch.Tensor,
        *,
        by_senders: bool,
    ) -> None:
        """Add what members have sent to zeros, member after member.

        Args:
            result: The bucket, zeros; written.
            places: In the bucket, int64, (members, entries); of each member no place twice.
            values: Of the entries, as `result`.
            sent: As they were sent: who has sent zero has sent nothing.
            kept: Entries of each chunk, int64, in the order of the entries.
            by_senders: Whether each sum is divided by the members that have sent something.
        """
