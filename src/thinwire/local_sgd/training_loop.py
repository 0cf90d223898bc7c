"""Hooks on the user's loop: they count its steps, and direct a DDP model's gradients."""
# DDP compares a hook's annotations with the types themselves: no `from __future__ import annotations` here.

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import ATTACHED, DDPAdapter, Switch, switched
from thinwire.adapters.ddp_model import DetachedAdapter, check_options, names_of
from thinwire.errors import AttachError
from thinwire.local_sgd.schedule import Level
from thinwire.sync import Engine
from thinwire.torch_private import comm_hooks


@contextmanager
def after_each_step(
    optimizer: torch.optim.Optimizer, grad_scaler: GradScaler | None, after_step: Callable[[], None]
) -> Iterator[None]:
    """Call `after_step` after every attempted step of `optimizer`, until the context ends."""
    is_in_scaler = False

    # The hook runs behind the step, so that the parameters it finds are those after it.
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


@contextmanager
def driven_gradients(
    model: DistributedDataParallel, engines: Mapping[Level, Engine], current: Callable[[], Level | None]
) -> Iterator[None]:
    """Average the model's gradients over whom the schedule says; after the context over the group again."""
    names = names_of(model.module, model.parameters_to_ignore)
    adapters: dict[Level | None, DDPAdapter] = {
        level: DDPAdapter(engine, names, model) for level, engine in engines.items()
    }
    switch = switched(model, lambda: adapters.get(current()), taken_by="LocalSGD")
    try:
        yield
    finally:
        switch.free()


def check_ddp(model: DistributedDataParallel) -> None:
    """Refuse a DDP model that LocalSGD can't drive, or that would go on to send to all at every step."""
    # A copy of a DDP model still lists the hook that it has lost, with a `DetachedAdapter`.
    states = [state for _, state in comm_hooks(model) if not isinstance(state, DetachedAdapter)]
    if any(not isinstance(state, Switch) or state.taken_by == ATTACHED for state in states):
        raise AttachError(
            "the DDP model has a communication hook already, and DDP allows one only; pass LocalSGD a DDP "
            "model without one (it registers its own), or the plain module instead of the DDP model"
        )
    # DDP's own messages at every pass would go to all processes between averagings as well.
    if model.broadcast_buffers and any(True for _ in model.module.buffers()):
        option = "forward_sync_buffers" if hasattr(model, "forward_sync_buffers") else "broadcast_buffers"
        raise AttachError(
            "this DDP model sends its buffers to all processes at every forward pass; build it with "
            f"{option}=False (LocalSGD averages them)"
        )
    check_options(model)
    if model.find_unused_parameters:
        raise AttachError(
            "find_unused_parameters=True makes DDP ask all processes at every step; build the DDP model "
            "without it, or pass the plain module instead of the DDP model"
        )
