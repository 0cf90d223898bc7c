"""Contributors: the processes that still have input. `join` counts them, fronts divide by their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["counted", "divide_by_contributors"]

# A stateless hook sees nothing of its model but the parameters in a bucket.
_shares = WeakTensorKeyDictionary()


@contextmanager
def counted(parameters: Iterable[torch.Tensor], share: torch.Tensor) -> Iterator[None]:
    """Divide gradients of `parameters` by the contributors, while this is open.

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


def divide_by_contributors(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Scale this process's gradients so that their mean over the group is that over contributors.

    Scaling what goes in, not what comes out, keeps the residual in one unit while the number of contributors
    changes.

    Args:
        parameters: Of the bucket.
        flat: Their gradients, in place.
    """
    if parameters and parameters[0] in _shares:
        flat.mul_(_shares[parameters[0]])
