"""Base classes of all averagers of models, or of gradients with members that change."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.algorithms import Algorithm
from thinwire.errors import ConfigError, LeftError, StateError, StepError
from thinwire.local_sgd.elastic_contributor import ElasticContributor
from thinwire.local_sgd.elastic_membership import ElasticMembership
from thinwire.local_sgd.inner_optimizers import check_copies, check_owned, refuse_messages, with_wrapped
from thinwire.local_sgd.membership import StaticMembership
from thinwire.local_sgd.model_changes import ModelChanges
from thinwire.local_sgd.outer import warn_of_momentum
from thinwire.local_sgd.saved_state import LoadedState
from thinwire.local_sgd.training_loop import call_after_steps, warn_of_uncounted_steps
from thinwire.sync import GradientSync
from thinwire.sync.handle import not_copied
from thinwire.sync.precision import full_precision
from thinwire.sync.stats import Stats
from thinwire.torch_private import closure_not_compiled, takes_step_hooks

Membership: TypeAlias = StaticMembership | ElasticMembership
"""Starts and finishes averagings with the members of a group."""

# By parameter, the averager whose context was entered last. Weak keys and values, which release the model.
_averager_of: MutableMapping[torch.Tensor, ref[Averager]] = WeakTensorKeyDictionary()


class Averager(AbstractContextManager[Any]):
    """A context around a training loop, in which a membership averages a contributor's tensors.

    Attributes:
        sync: The handle of the averagings: it has their plan, and can switch the algorithm.
        observers: Called after every step, with True.
    """

    def __init__(self, contributor: ModelChanges | ElasticContributor, membership: Membership) -> None:
        super().__init__()
        self._contributor, self._membership = contributor, membership
        self._model, self._optimizers = contributor.model, contributor.model.optimizers
        self._engine = contributor.engine
        self.sync: GradientSync = self._model.replica.sync_of(self._engine)
        self.observers: list[Callable[[bool], None]] = []
        self._attached = ExitStack()
        self._is_inside = False
        self._loaded: LoadedState | None = None  # until entry
        # `sync` counts the same through this. It is weak: a cycle would delay the freeing of memory.
        self._engine.reporter.adjusted = partial(_with_steps, ref(self))

    def __reduce__(self) -> NoReturn:
        raise not_copied(f"a {type(self).__name__}")

    @property
    def module(self) -> nn.Module:
        """The model, without its wrappers."""
        return self._model.module

    @property
    def steps(self) -> int:
        """Attempted steps; a member that joins gets the others' count."""
        return self._contributor.steps

    @property
    def has_state(self) -> bool:
        """Whether there is anything to save: from entry on."""
        return bool(self._model.entered)

    def stats(self) -> Stats:
        """Return the traffic over the group, buffers included, compared with data-parallel training.

        `steps` are attempted steps. `gradient_bytes` are the bytes that averaging exact gradients in each of
        them would have sent, so `compression_ratio` compares with plain data-parallel training. Traffic
        within a subgroup is not counted, nor is the time spent waiting for slower processes. `sync.stats()`
        returns the same.
        """
        return self.sync.stats()

    def counts(self) -> Stats:
        """Return `stats()` without errors; see `Engine.counts`."""
        return self._engine.reporter.counts()

    def _refuse_nested(self) -> None:
        """Raise if another open context averages the model, or a part of it."""
        averaged = self._model.tensors()
        for item in averaged:
            other = _averager_of[item.tensor]() if item.tensor in _averager_of else None
            if other is not None and other._is_inside:
                raise ConfigError(
                    f"{item.name} is averaged already, by the {type(other).__name__} whose context is open; "
                    "leave that context first, or use only one of the two (LocalSGD also averages within a "
                    "machine: subgroup=)"
                )
        _averager_of.update((item.tensor, ref(self)) for item in averaged)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Call the observers at the end if a step was made inside, even if this member has left with it."""
        steps_before = self._contributor.steps_here
        try:
            yield
        except LeftError:
            self._tell_observers(steps_before)
            raise
        self._tell_observers(steps_before)

    def _tell_observers(self, steps_before: int) -> None:
        if self._contributor.steps_here > steps_before:
            for observer in tuple(self.observers):  # a copy: an observer may remove itself when called
                observer(True)

    def _check_not_over(self, call: str) -> None:
        """Raise if this member has left, or while the model shows the last average."""
        if self._membership.has_left:
            raise LeftError(f"{call} was called after this member had left; end the loop, and save inside it")
        # A step would change the average, and be lost when the model's own values are restored.
        if self._model.shows_average:
            raise StepError(
                f"{call} was called inside averaged(), which shows the last average; leave it first"
            )

    def _check_inside(self, call: str) -> None:
        """Raise outside the context, or if the model has changed."""
        self._check_not_over(call)
        if not self._is_inside:
            raise StepError(f"{call} was called outside the context; call it inside `with local:`")
        self._model.check_unchanged()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that a run resumes from. Collective."""

    @abstractmethod
    def load_state_dict(self, state: Any) -> None:
        """Load a state saved by `state_dict`; call it before entering."""

    def distributed_state(self) -> DistributedState:
        """Return the object that `torch.distributed.checkpoint` saves and loads with model and optimizer.

        Save inside the context, on all processes; load before entering it. Models differ between averagings,
        and `torch.distributed.checkpoint` saves an unsharded model of one process: call `average()` before.

        Cost: that of `state_dict`, and its bytes, on each process.
        """
        return DistributedState(self)


def _with_steps(averager: ref[Averager], stats: Stats) -> Stats:
    """Return stats compared with averaging exact gradients in each step."""
    if (self := averager()) is None:
        return stats
    # Only steps of this run: traffic from before a resume is not counted either.
    step_bytes = sum(spec.gradient_bytes for spec in self._engine.specs if not spec.is_statistic)
    return replace(stats, steps=self.steps, gradient_bytes=self._contributor.steps_here * step_bytes)


class DistributedState:
    """A state as `torch.distributed.checkpoint` saves and loads it: as the bytes of one file."""

    # To load, torch first asks a fresh run for its state and fills in only the keys it finds. Before the
    # context is entered, that state would lack averages and momenta.

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def state_dict(self) -> dict[str, bytes]:
        """Return the state's bytes; none if there is nothing to save yet. Collective."""
        file = io.BytesIO()
        if self._averager.has_state:
            torch.save(self._averager.state_dict(), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load the result of `state_dict`."""
        if not state["state"]:
            raise StateError(
                "the checkpoint was saved before the context was entered, so it has no state of it; save "
                "inside the context, or load only the model and the optimizer"
            )
        self._averager.load_state_dict(torch.load(io.BytesIO(state["state"]), weights_only=True, mmap=False))


class ModelAverager(Averager):
    """Averages a model every few steps: the base of `LocalSGD` and `elastic.LocalSGD`."""

    _contributor: ModelChanges

    def __init__(self, changes: ModelChanges, membership: Membership, grad_scaler: GradScaler | None) -> None:
        super().__init__(changes, membership)
        self._schedule, self._grad_scaler = changes.schedule, grad_scaler
        self._seen = set[tuple[int, str, int]]()  # see `check_copies`
        self._warned_for: Algorithm | None = None  # the algorithm for which the outer momentum was checked

    def __str__(self) -> str:
        return f"{type(self).__name__}({self._schedule}), {self.sync.algorithm}"

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, from entry on; for example for a learning-rate schedule."""
        return self._model.outer if self._model.entered else None

    def _check_copies(self) -> None:
        """Refuse optimizers that keep copies of the weights: they would undo an average."""
        lasts = {id(parameter.tensor): last for parameter, last in self._model.lasts}
        check_copies(self._optimizers, lasts, self._seen)

    def _check_momentum(self, *, stacklevel: int) -> None:
        algorithm = self._engine.algorithm
        if algorithm is not self._warned_for:  # it may have changed since the last averaging
            self._warned_for = algorithm
            warn_of_momentum(self._model.outer, algorithm, stacklevel=stacklevel + 1)

    def _watch_loop(self, attached: ExitStack) -> None:
        """Count the steps of the user's loop until `attached` is closed."""
        stepped = [list(filter(takes_step_hooks, with_wrapped(optimizer))) for optimizer in self._optimizers]
        optimizers, owned = list(chain(*stepped)), set(map(id, self.module.parameters()))

        @closure_not_compiled
        def check(*_: object) -> None:
            try:
                check_owned(self._optimizers, owned)
            except ConfigError:
                self._model.check_unchanged()  # says so if the model has got new layers
                raise
            self._model.check_loads()

        for optimizer in optimizers:
            attached.enter_context(optimizer.register_step_pre_hook(check))
        self._model.note_loads(attached)
        refuse_messages(optimizers, self._engine.transport, attached)
        warn_of_uncounted_steps(owned, optimizers, lambda: self._contributor.steps_here, attached)
        call_after_steps(self._after_own_step, stepped[-1], self._grad_scaler, attached)

    def _after_own_step(self) -> None:
        """Count a step that the optimizer, or the scaler, has attempted."""
        # Checking the whole model in every step would take too long.
        self._check_not_over("a step")
        if self._contributor.steps_here == 0:  # optimizers create their state in the first step
            self._check_copies()
        self._after_step(1.0)

    def _after_step(self, work: float) -> None:
        """Count a step, and average as the schedule says."""
        with self._observed():
            self._contributor.count_step(work)
            self._average_if_due()

    def _average_if_due(self) -> None:
        contributor, membership, schedule = self._contributor, self._membership, self._schedule
        if membership.is_open and contributor.age >= schedule.streaming.delay_steps:
            with self._collective("a step"):
                membership.finish()
        if not membership.is_open and contributor.is_due():
            with self._collective("a step"):
                membership.start()
                if not schedule.is_delayed(contributor.steps):
                    membership.finish()

    @contextmanager
    def _collective(self, call: str) -> Iterator[None]:
        """Check the model first; if anything fails inside, drop the pending average of fixed members."""
        self._check_inside(call)
        self._check_copies()
        self._check_momentum(stacklevel=4)
        if self._contributor.steps_here > 1:  # after the first one a teacher has not followed yet
            self._model.compare_frozen()
        try:
            # The step may run under autocast, which would round the arithmetic on changes.
            with full_precision(self._model.device):
                yield
        except BaseException:
            self._membership.abandon()
            raise

    @abstractmethod
    def average(self) -> None:
        """Average now. Collective."""

    def averaged(self) -> AbstractContextManager[None]:
        """Make the model hold the last averages, the same on all processes, inside a context, to evaluate.

        Nothing is sent. The last averages of fragments are from different steps. Afterwards the model has its
        own values again, averaged buffers too. Other buffers (`num_batches_tracked`) are left alone: evaluate
        with `model.eval()`. Save `model.state_dict()` inside to keep only the averaged model.

        Cost: a copy of the averaged tensors.

        Raises:
            StepError: Called outside the averager's context; or (from an optimizer step) inside this one.
        """
        self._check_inside("averaged()")
        return self._model.holding_average()
