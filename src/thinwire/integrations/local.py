"""Alternatives to an algorithm for a framework's training loop: averaged models, or a choice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any, TypeAlias, TypeGuard

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thinwire.adapters.attach import attach
from thinwire.adapters.ddp_model import ddp_inside
from thinwire.advice.automatic import Auto, auto
from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import no_algorithm
from thinwire.comm import Layout
from thinwire.errors import ConfigError
from thinwire.local_sgd import elastic_local_sgd as elastic
from thinwire.local_sgd.averager import ModelAverager
from thinwire.sync import Settings
from thinwire.sync.settings import HostCheck, OnNonfinite

A_LOCAL = "a thinwire.LocalSGD, such as functools.partial(thinwire.DiLoCo, every_steps=30)"
# Such as that, the same of thinwire.elastic, or thinwire.auto.
Makes: TypeAlias = "Callable[..., ModelAverager] | Callable[..., Auto]"


def checked_averaging(given: object) -> Algorithm | Makes:
    """Return how a framework's runs are averaged: an algorithm, a `LocalSGD`'s maker, or `thinwire.auto`."""
    # An algorithm's class can be called, too, and is a mistake.
    makes_local = callable(given) and (not isinstance(given, type) or issubclass(given, ModelAverager))
    if not (isinstance(given, Algorithm) or makes_local):
        such = "an algorithm such as thinwire.PowerSGD(matrix_rank=4), thinwire.auto"
        raise ConfigError(f"expected {such}, or what makes {A_LOCAL}, got {no_algorithm(given)}")
    if isinstance(given, partial):
        # It is called when the job has started and the model is wrapped: late for a mistyped name.
        takes = signature(given.func)
        own = {
            name: parameter
            for name, parameter in takes.parameters.items()
            if parameter.kind != Parameter.VAR_KEYWORD
        }
        # `auto` hands on what it does not take itself, and so does a `DiLoCo`.
        base = given.func.__base__ if isinstance(given.func, type) else None
        handed_to = attach if makes_auto(given) else base
        if handed_to is not None and len(own) < len(takes.parameters):
            others = [
                parameter
                for parameter in signature(handed_to).parameters.values()
                if parameter.name not in own
            ]
            takes = Signature([*own.values(), *(e for e in others if e.kind is Parameter.KEYWORD_ONLY)])
        try:
            takes.bind_partial(*given.args, **given.keywords)
        except TypeError as error:
            name = getattr(given.func, "__name__", given.func)
            raise ConfigError(f"{name} {error}; it takes {', '.join(takes.parameters)}") from error
    return given  # type: ignore[return-value]


def checked_steps(
    take_effect: bool, host_check: HostCheck, on_nonfinite: OnNonfinite, machines: Layout
) -> dict[str, Any]:
    """Return the settings to give `thinwire.attach`, if it is called: those that are not its defaults."""
    settings = Settings.of(grad_scaler=None, host_check=host_check, on_nonfinite=on_nonfinite)
    chosen = {"host_check": settings.host_check, "on_nonfinite": settings.on_nonfinite}
    defaults = Settings.of()
    steps: dict[str, Any] = {key: value for key, value in chosen.items() if value != getattr(defaults, key)}
    if machines is not True:
        steps["machines"] = machines
    if steps and not take_effect:
        where = "the hook's state, or to what is called: functools.partial(thinwire.auto, on_nonfinite=…)"
        raise ConfigError(f"{', '.join(steps)} would have no effect here; give it to {where}")
    return steps


def makes_auto(given: object) -> TypeGuard[Callable[..., Auto]]:
    """Return whether it is `thinwire.auto`, or a `functools.partial` of it."""
    while isinstance(given, partial):
        given = given.func
    return given is auto


def new_auto(
    make: Callable[..., Auto], model: object, optimizer: object, total_steps: float, **settings: Any
) -> Auto:
    """Return the `Auto` that chooses for a framework's run of so many steps (`math.inf`: not known)."""
    if 0 < total_steps < math.inf:
        settings["total_steps"] = int(total_steps)
    # The user's own settings come first.
    return make(model, optimizer, **settings | getattr(make, "keywords", {}))


def makes_elastic(given: object) -> bool:
    """Return whether it is a member that comes and goes, or a `functools.partial` of one's class."""
    while isinstance(given, partial):
        given = given.func
    return isinstance(given, type) and issubclass(given, elastic.LocalSGD)


def new_local(make: Makes, model: object, optimizer: object, grad_scaler: GradScaler | None) -> ModelAverager:
    """Return the `LocalSGD` of a model that a framework has wrapped; not entered yet."""
    # A LocalSGD averages buffers with the model: DDP, whose default frameworks leave, must not send them at
    # every forward pass. (Their own option for it is deprecated by torch.)
    ddp = ddp_inside(model)
    sending = ddp if ddp is not None and ddp.broadcast_buffers else None
    if sending is not None:
        sending.broadcast_buffers = False
    # Accelerate's and Lightning's wrappers don't take hooks; both have the user's own inside.
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    try:
        local = make(model, optimizer, grad_scaler=grad_scaler)
        if not isinstance(local, ModelAverager):
            raise ConfigError(f"expected a function that makes {A_LOCAL}, but it made {local!r}")
    except BaseException:
        if sending is not None:
            sending.broadcast_buffers = True
        raise
    return local


def catch_up(scheduler: object, steps: int) -> None:
    """Let a scheduler that steps with the optimizer stand where a member that has joined does."""
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return
    missing = steps - scheduler.last_epoch
    if missing <= 0:
        return
    # The member was given the others' rates, and many schedules multiply the last one.
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(missing):
            scheduler.step()
