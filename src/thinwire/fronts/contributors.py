"""Contributors: the processes that still have input. `join` counts them, fronts divide by their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.utils.weak import WeakTensorKeyDictionary

# A stateless hook sees nothing of its model but the parameters in a bucket.
_scales: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


class Shadow(JoinHook):
    """Takes part, for a process without input, in what a join context's other processes send."""

    def __init__(self, front: Joinable, step: Callable[[], object], end: Callable[[bool], object]) -> None:
        super().__init__()
        self._front, self._step, self._end = front, step, end

    def main_hook(self) -> None:
        """Take part in a step of the others. Collective."""
        # Or the front would notify the join context that it has input, from within this context's own end.
        leave_join(self._front)
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the last active process's model to all. Collective."""
        leave_join(self._front)
        self._end(is_last_joiner)


def leave_join(front: Joinable) -> None:
    """Let a front's later steps notify no join context any more."""
    # Torch leaves that switched on: each later step would go on sending what the context needs.
    front._join_config = type(front._join_config).construct_disabled_join_config()


@contextmanager
def counted(parameters: Iterable[torch.Tensor], scale: torch.Tensor) -> Iterator[None]:
    """Divide gradients of `parameters` by the contributors, while this is open."""
    # A list: what is frozen or replaced meanwhile must be taken out again as well.
    before = [(each, _scales.get(each)) for each in parameters]
    for parameter, _ in before:
        _scales[parameter] = scale
    try:
        yield
    finally:
        for parameter, was in before:
            # A parameter that two models share is still the outer one's.
            if was is None:
                del _scales[parameter]
            else:
                _scales[parameter] = was


def divide_by_contributors(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Scale this process's gradients so that their mean over the group is that over contributors.

    Scaling what goes in, not what comes out, keeps the residual in one unit while the number of contributors
    changes.
    """
    if parameters and parameters[0] in _scales:
        flat.mul_(_scales[parameters[0]])
