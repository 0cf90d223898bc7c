"""Contributors: the processes that still have input. `join` counts them, fronts divide by their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["counted", "divide_by_contributors", "members_over_contributors"]

# A stateless hook sees nothing of its model but the parameters in a bucket.
_shares = WeakTensorKeyDictionary()


@contextmanager
def counted(parameters: Iterable[torch.Tensor], share: torch.Tensor) -> Iterator[None]:
    """While this is open, gradients of `parameters` are divided by the contributors.

    Args:
        parameters: Of one model.
        share: Members of the group over contributors, shape (1,), kept up to date by the caller.
    """
    held = list(parameters)
    for parameter in held:
        _shares[parameter] = share
    try:
        yield
    finally:
        for parameter in held:
            del _shares[parameter]


def members_over_contributors(joinable: Joinable) -> torch.Tensor | None:
    """Tell the join context that this process contributes, and learn how many do: shape (1,).

    None outside a join context, and where another joinable tells.
    """
    work = Join.notify_join_context(joinable)
    if work is None:
        return None
    (contributors,) = work.get_future().wait()
    return joinable.join_process_group.size() / contributors  # type: ignore[no-any-return]


def divide_by_contributors(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """For fronts: scale this process's gradients so that their mean over the group is that over contributors.

    Scaling what goes in, not what comes out, keeps what is owed in one unit while the number of contributors
    changes: a debt is paid as it was made.

    Args:
        parameters: Of the bucket.
        flat: Their gradients, in place.
    """
    if parameters and parameters[0] in _shares:
        flat.mul_(_shares[parameters[0]])
