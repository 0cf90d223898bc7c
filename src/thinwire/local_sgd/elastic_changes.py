"""The changes of a model, as an elastic member contributes them: weighted by its work."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import torch

from thinwire.algorithms import Algorithm
from thinwire.comm import Description
from thinwire.errors import StepError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.elastic_contributor import Contribution, ElasticContributor
from thinwire.local_sgd.fragment import Fragment
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.model_changes import Changes, ModelChanges
from thinwire.local_sgd.outer import Nesterov, nesterov_lr
from thinwire.local_sgd.pending_average import PendingAverage, are_finite
from thinwire.local_sgd.schedule import Schedule
from thinwire.sync import Engine


class ElasticChanges(ModelChanges, ElasticContributor):
    """Contributes a model's changes. It counts turns, since members join at any step of the schedule."""

    def __init__(
        self,
        model: AveragedModel,
        schedule: Schedule,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        group: Group,
    ) -> None:
        super().__init__(model, schedule, optimizers, algorithm, group.transport)
        self.turns = self.averaged_steps = 0
        self.group = group
        # Members that make as many steps as they can average at different step counts.
        self.tolerates_other_settings = not group.send_optimizer or schedule.every_seconds is not None
        self._averaged_at = monotonic()
        self._known: Changes = {}  # from `contribution` until they have changed

    def count_step(self, work: float) -> None:
        super().count_step(work if self.group.weigh_by == "steps" else 0.0)

    def is_due(self) -> bool:
        seconds = 0.0
        if self.schedule.every_seconds is not None:
            seconds = self.group.broadcast_scalar(monotonic() - self._averaged_at)
        return self.schedule.is_due(self.steps, self.turns, self.steps - self.averaged_steps, seconds)

    def engine_after(self, step: int) -> Engine:
        return self.warmup_engine if step < self.schedule.warmup.steps else self.engine

    def contribution(self) -> Contribution:
        fragments = self.fragments_of(self.steps, self.turns)
        self._known = self.changes_of(fragments)
        return Contribution(fragments[0].work, are_finite(self._known))

    def start(self, scale: float, step: int, *, is_last: bool = False) -> PendingAverage[Fragment]:
        known, self._known = self._known, {}
        fragments = self._fragments_left(step) if is_last else self.fragments_of(step, self.turns)
        changes = {it: known[it] if it in known else it.changes() for it in fragments}
        return self.send(changes, scale, step, is_delayed=self.schedule.is_delayed(step))

    def _fragments_left(self, step: int) -> Sequence[Fragment]:
        """Return the fragments that have made steps since their last averaging."""
        # Decide by what a newcomer knows, too. Leave out the fragment that was averaged just now: an outer
        # step without a change would still move it along its momentum.
        last = self.fragments[(self.turns - 1) % len(self.fragments)] if step == self.averaged_steps else None
        return [it for it in self.fragments if it is not last] or self.fragments_of(step, self.turns)

    def commit_empty(self, *, may_be_empty: bool) -> None:
        self._averaged_at, self._known = monotonic(), {}
        if self.steps > self.averaged_steps and not may_be_empty:
            raise StepError(
                "no member counted any work since the last averaging, so nothing was averaged; call "
                "count_work() before optimizer.step()"
            )

    def commit(self, pending: PendingAverage[Fragment], step: int, num_members: int) -> None:
        self._averaged_at = monotonic()
        model = self.model
        if model.outer is not None and isinstance(model.make_outer, Nesterov):
            for group in model.outer.param_groups:
                group["lr"] = nesterov_lr(model.make_outer, num_members, self.engine.algorithm)
        self.apply(pending.changes, step)
        self._known = {}
        self.steps = step + self.age
        self.turns, self.averaged_steps = self.turns + (not self.schedule.is_warm_up(step)), step
        self.end_warmup()

    def shared_tensors(self) -> dict[str, torch.Tensor]:
        return {tensor.name: last for tensor, last in self.fragments.lasts}

    def reset(self, step: int, turns: int) -> None:
        for fragment in self.fragments:
            fragment.restore_last()
            fragment.work = fragment.sent_work = 0.0
        self._known = {}
        self.steps = self.averaged_steps = step
        self.turns = turns
        self.end_warmup()

    def description(self) -> Description:
        return {**super().description(), **self.settings(), "weigh_by": self.group.weigh_by}
