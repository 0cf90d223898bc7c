"""Counting steps: those an optimizer takes, and those a `GradScaler` skips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

__all__ = ["calling_after_steps"]


@contextmanager
def calling_after_steps(
    optimizer: torch.optim.Optimizer, grad_scaler: GradScaler | None, after_step: Callable[[], None]
) -> Iterator[None]:
    """Call `after_step` after every attempted step of `optimizer`, until the context ends.

    Args:
        optimizer: Its own hook sees the steps it takes.
        grad_scaler: Does not call the optimizer when it skips, and torch has no hook for that: for as long
            as the context lasts, `step` is replaced on this one object.
        after_step: Takes no arguments.
    """
    is_in_scaler = False

    def hook(*_: object) -> None:
        if not is_in_scaler:
            after_step()

    with ExitStack() as attached:
        attached.callback(optimizer.register_step_post_hook(hook).remove)
        if grad_scaler is not None:
            step, attributes = grad_scaler.step, vars(grad_scaler)

            def counted(stepped: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
                nonlocal is_in_scaler
                # The optimizer's own hook must not count the step that the scaler may let it take.
                is_in_scaler = stepped is optimizer
                try:
                    result = step(stepped, *args, **kwargs)
                finally:
                    is_in_scaler = False
                if stepped is optimizer:
                    after_step()
                return result

            # Somebody else may have replaced it on this object before. The stack unwinds from its end: first
            # ours is taken off, then theirs is put back.
            attached.callback(attributes.update, {k: v for k, v in attributes.items() if k == "step"})
            attached.callback(attributes.pop, "step")
            attributes["step"] = counted
        yield
