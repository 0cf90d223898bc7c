"""Few entries by compiled passes: fp32 on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from thinwire.kernels.base import EntryKernels
from thinwire.kernels.numba import entry_passes
from thinwire.tensors.blocks import Chunks


class NumbaEntries(EntryKernels):
    """Compiled passes over all chunks of a bucket; see `EntryKernels` for what each method does."""

    def largest(self, flat: torch.Tensor, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
        """As `EntryKernels.largest`; of equal ones the first."""
        positions = torch.empty(chunks.count, chunks.kept, dtype=torch.int64)
        values = torch.empty(chunks.count, chunks.kept, dtype=torch.float32)
        entry_passes.select(
            flat.contiguous().data_ptr(),
            np.array([run.first for run in chunks.runs]),
            np.array([run.num_chunks for run in chunks.runs]),
            chunks.length,
            chunks.kept,
            positions.numpy(),
            values.numpy(),
        )
        return positions, values

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
        """As `EntryKernels.add`."""
        if places.numel():
            lowest, highest = torch.aminmax(places)
            # Compiled code writes wherever it is sent, and places come from other members.
            if lowest < 0 or highest >= len(result):
                raise IndexError(f"a member has sent an entry of place {int(highest)} of {len(result)}")
        entry_passes.merge(
            result.numpy(), places.numpy(), values.clone().numpy(), sent.numpy(), kept.numpy(), by_senders
        )
