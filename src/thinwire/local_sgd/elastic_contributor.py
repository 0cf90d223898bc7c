"""What an elastic member contributes to averagings, and what a new member starts from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from time import monotonic
from typing import Any, TypeAlias

import torch

from thinwire.adapters.ddp_model import plain_name
from thinwire.algorithms import Algorithm
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import Description
from thinwire.errors import StateError, StepError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.fragment import Fragment
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.inner_optimizers import load_optimizers
from thinwire.local_sgd.model_changes import ModelChanges
from thinwire.local_sgd.outer import Nesterov, nesterov_lr
from thinwire.local_sgd.pending_average import PendingAverage
from thinwire.local_sgd.saved_state import LoadedState, checked_state, packed_state
from thinwire.local_sgd.schedule import Schedule
from thinwire.sync import Engine
from thinwire.sync.state import in_memory_order
from thinwire.tensors.layout import local_tensor
from thinwire.torch_private import non_persistent_buffers

Values: TypeAlias = dict[Any, list[torch.Tensor]]
"""What a member contributes to an averaging: for each fragment, a flat tensor for each bucket."""


class ElasticContributor(ABC):
    """Contributes a member's tensors to averagings, applies their means, and saves and loads its state."""

    model: AveragedModel
    engine: Engine  # of averagings after the warm-up
    group: Group
    steps: int  # so far, of the members that have been here longest
    steps_here: int  # since this object was made
    averaged_steps: int  # at the last averaging
    turns = 0  # of fragments
    lineage = commits = 0  # the committed averagings behind the model: a digest, and their number
    tolerates_other_settings = False  # whether a member with other optimizer settings is warned, not refused

    @property
    def sent_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The inner optimizers whose state a joining member receives."""
        return self.model.optimizers if self.group.send_optimizer else ()

    @property
    def next_engine(self) -> Engine:
        """The engine of the next averaging."""
        return self.engine_after(self.averaged_steps)

    def engine_after(self, step: int) -> Engine:
        """Return the engine of the averaging that follows this step."""
        return self.engine

    @abstractmethod
    def contribution(self) -> tuple[float, Values]:
        """Return this member's weight in the next averaging, 0 if it has done nothing, and its values."""

    @abstractmethod
    def start(self, known: Values, scale: float, step: int, *, is_last: bool) -> PendingAverage[Any]:
        """Send the first messages of an averaging after a step: of the `known` values, else of those now.

        The last averaging, with which all members leave, covers all fragments.
        """

    @abstractmethod
    def commit(self, pending: PendingAverage[Any], step: int, num_members: int) -> None:
        """Apply the means of a committed averaging."""

    @abstractmethod
    def commit_empty(self, *, may_be_empty: bool) -> None:
        """End an averaging to which no member has contributed; raise if this member expected an averaging."""

    # Members compare these, and a newcomer starts from them.

    @abstractmethod
    def shared_tensors(self) -> dict[str, torch.Tensor]:
        """Return by name the tensors (not copies) that are the same on all members after an averaging."""

    @abstractmethod
    def reset(self, step: int, turns: int) -> None:
        """Continue from loaded shared tensors; earlier steps no longer count."""

    def description(self) -> Description:
        """Return the settings and shapes that must be the same on all members, by subject."""
        sent = ", ".join(type(optimizer).__name__ for optimizer in self.sent_optimizers)
        return {
            **self.engine.buckets.described("an averaging", self.model.device),
            "torch": torch.__version__.partition("+")[0],
            "optimizer": sent or "not sent",
        }

    def _tensors_not_averaged(self) -> dict[str, torch.Tensor]:
        """Return by name what else a newcomer must receive: frozen parameters and other buffers."""
        # Tensors are found by identity: names in a compiled block differ from those in the average.
        averaged = {id(item.tensor) for item in self.model.tensors()}
        named = chain(self.model.module.named_parameters(), self.model.module.named_buffers())
        return {plain_name(name): local_tensor(it) for name, it in named if id(it) not in averaged}

    def _not_saved(self) -> set[str]:
        modules = self.model.module.named_modules()
        return {
            plain_name(f"{prefix}.{name}".lstrip("."))
            for prefix, part in modules
            for name in non_persistent_buffers(part)
        }

    def state(self, sync: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the state a newcomer starts from, or (with the engine's own state) a run that resumes.

        It is to be made `plain`: of sharded tensors, this process's shards.
        """
        # The state is that of the last averaging, for a newcomer too: later steps are only this member's.
        return packed_state(
            step=self.averaged_steps,
            sent_after=(self.averaged_steps,),
            last_average=self.shared_tensors(),
            sync=self.next_engine.state.common_state(self.next_engine.algorithm) if sync is None else sync,
            outer=None if self.model.outer is None else self.model.outer.state_dict(),
            place=self.model.replica.place,
            members={
                "lineage": self.lineage,
                "commits": self.commits,
                "turns": self.turns,
                "not_averaged": self._tensors_not_averaged(),
                "not_saved": tuple(sorted(self._not_saved())),
                "residual_of": tuple(sorted(self.next_engine.state.memory[ERROR])),
                "optimizers": [optimizer.state_dict() for optimizer in self.sent_optimizers],
            },
        )

    def check_state(self, state: Mapping[str, Any]) -> LoadedState:
        """Return a saved or received state, checked; raise if it is not of this model."""
        shapes = {tensor.name: tuple(tensor.value.shape) for tensor in self.model.tensors()}
        has_outer = self.model.make_outer is not None
        loaded = checked_state(state, [shapes], place=self.model.replica.place, has_outer=has_outer)
        if loaded.pending:
            raise StateError(
                "the state was saved while an averaging was in progress, but elastic members start from a "
                "finished average; save after average()"
            )
        return loaded

    def start_from(self, loaded: LoadedState) -> None:
        """Load a state: all of it, or none if it does not fit."""
        shared, not_averaged = self.shared_tensors(), self._tensors_not_averaged()
        members, optimizers = loaded.members, list(self.sent_optimizers)
        received: dict[str, torch.Tensor] = {}
        if members is None:
            # A fixed group's state. Members that load the same one get the same lineage.
            members, optimizers = {"lineage": loaded.digest | 1, "commits": 1, "turns": 0}, []
        else:
            received = members["not_averaged"]
            kinds, own = _kinds(received), _kinds(not_averaged)
            # Models make tables when they need them, and larger for longer inputs: keep this one's.
            for name in members["not_saved"] | self._not_saved():
                if kinds.get(name) != own.get(name):
                    for named in (received, kinds, own):
                        named.pop(name, None)
            if kinds != own:
                raise StateError(
                    "the state's not_averaged has other tensors than this member's model; start the same "
                    "script as the others, or load the state of the same model"
                )
        engine = self.engine_after(loaded.step)
        engine_state = engine.check_state_dict(loaded.sync)
        states = list(members.get("optimizers", ()))
        if self.model.outer is not None and loaded.outer is not None:
            optimizers.append(self.model.outer)
            states.append(loaded.outer)
        load_optimizers(optimizers, states)
        errors = engine_state.slots.get(ERROR, {})
        common = {slot: tensors for slot, tensors in engine_state.slots.items() if not slot.is_local}
        engine.load(engine_state._replace(slots=common))
        for spec in engine.specs:
            # The layout of messages depends on which parameters have a residual: a newcomer's is zeros.
            if spec.name in errors or spec.name in members.get("residual_of", ()):
                error = errors.get(spec.name, torch.zeros(spec.shape, device="cpu"))
                engine.state.put_error(spec.name, in_memory_order(ERROR, error, spec, self.model.device))
        targets = shared | not_averaged
        for name, tensor in {**loaded.last_average, **received}.items():
            targets[name].copy_(tensor)
        self.model.before_load = None
        self.lineage, self.commits = members["lineage"], members["commits"]
        self.reset(loaded.step, members["turns"])


def _kinds(values: Mapping[str, object]) -> dict[str, object]:
    return {name: (it.shape, it.dtype) if isinstance(it, torch.Tensor) else it for name, it in values.items()}


class ElasticChanges(ModelChanges, ElasticContributor):
    """Contributes a model's changes. It counts turns, since members join at any step of the schedule."""

    def __init__(self, model: AveragedModel, schedule: Schedule, algorithm: Algorithm, group: Group) -> None:
        super().__init__(model, schedule, algorithm, group.transport)
        self.turns = self.averaged_steps = 0
        self.group = group
        # Members that make as many steps as they can average at different step counts.
        self.tolerates_other_settings = not group.send_optimizer or schedule.every_seconds is not None
        self._averaged_at = monotonic()

    def count_step(self, work: float) -> None:
        super().count_step(work if self.group.weigh_by == "steps" else 0.0)

    def is_due(self) -> bool:
        seconds = 0.0
        if self.schedule.every_seconds is not None:
            seconds = self.group.broadcast_scalar(monotonic() - self._averaged_at)
        return self.schedule.is_due(self.steps, self.turns, self.steps - self.averaged_steps, seconds)

    def engine_after(self, step: int) -> Engine:
        return self.warmup_engine if step < self.schedule.warmup.steps else self.engine

    def contribution(self) -> tuple[float, Values]:
        fragments = self.fragments_at(self.steps, self.turns)
        return fragments[0].work, self.changes_of(fragments)

    def start(self, known: Values, scale: float, step: int, *, is_last: bool) -> PendingAverage[Fragment]:
        fragments = self._fragments_left(step) if is_last else self.fragments_at(step, self.turns)
        changes = {it: known[it] if it in known else it.changes() for it in fragments}
        return self.send(changes, scale, step, is_delayed=self.schedule.is_delayed(step))

    def _fragments_left(self, step: int) -> Sequence[Fragment]:
        """Return the fragments that have made steps since their last averaging."""
        # Decide by what a newcomer knows, too. Leave out the fragment that was averaged just now: an outer
        # step without a change would still move it along its momentum.
        fragments = self.model.fragments
        last = fragments[(self.turns - 1) % len(fragments)] if step == self.averaged_steps else None
        return [it for it in fragments if it is not last] or self.fragments_at(step, self.turns)

    def commit_empty(self, *, may_be_empty: bool) -> None:
        self._averaged_at = monotonic()
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
        self.steps = step + self.age
        self.turns, self.averaged_steps = self.turns + (not self.schedule.is_warm_up(step)), step
        self.end_warmup()

    def shared_tensors(self) -> dict[str, torch.Tensor]:
        return {tensor.name: last for tensor, last in self.model.lasts}

    def reset(self, step: int, turns: int) -> None:
        for fragment in self.model.fragments:
            fragment.restore_last()
            fragment.work = fragment.sent_work = 0.0
        self.steps = self.averaged_steps = step
        self.turns = turns
        self.end_warmup()

    def description(self) -> Description:
        return {**super().description(), **self.settings(), "weigh_by": self.group.weigh_by}
