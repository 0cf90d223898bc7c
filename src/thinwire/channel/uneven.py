"""Uneven inputs: how processes of a `torch.distributed` join context learn how many still have input."""

from __future__ import annotations

import torch
from torch.distributed.algorithms.join import Join, Joinable


def members_over_contributors(joinable: Joinable) -> torch.Tensor | None:
    """Tell the join context that this process contributes, and learn how many do: shape (1,).

    None outside a join context, and where another joinable speaks for this process.
    """
    # It begins the step's messages: who has no input comes in with it, and shadows what follows.
    work = Join.notify_join_context(joinable)
    if work is None:
        return None
    # The join context has asked already; to ask once more would send a message that nobody shadows.
    (contributors,) = work.get_future().wait()
    # Torch counts in its default type, in which 4/3 would be rounded where that is bf16.
    return joinable.join_process_group.size() / contributors.float()  # type: ignore[no-any-return]


def notify_of_step(joinable: Joinable) -> None:
    """Tell the join context, if there is one, that this process has made a step with input."""
    Join.notify_join_context(joinable)
