"""Hooks on the user's loop, which count steps and notice loaded weights; checks of DDP models.

Functions with an `attached` register hooks, which are removed when it is closed.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.adapters.ddp import ATTACHED, Switch
from thinwire.adapters.ddp_model import DetachedAdapter, check_options
from thinwire.adapters.setup import live_objects, trains
from thinwire.comm import ProcessGroupTransport, Transport
from thinwire.errors import AttachError
from thinwire.torch_private import closure_not_compiled, comm_hooks, makes_state, not_compiled

logger = logging.getLogger(__name__)

LOADED = (
    "load_state_dict() of the model was called inside the context, so it would count as training; load "
    "before you enter, or call average() on all processes before and after (not in an elastic group)"
)


def call_after_steps(
    after_step: Callable[[], None],
    optimizers: Sequence[torch.optim.Optimizer],
    grad_scaler: GradScaler | None,
    attached: ExitStack,
) -> None:
    """Call `after_step` after every attempted step of an optimizer or one that it wraps.

    A step inside another's is a part of it: a scaler steps an optimizer, which steps one that it wraps. Each
    is also stepped alone, as SAM's `second_step` does with the wrapped one.
    """
    # A step that raises stays the outermost until it is tried again, and that attempt counts.
    outermost: Any = None

    @closure_not_compiled
    def before(stepping: object, *_: object) -> None:
        nonlocal outermost
        outermost = outermost or stepping

    @closure_not_compiled
    def after(stepping: Any, *given: Any) -> None:
        nonlocal outermost
        if stepping is outermost:
            outermost = None
            if not given or not makes_state(stepping, given[1]):
                after_step()

    for optimizer in optimizers:
        attached.enter_context(optimizer.register_step_pre_hook(before))
        attached.enter_context(optimizer.register_step_post_hook(after))
    if grad_scaler is None:
        return
    step, attributes = grad_scaler.step, vars(grad_scaler)

    def counted(stepped: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal outermost
        if stepped not in optimizers:
            return step(stepped, *args, **kwargs)
        before(grad_scaler)
        try:
            result = step(stepped, *args, **kwargs)
        except BaseException:
            outermost = None
            raise
        after(grad_scaler)
        return result

    # `step` may have been replaced on this object before. In reverse: ours is removed, then theirs restored.
    attached.callback(attributes.update, {k: v for k, v in attributes.items() if k == "step"})
    attached.callback(attributes.pop, "step")
    attributes["step"] = counted


def warn_of_uncounted_steps(
    owned: set[int],
    optimizers: Sequence[torch.optim.Optimizer],
    num_counted: Callable[[], int],
    attached: ExitStack,
) -> None:
    """Warn once if only other optimizers step the model: nothing would be averaged.

    `owned` has the ids of the model's parameters.
    """
    known = set(map(id, optimizers))
    # How many steps were counted at each other optimizer's last step, by its id; None after the warning.
    counts: dict[int, int] | None = {}

    @closure_not_compiled
    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal counts
        if counts is None or id(optimizer) in known or not trains(optimizer, owned):
            return
        if counts.get(id(optimizer)) == num_counted():
            counts = None
            logger.warning(
                "%s has stepped the model twice, and the given optimizers not once meanwhile: only their "
                "steps are counted, so models may never be averaged; pass all optimizers",
                type(optimizer).__name__,
            )
        else:
            counts[id(optimizer)] = num_counted()

    attached.enter_context(register_optimizer_step_post_hook(look))


def call_on_sigterm(action: Callable[[], None], attached: ExitStack) -> None:
    """Call an action when this process gets a SIGTERM, instead of ending it. Only in the main thread."""
    own = os.getpid()

    def handle(number: int, frame: object) -> None:
        if os.getpid() == own:
            action()
        else:  # forked inside the context: as outside of it
            signal.signal(number, restored)
            signal.raise_signal(number)

    previous = signal.signal(signal.SIGTERM, handle)
    # None is a handler that was not installed from Python; Python can't restore it.
    restored = signal.SIG_DFL if previous is None else previous
    attached.callback(signal.signal, signal.SIGTERM, restored)


class Hook:
    """A hook. A copied module is in no context, so its hooks do nothing."""

    def __init__(self, note: Callable[..., object] = lambda *_: None) -> None:
        self._note = note

    @not_compiled
    def __call__(self, *given: object) -> None:
        self._note(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def warn_of_ddp(module: nn.Module, transport: Transport, attached: ExitStack) -> None:
    """Warn once if DDP around a plain module averages its gradients over the group."""
    warned: list[DistributedDataParallel] = []

    def look(ddp: DistributedDataParallel, *_: object) -> None:
        averages = torch.is_grad_enabled() and ddp.require_backward_grad_sync and not comm_hooks(ddp)
        if warned or not averages or not isinstance(transport, ProcessGroupTransport) or transport.rank:
            return
        # DDP over fewer processes, such as those of a machine, leaves LocalSGD something to average.
        members, ddp_members = map(dist.get_process_group_ranks, (transport.group, ddp.process_group))
        if {*members} <= {*ddp_members}:
            warned.append(ddp)
            logger.warning(
                "DDP averages the gradients of this model in every step, so LocalSGD saves nothing: pass "
                "LocalSGD the DDP model instead of its module, or train inside model.no_sync()"
            )

    for ddp in live_objects(DistributedDataParallel):
        if ddp.module is module:
            attached.enter_context(ddp.register_forward_pre_hook(Hook(look)))


def check_ddp(model: DistributedDataParallel) -> None:
    """Refuse a DDP model that LocalSGD can't drive, or that would still send to all at every step."""
    # A copied DDP model still lists its lost hook, with a `DetachedAdapter`.
    states = [state for _, state in comm_hooks(model) if not isinstance(state, DetachedAdapter)]
    if any(not isinstance(state, Switch) or state.taken_by == ATTACHED for state in states):
        raise AttachError(
            "the DDP model already has a communication hook, and DDP allows only one; pass LocalSGD a DDP "
            "model without a hook (it registers its own), or the plain module"
        )
    # DDP would broadcast its buffers to all processes in every pass, between averagings too.
    if model.broadcast_buffers and any(True for _ in model.module.buffers()):
        option = "forward_sync_buffers" if hasattr(model, "forward_sync_buffers") else "broadcast_buffers"
        raise AttachError(
            f"this DDP model broadcasts its buffers in every forward pass; build it with {option}=False "
            "(LocalSGD averages them)"
        )
    check_options(model)
    if model.find_unused_parameters:
        raise AttachError(
            "find_unused_parameters=True makes DDP communicate in every step; build the DDP model without "
            "it, or pass the plain module instead of the DDP model"
        )
