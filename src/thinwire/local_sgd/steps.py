"""Counting steps: those an optimizer takes, and those a `GradScaler` skips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

__all__ = ["calling_after_steps"]


@contextmanager
def calling_after_steps(
    optimizer: torch.optim.Optimizer, grad_scaler: GradScaler | None, after_step: Callable[[], None]
) -> Iterator[None]:
    """Call `after_step` after every attempted step of `optimizer`, until the context ends.

    The optimizer's own hook sees the steps it takes. `GradScaler.step` does not call the optimizer when
    it skips, and torch has no hook for that: for as long as the context lasts, the scaler's `step` is
    replaced on this one object.
    """
    inside_scaler = False

    def hook(*_: object) -> None:
        if not inside_scaler:
            after_step()

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(stepped: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside_scaler
            if stepped is not optimizer:
                return step(stepped, *args, **kwargs)
            inside_scaler = True
            try:
                result = step(stepped, *args, **kwargs)
            finally:
                inside_scaler = False
            after_step()
            return result

        return counted

    handle = optimizer.register_step_post_hook(hook)
    try:
        if grad_scaler is None:
            yield
        else:
            with _replaced_step(grad_scaler, counting(grad_scaler.step)):
                yield
    finally:
        handle.remove()


@contextmanager
def _replaced_step(grad_scaler: GradScaler, step: Callable[..., Any]) -> Iterator[None]:
    attributes = vars(grad_scaler)
    before = {"step": attributes["step"]} if "step" in attributes else {}
    attributes["step"] = step
    try:
        yield
    finally:
        del attributes["step"]
        attributes.update(before)
