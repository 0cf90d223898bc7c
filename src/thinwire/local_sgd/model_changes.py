"""The changes of a model since its last averages, and the engines that average them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch

from thinwire.algorithms import Algorithm
from thinwire.comm import ProcessGroupTransport, Transport
from thinwire.comm.machines import machines_of_subgroups
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.fragment import Averaged, Buckets, Fragment, fragments_of
from thinwire.local_sgd.outer import Nesterov, described_outer, new_outer
from thinwire.local_sgd.pending_average import PendingAverage
from thinwire.local_sgd.schedule import EXACT, Schedule
from thinwire.sync import Engine, Settings

Changes: TypeAlias = Mapping[Fragment, list[torch.Tensor]]
"""The changes of fragments: a flat tensor for each bucket."""


class ModelChanges:
    """A model's changes: an averaging sends them, and applies their means.

    Attributes:
        steps: Steps so far, of the members that have been here longest.
        steps_here: Steps since this object was made.
        sent_at: The step after which the latest averaging was sent.
        engine: Averages changes after the warm-up. The next two share its clock, which counts the traffic.
        warmup_engine: Averages in the warm-up: gradients of a DDP model, changes of a plain module.
        exact_engine: Averages a DDP model's parameters after the warm-up's last step.
        subgroup_engine: Averages changes or gradients within the subgroup, if there is one.
    """

    def __init__(
        self,
        model: AveragedModel,
        schedule: Schedule,
        algorithm: Algorithm,
        group: Transport,
        subgroup: Transport | None = None,
    ) -> None:
        self.model, self.schedule = model, schedule
        self.steps = self.steps_here = self.sent_at = 0
        averaged = model.tensors()
        specs = [tensor.spec for tensor in averaged]
        fragments = [Buckets(part).layout for part in fragments_of(averaged, schedule.streaming.fragments)]
        # The processes of a subgroup have the same changes, so each sends a part of them.
        machines = None
        if isinstance(group, ProcessGroupTransport) and isinstance(subgroup, ProcessGroupTransport):
            machines = machines_of_subgroups(group, subgroup)
        # `on_nonfinite` is about gradients: changes that are not finite always raise.
        for_changes = Settings(health_group=model.replica.inside)
        for_gradients = replace(for_changes, on_nonfinite=schedule.warmup.on_nonfinite)
        self.engine = Engine(algorithm, group, specs, for_changes, fragments=fragments, machines=machines)
        shared: dict[str, Any] = {"clock": self.engine.clock, "machines": machines}
        warmup = schedule.warmup.algorithm or EXACT
        self.warmup_engine = Engine(warmup, group, specs, for_gradients, **shared)
        # The residuals of `warmup_engine` are of gradients: no average of parameters may add them.
        self.exact_engine = Engine(EXACT, group, specs, for_changes, **shared)
        self.subgroup_engine = None if subgroup is None else Engine(EXACT, subgroup, specs, for_gradients)
        self.end_warmup()

    def divide(self, averaged: Sequence[Averaged], num_members: int) -> None:
        """Divide the averaged tensors into fragments, and make the outer optimizer that steps them."""
        model, schedule, make = self.model, self.schedule, self.model.make_outer
        device = make.device if isinstance(make, Nesterov) else None  # None: the model's
        parts = fragments_of(averaged, schedule.streaming.fragments)
        model.fragments = [Fragment(part, device) for part in parts]
        if make is not None:
            lasts = {tensor.name: last for tensor, last in model.lasts}
            # In an order that does not depend on the number of fragments, so that its state fits any number.
            parameters = [lasts[tensor.name] for tensor in Buckets(averaged) if not tensor.is_buffer]
            algorithm = self.engine.algorithm
            model.outer = new_outer(make, parameters, num_members, schedule.every_steps, algorithm)

    # The schedule.

    def count_step(self, work: float) -> None:
        """Count a step of the loop, with no work if it is not this process's, which has no more input."""
        self.steps += 1
        self.steps_here += 1
        self.count_work(work)

    def count_work(self, amount: float) -> None:
        """Add to the weight of each fragment's next averaging."""
        for fragment in self.model.fragments:
            fragment.work += amount

    @property
    def age(self) -> int:
        """Steps since the latest averaging was sent."""
        return self.steps - self.sent_at

    # From the step alone, so that fixed members average together, whatever has failed.

    def is_due(self) -> bool:
        """Return whether an averaging is due after this step."""
        turn, began = self.schedule.position(self.steps - 1)
        return self.schedule.is_due(self.steps, turn, self.steps - began)

    def due_fragments(self) -> Sequence[Fragment]:
        """Return the fragments that are averaged after this step."""
        turn, _ = self.schedule.position(self.steps - 1)
        return self.fragments_at(self.steps, turn)

    def fragments_at(self, step: int, turn: int) -> Sequence[Fragment]:
        """Return the fragments whose turn it is after a step: all in the warm-up."""
        if self.schedule.is_warm_up(step):
            return self.model.fragments
        return [self.model.fragments[turn % len(self.model.fragments)]]

    def end_warmup(self) -> None:
        """Switch to `AllReduce` for the last warm-up step, which sends the residual: no later step would."""
        engine = self.warmup_engine
        if engine.algorithm != EXACT and self.steps >= self.schedule.warmup.steps - 1:
            engine.check_between_steps("use()")
            engine.buckets.use(EXACT)

    # An averaging.

    def changes_of(self, fragments: Iterable[Fragment]) -> dict[Fragment, list[torch.Tensor]]:
        """Return the changes of fragments since their last averagings."""
        return {fragment: fragment.changes() for fragment in fragments}

    def send(
        self, changes: Changes, scale: float, step: int, *, is_delayed: bool
    ) -> PendingAverage[Fragment]:
        """Send the first messages of an averaging of scaled changes after a step; they become means."""
        # Scale before sending: otherwise the residual would have a different unit than the next change.
        for flat in chain(*changes.values()) if scale != 1 else ():
            flat.mul_(scale)
        for fragment in changes:
            fragment.sent_work = fragment.work
        self.sent_at = self.steps
        engine = self.engine
        if self.schedule.is_warm_up(step):
            engine = self.exact_engine if self.schedule.has_ddp else self.warmup_engine
        return PendingAverage(changes, engine, is_delayed=is_delayed)

    def apply(self, means: Changes, step: int) -> None:
        """Move the model by the means of an averaging after a step, which are overwritten."""
        outer = None if self.schedule.is_warm_up(step) else self.model.outer
        # Without a step since it was sent, this member has no change of its own to keep.
        local_weight = self.schedule.local_weight(self.engine.algorithm) if self.age else 0.0
        for fragment, flats in means.items():
            fragment.apply(flats, outer, local_weight)
            fragment.sent_after = step
            fragment.work -= fragment.sent_work
            fragment.sent_work = 0.0

    def settings(self) -> dict[str, str]:
        """Return the settings that must be the same on all members."""
        schedule = self.schedule
        settings = {
            "every_steps": schedule.every_steps,
            "every_seconds": schedule.every_seconds,
            "streaming": schedule.streaming,
            "warmup": schedule.warmup,
            "subgroup": schedule.has_subgroup,
            "outer optimizer": described_outer(self.model.outer),
        }
        return {subject: str(value) for subject, value in settings.items()}
