"""`elastic.LocalSGD` and `elastic.DiLoCo`: what users enter around a loop whose other members come and go."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm, Quantize
from thinwire.checks import number
from thinwire.errors import ConfigError, LeftError
from thinwire.local_sgd.averager import ModelAverager
from thinwire.local_sgd.elastic_membership import ElasticMembership
from thinwire.local_sgd.engines import engines_of
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.inner_optimizers import Optimizers
from thinwire.local_sgd.member import Member, joining
from thinwire.local_sgd.model_changes import ModelChanges
from thinwire.local_sgd.outer import Outer, check_outer
from thinwire.local_sgd.schedule import EXACT, NO_WARMUP, WHOLE, Schedule
from thinwire.local_sgd.settings import Nesterov, Streaming, Warmup
from thinwire.sync.precision import full_precision

MANY_STEPS = 30


class LocalSGD(ModelAverager, Member):
    """Train each process by itself for some steps, then average with all members that are there.

    As `thinwire.LocalSGD`, on a group whose members change: see there what is averaged. If a member dies or
    stands still for too long in an averaging, the others repeat it without that member, at once and with all
    they have learnt since the last one. A member that joins, or comes back, waits on entry for the others'
    next averaging. From it, it takes their model, outer optimizer and counters, to the bit, and the state of
    one member's optimizers inside, as of their last steps.

    Each member's change weighs as much as it has worked, in steps or in what the group's `weigh_by` says.
    Its residual (what it has not transmitted) stays when others come or go. A member that leaves on purpose
    (SIGTERM, or `leave()`) hands it over at its last averaging. Then the optimizer's step raises `LeftError`,
    which the context swallows. The residual of a member that vanishes is lost; `membership()` and a warning
    say how much.

    Write the loop by `local.steps`, which a member that joins takes over: `while local.steps < 1000: …`

    Args:
        model: A module; of a member of several processes a DDP model, or one in parts.
        optimizer: As of `thinwire.LocalSGD`, and so `algorithm` and `grad_scaler`.
        every_steps: Steps from one averaging of a parameter to the next.
        every_seconds: In its place, the time from one to the next: each member makes as many steps as it can,
            and weighs as much, so slow machines hold no fast one back. `steps` are then those of the fastest.
        group: Who is there; None for `TorchftGroup()`.
        outer: As of `thinwire.LocalSGD`. A `Nesterov` without a learning rate chooses one at every averaging
            by the number of members.
        streaming: As of `thinwire.LocalSGD`. An averaging that has lost a member on its way is done again
            when it is due, with all that the others have learnt until then.
        warmup: Steps at the start after each of which models are averaged, without `outer`; None for none.
            Its `algorithm` averages their changes in them, and what it has not transmitted goes,
            uncompressed, with the last of these steps.

    Cost: as of `thinwire.LocalSGD`. Beyond that an averaging takes a quorum (a request to the lighthouse),
    136 bytes from each member before it and 8 bytes after it. When members change, each sends some kilobytes,
    and a newcomer receives the model, the outer optimizer's state, what the algorithm remembers, and with
    the group's `send_optimizer` the optimizers' state (of AdamW twice the model's bytes).

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model, or not all of it though
            its state is sent.
        AttachError: A model that is not on all processes of this member, or is all frozen.
        GradientError: A parameter can't be averaged by the algorithm.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        group: Group | None = None,
        algorithm: Algorithm = EXACT,
        outer: Outer | None = None,
        streaming: Streaming = WHOLE,
        warmup: Warmup | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        if (every_steps is None) is (every_seconds is None):
            raise ConfigError(
                f"pass every_steps or every_seconds, got {every_steps!r} and {every_seconds!r}: an averaging "
                "is due after this many steps of a member, or after this long"
            )
        # The least, for what follows from them: the outer momentum.
        every_steps = max(MANY_STEPS, streaming.fragments) if every_steps is None else every_steps
        warmup = NO_WARMUP if warmup is None else warmup
        schedule = Schedule(every_steps, warmup, streaming=streaming, every_seconds=every_seconds)
        check_outer(outer)
        schedule.check_gradient_settings(grad_scaler)
        averaged, optimizers, group = joining(
            model, optimizer, group, buffers=streaming.average_buffers, outer=outer
        )
        # If each process has a part, a mean is finite if those of all are.
        health_group = group.inside if group.has_parts else None
        engines = engines_of(averaged, schedule, algorithm, group.transport, health_group)
        changes = ModelChanges(averaged, schedule, engines, optimizers, group)
        super().__init__(changes, ElasticMembership(group, changes, type(self).__name__), grad_scaler)

    def __str__(self) -> str:
        return f"elastic.{super().__str__()}"

    def count_work(self, amount: float) -> None:
        """Add to what this member's change weighs in the next averaging, if the group weighs by "work".

        Args:
            amount: Of what this member has learnt from: tokens, say.

        Raises:
            ConfigError: It is not a number, or negative, or steps are what counts.
            StepError: Outside the context.
        """
        if self._membership.group.weigh_by != "work":
            raise ConfigError(
                'count_work() is for a group with weigh_by="work"; here all steps count the same'
            )
        self._check_inside("count_work()")
        added = float(number("amount", amount, minimum=0))
        self._contributor.count_work(added)

    @torch.inference_mode(False)
    def __enter__(self) -> LocalSGD:
        model = self._model
        if not model.entered:
            self._check_copies()
            # The learning rate that goes by the number of members is chosen at every averaging.
            model.divide(model.tensors(), self._schedule, 1, self._engine.algorithm)
            for fragment in model.fragments:
                fragment.set_last()
            self._check_momentum(stacklevel=3)
        return super().__enter__()

    @torch.inference_mode(False)
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """End: average what is left, unless an exception is under way, and leave. Swallows `LeftError`."""
        changes = self._contributor
        with self._attached:
            # Inside: the end of this block leaves the group, and the last averaging must come before.
            if kind is None and changes.steps > changes.averaged_steps and not self.has_left:
                self._model.loads.check()
                with suppress(LeftError), full_precision(changes.device):
                    if self._membership.is_open:
                        self._membership.finish()
                    self.leave()
                    self._membership.average()
        return kind is not None and issubclass(kind, LeftError) and self.has_left

    def average(self) -> None:
        """Average now with all who are there: what is pending, then each fragment. Collective.

        With `outer`, these are outer steps. Steps to the next averaging are counted from here. A member that
        does not call it takes part at its next averaging, one fragment at a time.

        Raises:
            StepError: Outside the context, or this member's parameters are not finite, and it has left.
            LeftError: This member has left.
            CommunicationError: No averaging has succeeded in the group's `wait_seconds`.
        """
        with self._collective("average()"):
            self._model.loads.check()
            if self._membership.is_open:
                self._membership.finish()
            is_warm_up = self._schedule.is_warm_up(self.steps)
            for _ in range(1 if is_warm_up else len(self._model.fragments)):
                self._membership.average()

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        self.average()
        return super().state_dict()


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    `elastic.LocalSGD`, whose arguments it takes, with the outer step and the defaults of `thinwire.DiLoCo`:
    every 30 steps, unless there is `every_seconds`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        every_steps: int | None = None,
        algorithm: Algorithm = Quantize(bits=4),  # noqa: B008
        outer: Outer | None = Nesterov(),  # noqa: B008
        **settings: Any,
    ) -> None:
        if every_steps is None and settings.get("every_seconds") is None:
            every_steps = MANY_STEPS
        super().__init__(
            model, optimizer, every_steps=every_steps, algorithm=algorithm, outer=outer, **settings
        )
