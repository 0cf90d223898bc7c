"""The changes of a model since its last averages, which `LocalSGD` averages, and their engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from time import monotonic
from typing import Any, Literal, NamedTuple

import torch

from thinwire.algorithms import Algorithm
from thinwire.comm import Description, ProcessGroupTransport, Transport, machines_of_subgroups
from thinwire.errors import StepError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.contributor import Contribution, Contributor, Terms
from thinwire.local_sgd.fragment import Fragment, Fragments, layouts_of
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.outer import Nesterov, described_outer, nesterov_lr
from thinwire.local_sgd.pending_average import PendingAverage, are_finite
from thinwire.local_sgd.schedule import EXACT, Schedule
from thinwire.sync import Engine, Settings


class Engines(NamedTuple):
    """Engines of a model and its schedule; they share the counts of what they send over the group."""

    main: Engine  # averages changes with `algorithm`
    warmup: Engine  # averages changes in the warm-up
    gradients: Engine  # averages a DDP model's gradients in the warm-up; `warmup` if there is no DDP model
    subgroup: Engine | None  # averages changes or gradients within the subgroup


def engines_of(
    model: AveragedModel,
    schedule: Schedule,
    algorithm: Algorithm,
    group: Transport,
    health_group: Transport | None,
    within: Transport | None = None,
) -> Engines:
    """Return the engines for averagings over a group and, if given, a subgroup."""
    averaged = model.tensors()
    specs = [tensor.spec for tensor in averaged]
    parts = layouts_of(averaged, schedule.streaming.fragments)
    # The processes of a subgroup have the same changes, so each sends a part of them.
    machines = None
    if isinstance(group, ProcessGroupTransport) and isinstance(within, ProcessGroupTransport):
        machines, _ = machines_of_subgroups(group, within)
    # With default settings: `on_nonfinite` is about gradients; changes that are not finite raise anyway.
    settings = Settings(health_group=health_group)
    main = Engine(algorithm, group, specs, settings, parts=parts, machines=machines)
    counts: dict[str, Any] = {"traffic": main.traffic, "clock": main.clock, "machines": machines}
    settings = Settings(on_nonfinite=schedule.warmup.on_nonfinite, health_group=health_group)
    gradients = warmup = Engine(schedule.warmup.algorithm or EXACT, group, specs, settings, **counts)
    if schedule.has_ddp and warmup.algorithm != EXACT:
        # A separate engine: `gradients` has residuals of gradients; this one averages the final parameters.
        warmup = Engine(EXACT, group, specs, settings, **counts)
    subgroup = None if within is None else Engine(EXACT, within, specs, settings)
    return Engines(main, warmup, gradients, subgroup)


class ModelChanges(Contributor):
    """Contributes a model's changes, fragment by fragment, and moves the model by their means.

    Attributes:
        together: Connects the processes with the shards of a replica, which must all be finite; or None.
        pending_steps: This process's steps since the last averaging.
        chosen: Fragments to average out of turn; None for those whose turn it is.
        sent_at: The step at which the pending averaging was sent.
    """

    def __init__(
        self,
        model: AveragedModel,
        schedule: Schedule,
        engines: Engines,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Group | None = None,
    ) -> None:
        super().__init__(model, (engines.main, engines.warmup), optimizers, group)
        self.schedule = schedule
        self._warmup, self._warm_gradients = engines.warmup, engines.gradients
        # Whether the members change, and with their number the outer learning rate.
        self._is_elastic = group is not None
        # A member's weight: its steps, or its counted work; or 1 ("contributors": only if it has made steps).
        self.weigh_by: Literal["steps", "work", "members", "contributors"]
        self.weigh_by = "members" if group is None else group.weigh_by
        # Elastic members combine the statuses of their processes.
        self.together = None if self._is_elastic else model.replica.shards
        self.pending_steps = 0
        self.chosen: Sequence[Fragment] | None = None
        self._turn_began = 0  # the step of the last turn
        self._averaged_at = monotonic()
        self._sent: Sequence[Fragment] = ()  # the pending averaging's fragments
        self.sent_at = 0

    @property
    def fragments(self) -> Fragments:
        """The model's fragments."""
        return self.model.fragments

    # The schedule.

    def count_step(self, *, is_own: bool) -> None:
        """Count a step of the loop: this process's or, if it has no more input, that of others."""
        self.steps += 1
        self.steps_here += 1
        self.pending_steps += is_own
        if self.weigh_by == "steps":
            self.count_work(1.0)

    def count_work(self, amount: float) -> None:
        """Add to the weight of each fragment's next averaging."""
        for fragment in self.fragments:
            fragment.work += amount

    @property
    def age(self) -> int:
        """Steps since the pending averaging was sent."""
        return self.steps - self.sent_at

    def is_due(self) -> bool:
        """Return whether an averaging is due after this step."""
        seconds = 0.0
        if self._group is not None and self.schedule.every_seconds is not None:
            seconds = self._group.broadcast_scalar(monotonic() - self._averaged_at)
        return self.schedule.is_due(self.steps, self.turns, self.steps - self._turn_began, seconds)

    @property
    def rounds_due(self) -> int:
        """How many rounds of the pending averaging must have been sent by now."""
        (fragment,) = self._sent  # a delayed average has one fragment
        return self.schedule.rounds_sent(self.age, fragment.num_rounds)

    def align_turns(self, step: int) -> None:
        """Set the turns from the schedule, so that fixed members average together, whatever has failed."""
        self.turns, self._turn_began = self.schedule.position(step)

    def end_warmup(self) -> None:
        """Switch to `AllReduce` for the last warm-up step, which sends the residual: no later step would."""
        step = self.steps if self.schedule.has_ddp else self._turn_began
        if self._warm_gradients.algorithm != EXACT and step >= self.schedule.warmup.steps - 1:
            self._warm_gradients.check_between_steps("use()")
            self._warm_gradients.buckets.use(EXACT)

    def engine_after(self, step: int) -> Engine:
        return self._warmup if step < self.schedule.warmup.steps else self.engines[0]

    # The interface for a membership.

    def fragments_after(self, step: int, turns_ahead: int = 0) -> Sequence[Fragment]:
        """Return the fragments that are averaged after a step, or `turns_ahead` turns later."""
        if self.chosen is not None:
            return self.chosen
        if self.schedule.is_warm_up(step):
            return self.fragments
        return [self.fragments[(self.turns + turns_ahead) % len(self.fragments)]]

    def _fragments_left(self, step: int) -> Sequence[Fragment]:
        """Return the fragments that have made steps since their last averaging."""
        # By what a newcomer knows, too. An outer step of no change would still go on with its momentum.
        last = self.fragments[(self.turns - 1) % len(self.fragments)] if step == self._turn_began else None
        return [it for it in self.fragments if it is not last] or self.fragments_after(step)

    @property
    def weight(self) -> float:
        """The weight of a fixed member."""
        return float(self.weigh_by != "contributors" or self.pending_steps > 0)

    def contribution(self, turns_ahead: int = 0) -> Contribution:
        fragments = self.fragments_after(self.steps, turns_ahead)
        changes = {fragment: fragment.changes() for fragment in fragments}
        weight = self.weight
        if self._is_elastic:
            # Work that the averaging in doubt has counted is not part of the next one.
            weight = fragments[0].work - (fragments[0].sent_work if turns_ahead else 0.0)
        return Contribution(weight, are_finite(changes, self.together), changes)

    def start(
        self, tensors: Mapping[Fragment, list[torch.Tensor]] | None, terms: Terms
    ) -> PendingAverage[Fragment]:
        is_exact, known = self.schedule.is_warm_up(terms.step), tensors or {}
        fragments_after = self._fragments_left if terms.is_last else self.fragments_after
        changes = {
            fragment: known[fragment] if fragment in known else fragment.changes()
            for fragment in fragments_after(terms.step)
        }
        # Scale before sending: otherwise the residual would have a different unit than the next change.
        for flat in chain(*changes.values()) if terms.scale != 1 else ():
            flat.mul_(terms.scale)
        self._sent = tuple(changes)
        for fragment in changes:
            fragment.sent_work = fragment.work
        self.sent_at = self.steps
        engine = self._warmup if is_exact else self.engines[0]
        return PendingAverage(changes, engine, is_delayed=terms.is_delayed and not is_exact)

    def commit(self, pending: PendingAverage[Fragment] | None, terms: Terms) -> None:
        self._averaged_at = monotonic()
        if pending is None:
            # This is fine while this member, or another, joins: it contributes next time.
            if self.steps > self._turn_began and not terms.may_be_empty:
                raise StepError(
                    "no member counted any work since the last averaging, so nothing was averaged; call "
                    "count_work() before optimizer.step()"
                )
            return
        model, algorithm, made, step = self.model, self.engines[0].algorithm, self.age, terms.step
        is_exact = self.schedule.is_warm_up(step)
        if self._is_elastic and model.outer is not None and isinstance(model.make_outer, Nesterov):
            for group in model.outer.param_groups:
                group["lr"] = nesterov_lr(model.make_outer, terms.num_members, algorithm)
        # Without a step since it was sent, this member has no change of its own to keep.
        weight = self.schedule.local_weight(algorithm) if made else 0.0
        for fragment, means in pending.changes.items():
            fragment.apply(means, None if is_exact else model.outer, weight)
            fragment.sent_after = step
            fragment.work -= fragment.sent_work
        self.steps, self.pending_steps = step + made, 0
        if self.chosen is None:
            self.turns, self._turn_began = self.turns + (not is_exact), step
            if not self._is_elastic:
                self.align_turns(step)
            self.end_warmup()

    @property
    def averaged_steps(self) -> int:
        return self._turn_began

    def shared_tensors(self) -> dict[str, torch.Tensor]:
        return {tensor.name: last for tensor, last in self.fragments.lasts}

    def reset(self, step: int) -> None:
        for fragment in self.fragments:
            fragment.restore_last()
            fragment.work = fragment.sent_work = 0.0
        self.pending_steps = 0
        self.steps = self._turn_began = step
        self.end_warmup()

    def settings(self) -> dict[str, str]:
        """Return the settings that must be the same on all members."""
        schedule = self.schedule
        settings = {
            "every_steps": schedule.every_steps,
            "every_seconds": schedule.every_seconds,
            "streaming": schedule.streaming,
            "warmup": schedule.warmup,
            "subgroup": schedule.has_subgroup,
            "weigh_by": self.weigh_by,
            "outer optimizer": described_outer(self.model.outer),
        }
        return {subject: str(value) for subject, value in settings.items()}

    def description(self) -> Description:
        return {**super().description(), **self.settings()}

    @property
    def tolerates_other_settings(self) -> bool:
        # Members that make as many steps as they can average at different step counts.
        return super().tolerates_other_settings or self.schedule.every_seconds is not None
