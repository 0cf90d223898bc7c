"""`elastic.LocalSGD` and `elastic.DiLoCo`: what users enter around a loop whose other members come and go."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from time import monotonic
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm, Quantize
from thinwire.checks import number
from thinwire.comm import Description
from thinwire.errors import ConfigError, LeftError, StepError
from thinwire.local_sgd.core import ModelAverager
from thinwire.local_sgd.fragment import Fragment
from thinwire.local_sgd.groups.averageable import Part
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.member import Member
from thinwire.local_sgd.model import Optimizers
from thinwire.local_sgd.outer import Outer, described_outer, nesterov_lr, warn_of_momentum
from thinwire.local_sgd.pending_average import Changes, PendingAverage, are_finite
from thinwire.local_sgd.schedule import EXACT, NO_WARMUP, WHOLE, Schedule
from thinwire.local_sgd.settings import Nesterov, Streaming, Warmup
from thinwire.local_sgd.state import LoadedState

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
        streaming: As of `thinwire.LocalSGD`; one fragment is in flight at a time, so a delay is shorter than
            `every_steps` over the number of fragments. An averaging that has lost a member on its way is done
            again when it is due, with all that the others have learnt until then.
        warmup: Steps at the start after each of which models are averaged, without `outer`; None for none.
            Its `algorithm` averages their changes in them, and what it has not transmitted goes,
            uncompressed, with the last of these steps.

    Cost: as of `thinwire.LocalSGD`. Beyond that an averaging takes a quorum (a request to the lighthouse),
    112 bytes from each member before it and 8 bytes after it. When members change, each sends some kilobytes,
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
        if streaming.delay_steps >= every_steps // streaming.fragments:
            raise ConfigError(
                "delay_steps must be less than every_steps / fragments if members come and go, got "
                f"{streaming.delay_steps} with {every_steps} / {streaming.fragments}: a change of members "
                "breaks off what is in flight, so that is one fragment at a time; take a shorter delay"
            )
        self._configure(schedule, outer, grad_scaler)
        super().__init__(model, optimizer, algorithm, group, streaming)
        self._algorithm = algorithm  # from the end of the warm-up on
        self._work: list[float] = []  # of this member since each fragment's last averaging
        # The averaging in flight: its work by fragment, and the steps that were pending when it was sent.
        self._sent_work: dict[int, float] = {}
        self._sent_steps = 0
        self._averaged_at = monotonic()
        self._is_warming_up = warmup.steps > 0
        self._follow(0)

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
        if self._group.weigh_by != "work":
            raise ConfigError(
                'count_work() is for a group with weigh_by="work"; here all steps count the same'
            )
        self._check_inside("count_work()")
        added = float(number("amount", amount, minimum=0))
        self._work = [work + added for work in self._work]

    def _begin(self) -> None:
        self._check_copies()
        # The learning rate that goes by the number of members is chosen at every averaging.
        self._model.divide(self._model.tensors(), self._schedule, self._make_outer, 1, self._algorithm)
        for fragment in self._fragments:
            fragment.take()
        self._work = [0.0] * len(self._fragments)
        warn_of_momentum(self._model.outer, self._algorithm, stacklevel=4)

    @torch.inference_mode(False)
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """End: average what is left, unless an exception is under way, and leave. Swallows `LeftError`."""
        with self._attached:
            # Inside: the end of this block leaves the group, and the last averaging must come before.
            if kind is None and self._pending_steps and not self.has_left:
                self._model.loads.check()
                with suppress(LeftError):
                    self._land()
                    self.leave()
                    self._transact(self._membership.average)
        return kind is not None and issubclass(kind, LeftError) and self.has_left

    def average(self) -> None:
        """Average now with all who are there: what is in flight, then each fragment. Collective.

        With `outer`, these are outer steps. Steps to the next averaging are counted from here. A member that
        does not call it takes part at its next averaging, one fragment at a time.

        Raises:
            StepError: Outside the context, or this member's parameters are not finite, and it has left.
            LeftError: This member has left.
            CommunicationError: No averaging has succeeded in the group's `wait_seconds`.
        """
        self._check_inside("average()")
        self._average_pending()

    def _average_pending(self) -> None:
        self._check_copies()
        self._model.loads.check()
        self._land()
        for _ in range(1 if self._is_warm_up(self._steps) else len(self._fragments)):
            self._transact(self._membership.average)

    def _land(self) -> None:
        if self._membership.is_open:
            self._transact(self._membership.finish)

    # The schedule, after each step.

    def _after_own_step(self) -> None:
        self._check_there("a step")  # the whole model is too much to look at in every step
        self._steps += 1
        self._steps_here += 1
        self._pending_steps += 1
        if self._group.weigh_by == "steps":
            self._work = [work + 1 for work in self._work]
        if self._steps_here == 1:  # optimizers make their state in their first step
            self._check_copies()
        schedule, is_warm_up = self._schedule, self._is_warm_up(self._steps)
        if self._membership.is_open:
            if self._pending_steps - self._sent_steps >= schedule.streaming.delay_steps:
                self._check_inside("a step")
                self._land()
        # As many steps lie between two averagings as spread the fragments evenly.
        elif is_warm_up or schedule.ends_turn(self._turns, self._pending_steps, self._seconds_since()):
            self._check_inside("a step")
            self._check_copies()
            self._transact(self._membership.start)
            if is_warm_up or not schedule.streaming.delay_steps:
                self._land()
        self._tell_observers()

    def _seconds_since(self) -> float:
        """Return for how long this member has trained since the last averaging, if that decides anything."""
        if self._schedule.every_seconds is None:
            return 0.0
        return self._group.decided(monotonic() - self._averaged_at)

    # The members' view.

    def _place(self, turns_ahead: int) -> int:
        return (self._turns + turns_ahead) % len(self._fragments)

    def _part(self, turns_ahead: int = 0) -> Part:
        place = self._place(turns_ahead)
        fragments = self._fragments if self._is_warm_up(self._steps) else [self._fragments[place]]
        changes = {fragment: fragment.changes() for fragment in fragments}
        # Work that the averaging in doubt has taken is no part of the next one.
        taken = self._sent_work.get(place, 0.0) if turns_ahead else 0.0
        return Part(self._work[place] - taken, are_finite(changes, None), changes)

    def _described(self) -> Description:
        return {
            **super()._described(),
            "every_steps": str(self._schedule.every_steps),
            "every_seconds": str(self._schedule.every_seconds),
            "streaming": str(self._schedule.streaming),
            "warmup": str(self._schedule.warmup),
            "weigh_by": self._group.weigh_by,
            "outer optimizer": described_outer(self.outer),
        }

    @property
    def _may_be_set_otherwise(self) -> bool:
        # Members that make as many steps as they can are at different ones when they meet.
        return super()._may_be_set_otherwise or self._schedule.every_seconds is not None

    def _held(self) -> dict[str, torch.Tensor]:
        return {tensor.name: last for tensor, last in self._fragments.lasts}

    def _start_from(self, loaded: LoadedState) -> None:
        super()._start_from(loaded)
        for fragment in self._fragments:
            fragment.show()
        self._work = [0.0] * len(self._fragments)
        self._sent_work, self._sent_steps = {}, 0
        self._follow(self._steps)

    def _start(self, tensors: Changes | None, scale: float, step: int) -> PendingAverage[Fragment]:
        is_exact = self._is_warm_up(step)
        places = range(len(self._fragments)) if is_exact else [self._place(0)]
        fragments = [self._fragments[place] for place in places]
        known = tensors or {}
        changes = {
            fragment: known[fragment] if fragment in known else fragment.changes() for fragment in fragments
        }
        # Before it is sent: scaled later, the residual would be in a different unit than the next change.
        for flat in chain(*changes.values()):
            flat.mul_(scale)
        self._sent_work = {place: self._work[place] for place in places}
        self._sent_steps = self._pending_steps
        is_delayed = self._schedule.streaming.delay_steps > 0 and not is_exact
        return PendingAverage(changes, self._engine, is_delayed=is_delayed)

    def _committed(
        self,
        pending_average: PendingAverage[Fragment] | None,
        step: int,
        num_members: int,
        *,
        may_be_empty: bool,
    ) -> None:
        self._averaged_at = monotonic()
        if pending_average is None:
            # No mistake while this member, or a newcomer, joins: next time it puts something in.
            if self._pending_steps and not may_be_empty:
                raise StepError(
                    "no member has counted any work since the last averaging, so nothing was averaged: call "
                    "count_work() before optimizer.step()"
                )
            return
        is_exact = self._is_warm_up(step)
        if self.outer is not None and isinstance(self._make_outer, Nesterov):
            for group in self.outer.param_groups:
                group["lr"] = nesterov_lr(self._make_outer, num_members, self._engine.algorithm)
        made = self._pending_steps - self._sent_steps  # while it was in flight
        weight = self._schedule.local_weight(self._engine.algorithm) if made else 0.0
        for fragment, means in pending_average.changes.items():
            fragment.move(means, None if is_exact else self.outer, weight)
        for place, work in self._sent_work.items():
            self._work[place] -= work
        self._steps, self._pending_steps = step + made, made
        self._sent_work, self._sent_steps = {}, 0
        self._turns += not is_exact
        self._follow(step)

    def _follow(self, step: int) -> None:
        """Use the algorithm of the warm-up until its last step, which sends what that has kept."""
        if not self._is_warming_up:
            return
        warmup = self._schedule.warmup
        wanted = EXACT if warmup.algorithm is None else warmup.algorithm
        if step >= warmup.steps - 1:
            wanted = EXACT if step < warmup.steps else self._algorithm
        self._is_warming_up = step < warmup.steps
        if self._engine.algorithm != wanted:
            self.sync.use(wanted)

    def _is_warm_up(self, step: int) -> bool:
        return 0 < step <= self._schedule.warmup.steps


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
