"""Weights that are loaded inside a context: no step has made their change, so it is not averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from thinwire.errors import StepError

LOADED = (
    "load_state_dict() of the model was called inside the context, as if steps had learnt it; load before "
    "you enter, or call average() on all processes before and after (not in an elastic group)"
)


class Loads:
    """Notes that the model's weights are loaded, and whether that has changed them."""

    def __init__(self) -> None:
        self._before: int | None = None  # a checksum from before the first of them; None if there is none
        self._checksum: Callable[[], int] = int

    @contextmanager
    def noted(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], checksum: Callable[[], int]
    ) -> Iterator[None]:
        """Note them while this is open, and refuse the optimizers' steps behind them."""
        self._checksum = checksum
        with ExitStack() as attached:
            for part in module.modules():  # any of them may be loaded by itself
                register: Any = part.register_load_state_dict_pre_hook
                attached.callback(register(_BeforeLoad(self._note)).remove)
            for optimizer in optimizers:
                attached.callback(optimizer.register_step_pre_hook(lambda *_: self.check()).remove)
            yield

    def _note(self) -> None:
        if self._before is None:
            self._before = self._checksum()

    def have_changed(self) -> bool:
        """Return whether the weights are others than before they were loaded."""
        # Others may have been loaded for an evaluation, and their own again after it.
        if self._before is not None and self._before == self._checksum():
            self.forget()
        return self._before is not None

    def check(self) -> None:
        """Refuse to go on with weights that were loaded."""
        if self.have_changed():
            raise StepError(LOADED)

    def forget(self) -> None:
        """Take what the model holds as it is."""
        self._before = None


class _BeforeLoad:
    """A module's hook; a copy of the module is in no context, and has one that does nothing."""

    def __init__(self, note: Callable[[], Any]) -> None:
        self._note = note

    def __call__(self, *_: object) -> None:
        self._note()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeLoad, (bool,)
