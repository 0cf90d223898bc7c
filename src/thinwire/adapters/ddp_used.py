"""The parameters that a DDP model's backward passes use: with `find_unused_parameters` DDP counts, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from thinwire.adapters.ddp_model import accumulator_of


class Used:
    """Parameters that some backward pass has given a gradient since the last step, passes in `no_sync` too.

    Of the others DDP leaves `.grad` alone, whatever that holds: their means are applied nowhere. That a
    gradient is there, and not zero, does not tell: it may be of an earlier step, or of an earlier pass.
    """

    # Counted as DDP's reducer counts, by its own condition. It does not tell before the last bucket is
    # averaged.

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._ids: set[int] = set()
        # Hooks of the pass under way, or of passes before this was made, may have gone by unseen.
        self._is_complete = False
        self._handles = [self._noted(parameter) for parameter in parameters if can_have_gradient(parameter)]

    def _noted(self, parameter: torch.nn.Parameter) -> RemovableHandle:
        # No reference to `self`: the reducer holds the node, and with it the hook, out of sight of Python's
        # garbage collector.
        ids = self._ids

        def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
            # A node may be called with nothing to add.
            if gradients[0] is not None or parameter.grad is not None:
                ids.add(id(parameter))

        return accumulator_of(parameter).register_prehook(note)

    def of(self, parameters: Sequence[torch.Tensor], *, is_pass: bool) -> list[bool] | None:
        """Return which of a bucket's parameters were used; None if that is not known yet."""
        if not is_pass:  # a process without input shadows the others
            return [False] * len(parameters)
        return [id(parameter) in self._ids for parameter in parameters] if self._is_complete else None

    def forget(self) -> None:
        """Begin anew, after a step."""
        self._ids.clear()
        self._is_complete = True

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()


def can_have_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a parameter can be trained, now or once it is unfrozen."""
    return parameter.is_floating_point() or parameter.is_complex()
