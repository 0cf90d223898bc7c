"""Alternatives to an algorithm in a framework's training loop: averaged models, or `auto`."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeGuard, cast

from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from thinwire.adapters.ddp_model import ddp_inside
from thinwire.advice.automatic import Auto, auto
from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import no_algorithm
from thinwire.errors import ConfigError
from thinwire.local_sgd import elastic_members as elastic
from thinwire.local_sgd.averager import ModelAverager
from thinwire.preload.options import averaging_of
from thinwire.sync import Settings
from thinwire.sync.settings import StepOptions
from thinwire.torch_private import num_steps, takes_step_hooks

A_LOCAL = "a thinwire.LocalSGD, such as functools.partial(thinwire.DiLoCo, every_steps=30)"
# Such as `thinwire.LocalSGD` or `DiLoCo`, the same from thinwire.elastic, or thinwire.auto.
Makes: TypeAlias = "Callable[..., ModelAverager] | Callable[..., Auto]"


def checked_averaging(averaging: object) -> Algorithm | Makes:
    """Return how a framework's runs are averaged; it may be given as text."""
    if isinstance(averaging, str):
        return averaging_of(averaging)
    # An algorithm's class is callable, too, but is a mistake.
    is_class = isinstance(averaging, type) and not issubclass(averaging, ModelAverager)
    if not isinstance(averaging, Algorithm) and (is_class or not callable(averaging)):
        raise ConfigError(
            f"got {no_algorithm(averaging)}, expected an algorithm such as "
            f"thinwire.PowerSGD(matrix_rank=4), thinwire.auto, or a function that returns {A_LOCAL}"
        )
    return averaging


def checked_step_options(steps: StepOptions, *, take_effect: bool) -> StepOptions:
    """Return the settings for `thinwire.attach`, if it is called: those that are not its defaults."""
    of_steps: dict[str, Any] = {name: value for name, value in steps.items() if name != "machines"}
    Settings.of(**of_steps)  # only to be checked
    defaults = {"host_check": "auto", "on_nonfinite": "nan", "machines": True}
    chosen = {n: v for n, v in steps.items() if v != defaults.get(n)}
    if chosen and not take_effect:
        where = "the hook's state, or bind them: functools.partial(thinwire.auto, on_nonfinite=…)"
        raise ConfigError(f"{', '.join(chosen)} would have no effect here; pass such settings to {where}")
    return cast(StepOptions, chosen)


def makes_auto(averaging: object) -> TypeGuard[Callable[..., Auto]]:
    """Return whether it is `thinwire.auto`, with or without settings."""
    return _called(averaging) is auto


def makes_elastic(averaging: object) -> bool:
    """Return whether it makes an elastic member."""
    kind = _called(averaging)
    return isinstance(kind, type) and issubclass(kind, elastic.LocalSGD)


def _called(function: object) -> object:
    while isinstance(function, partial):
        function = function.func
    return function


def new_auto(
    make: Callable[..., Auto], model: object, optimizer: object, total_steps: float, **settings: Any
) -> Auto:
    """Return the `Auto` that chooses for a framework's run of `total_steps` (`math.inf`: unknown)."""
    if 0 < total_steps < math.inf:
        settings["total_steps"] = int(total_steps)
    # The user's own settings take precedence.
    return make(model, optimizer, **settings | getattr(make, "keywords", {}))


def new_local(make: Makes, model: object, optimizer: object, grad_scaler: GradScaler | None) -> ModelAverager:
    """Return the `LocalSGD` of a model that a framework has wrapped; not entered yet."""
    # A LocalSGD averages buffers with the model, so DDP must not send them in every forward pass, as it does
    # by default in frameworks. (Their own option for it is deprecated by torch.)
    ddp = ddp_inside(model)
    if ddp is not None:
        ddp.broadcast_buffers = False
    # Accelerate's and Lightning's wrappers don't support hooks; both hold the user's optimizer.
    while not takes_step_hooks(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    local = make(model, optimizer, grad_scaler=grad_scaler)
    if not isinstance(local, ModelAverager):
        raise ConfigError(f"expected a function that returns {A_LOCAL}, but it returned {local!r}")
    return local


def steps_of_others(local: ModelAverager) -> int:
    """Return how many of the members' steps this member has not made, nor resumed from: it joined later."""
    return local.steps - local._contributor.steps_here


class FollowedSchedule:
    """A scheduler that steps with the optimizer, kept at the members' count, which can jump.

    It jumps when this member joins, comes back after a stall, or waits for the others in `average()`.
    """

    _scheduler: LRScheduler | None = None

    def __init__(self, scheduler: object, count: int) -> None:
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            self._scheduler, self._start = scheduler, copy.deepcopy(scheduler.state_dict())
            # Of a run that resumes from a checkpoint without the members' count.
            self._ahead = max(0, num_steps(scheduler) - count)

    def follow(self, count: int) -> None:
        """Bring the scheduler to where so many of its steps bring it."""
        scheduler = self._scheduler
        if scheduler is None or num_steps(scheduler) == count + self._ahead:
            return
        # From the start: the optimizer may have received the others' rates before the scheduler's latest
        # step, and many schedules multiply the last rate.
        scheduler.load_state_dict(copy.deepcopy(self._start))
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(count + self._ahead - num_steps(scheduler)):
                scheduler.step()
