"""Alternatives to an algorithm for a framework's training loop: averaged models, or a choice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
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
from thinwire.local_sgd import elastic_members as elastic
from thinwire.local_sgd.averager import ModelAverager
from thinwire.sync import Settings
from thinwire.sync.settings import HostCheck, OnNonfinite
from thinwire.torch_private import takes_step_hooks

A_LOCAL = "a thinwire.LocalSGD, such as functools.partial(thinwire.DiLoCo, every_steps=30)"
# Such as that, the same of thinwire.elastic, or thinwire.auto.
Makes: TypeAlias = "Callable[..., ModelAverager] | Callable[..., Auto]"


def checked_averaging(averaging: object) -> Algorithm | Makes:
    """Return how a framework's runs are averaged: an algorithm, a `LocalSGD`'s maker, or `thinwire.auto`."""
    # An algorithm's class can be called, too, and is a mistake.
    makes_local = callable(averaging) and (
        not isinstance(averaging, type) or issubclass(averaging, ModelAverager)
    )
    if not (isinstance(averaging, Algorithm) or makes_local):
        raise ConfigError(
            f"got {no_algorithm(averaging)}, expected an algorithm such as thinwire.PowerSGD(matrix_rank=4), "
            f"thinwire.auto, or what makes {A_LOCAL}"
        )
    if isinstance(averaging, partial):
        # It is called when the job has started and the model is wrapped: late for a mistyped name.
        names = _names_taken(averaging.func)
        mistyped = [name for name in averaging.keywords if names and name not in names]
        if mistyped:
            function = getattr(averaging.func, "__name__", averaging.func)
            got = f"got an unexpected keyword argument {mistyped[0]!r}"
            raise ConfigError(f"{function} {got}; it takes {', '.join(names)}")
    return averaging  # type: ignore[return-value]


def _names_taken(function: Any) -> list[str]:
    """Return the arguments of a function or class by name; none if it may take any."""
    parameters = signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]
    if len(names) == len(parameters):
        return names
    # `auto` hands on what it does not take itself, and so does a `DiLoCo`.
    handed_to = attach if function is auto else getattr(function, "__base__", None)
    others = _names_taken(handed_to) if handed_to is not None else []
    return [*names, *(name for name in others if name not in names)] if others else []


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


def makes_auto(averaging: object) -> TypeGuard[Callable[..., Auto]]:
    """Return whether it is `thinwire.auto`, or a `functools.partial` of it."""
    while isinstance(averaging, partial):
        averaging = averaging.func
    return averaging is auto


def new_auto(
    make: Callable[..., Auto], model: object, optimizer: object, total_steps: float, **settings: Any
) -> Auto:
    """Return the `Auto` that chooses for a framework's run of so many steps (`math.inf`: not known)."""
    if 0 < total_steps < math.inf:
        settings["total_steps"] = int(total_steps)
    # The user's own settings come first.
    return make(model, optimizer, **settings | getattr(make, "keywords", {}))


def makes_elastic(averaging: object) -> bool:
    """Return whether it is a member that comes and goes, or a `functools.partial` of one's class."""
    while isinstance(averaging, partial):
        averaging = averaging.func
    return isinstance(averaging, type) and issubclass(averaging, elastic.LocalSGD)


def new_local(make: Makes, model: object, optimizer: object, grad_scaler: GradScaler | None) -> ModelAverager:
    """Return the `LocalSGD` of a model that a framework has wrapped; not entered yet."""
    # A LocalSGD averages buffers with the model: DDP, whose default frameworks leave, must not send them at
    # every forward pass. (Their own option for it is deprecated by torch.)
    ddp = ddp_inside(model)
    sending = ddp if ddp is not None and ddp.broadcast_buffers else None
    if sending is not None:
        sending.broadcast_buffers = False
    # Accelerate's and Lightning's wrappers don't take hooks; both have the user's own inside.
    while not takes_step_hooks(optimizer) and hasattr(optimizer, "optimizer"):
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
