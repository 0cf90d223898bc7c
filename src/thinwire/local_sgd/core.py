"""Base classes of all that average models, or gradients with members that change: a counted context."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.checks import checked_scaler
from thinwire.comm import ProcessGroupTransport
from thinwire.errors import StepError
from thinwire.local_sgd.fragment import Fragments
from thinwire.local_sgd.inner import CopiesOfWeights, silent_steps
from thinwire.local_sgd.loop import after_each_step
from thinwire.local_sgd.model import AveragedModel, check_gradient_settings
from thinwire.local_sgd.outer import Outer, check_outer
from thinwire.local_sgd.schedule import Schedule
from thinwire.local_sgd.state import LoadedState
from thinwire.sync import Engine, GradientSync
from thinwire.sync.handle import not_copied
from thinwire.sync.stats import Stats


class Averager(AbstractContextManager[Any]):
    """A context around a training loop, in which something is averaged."""

    _make_outer: Outer | None = None

    def __init__(
        self,
        model: AveragedModel,
        optimizers: Sequence[torch.optim.Optimizer],
        engine: Engine,
        sync: GradientSync,
    ) -> None:
        super().__init__()
        self._model, self._optimizers, self._engine, self.sync = model, optimizers, engine, sync
        self.observers: list[Callable[[bool], None]] = []  # called after every step, with True
        self._attached = ExitStack()
        self._is_inside = False
        self._steps = self._steps_here = 0
        self._loaded: LoadedState | None = None  # until entry
        # So that `sync` counts the same. Weak: the engine is part of this, and its memory should go at once.
        compared = WeakMethod(self._compared)
        engine.reporter.compared = lambda stats: stats if (method := compared()) is None else method(stats)

    def __reduce__(self) -> NoReturn:
        raise not_copied(f"a {type(self).__name__}")

    @property
    def module(self) -> nn.Module:
        """The model, without what is around it."""
        return self._model.module

    @property
    def steps(self) -> int:
        """Attempted steps; a member that joins takes over those of the others."""
        return self._steps

    @property
    def has_state(self) -> bool:
        """Whether there is anything to save: from entry on."""
        return bool(self._model.entered)

    def stats(self) -> Stats:
        """Return the traffic to the group, buffers included, and how much less it is than data-parallel.

        `steps` are attempted steps, and `gradient_bytes` those that averaging exact gradients in each of
        them would have sent, so `compression_ratio` compares with plain data-parallel training. What is
        sent within a subgroup is not in it, nor the time spent waiting for processes that are slower.
        `sync.stats()` is the same.
        """
        return self.sync.stats()

    def counts(self) -> Stats:
        """Return `stats()` without errors; see `Engine.counts`."""
        return self._engine.reporter.counts()

    def _compared(self, stats: Stats) -> Stats:
        # Gradients of the steps made here: what was sent before a resume is not in the traffic either.
        step_bytes = sum(spec.gradient_bytes for spec in self._engine.specs if not spec.is_statistic)
        return replace(stats, steps=self.steps, gradient_bytes=self._steps_here * step_bytes)

    def _tell_observers(self) -> None:
        for observer in tuple(self.observers):  # a copy: one may leave while it is called
            observer(True)

    def _check_inside(self, call: str) -> None:
        """Refuse a call outside the context, or with a model that has changed."""
        if not self._is_inside:
            raise StepError(f"{call} was called outside the context; call it inside: with local: …")
        self._model.check_unchanged()
        self._model.check_own(call)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that a run resumes from. Collective."""

    @abstractmethod
    def load_state_dict(self, state: Any) -> None:
        """Continue from a state saved by `state_dict`; before entering."""

    def distributed_state(self) -> DistributedState:
        """Return the object that `torch.distributed.checkpoint` saves and loads, beside model and optimizer.

        `state_dict` and `load_state_dict` in one: save within the context, load before entering it. All
        processes must save. Their models differ between averagings, so what that module saves of a model that
        is not sharded is one process's: call `average()` before.

        Cost: as of `state_dict`, and its bytes, on each process.
        """
        return DistributedState(self)


class DistributedState:
    """A state as `torch.distributed.checkpoint` saves and loads it: all of it as the bytes of one file."""

    # In bytes: to load, it first asks a fresh run for a state, and fills in only the keys that are there.
    # Before the context is entered a `LocalSGD` has neither averages nor momenta to show.

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def state_dict(self) -> dict[str, bytes]:
        """Return the state's bytes; none of them if there is nothing to save yet. Collective."""
        file = io.BytesIO()
        if self._averager.has_state:
            torch.save(self._averager.state_dict(), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load what `state_dict` has returned."""
        self._averager.load_state_dict(torch.load(io.BytesIO(state["state"]), weights_only=True))


class ModelAverager(Averager):
    """Averages a model every few steps; the base of `LocalSGD` and `elastic.LocalSGD`."""

    def _configure(self, schedule: Schedule, outer: Outer | None, grad_scaler: GradScaler | None) -> None:
        """Take the settings that all models are averaged by."""
        check_outer(outer)
        self._schedule, self._make_outer = schedule, outer
        self._grad_scaler = checked_scaler(grad_scaler)
        check_gradient_settings(schedule, grad_scaler)
        self._copies = CopiesOfWeights()

    def _check_copies(self) -> None:
        """Refuse optimizers that keep copies of the weights, and would undo an average with them."""
        self._copies.check(
            self._optimizers, {id(parameter.tensor): last for parameter, last in self._fragments.lasts}
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}({self._schedule}), {self.sync.algorithm}"

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, from entry on; for a learning-rate schedule, say."""
        return self._model.outer if self._model.entered else None

    @property
    def _fragments(self) -> Fragments:
        return self._model.fragments

    @contextmanager
    def _in_loop(self) -> Iterator[None]:
        """Count the steps of the user's loop while this is open."""
        loads = self._model.loads.noted(self.module, self._optimizers, self._fragments.checksum)
        transport = self._engine.transport
        group = transport.group if isinstance(transport, ProcessGroupTransport) else None
        silent = silent_steps(self._optimizers, group)
        with loads, silent, after_each_step(self._optimizers[-1], self._grad_scaler, self._after_own_step):
            yield

    @abstractmethod
    def _after_own_step(self) -> None:
        """Count a step that the optimizer, or the scaler, has attempted, and average if it is time to."""

    @abstractmethod
    def average(self) -> None:
        """Average now. Collective."""

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model hold the last averages, the same on all processes, while this is open: to evaluate.

        Between averagings each process's model is its own, and with fragments their last averages are of
        different steps. Nothing is sent. What the model held comes back afterwards, averaged buffers too.
        Others, such as BatchNorm's `num_batches_tracked`, are left alone: evaluate with `model.eval()`. Save
        `model.state_dict()` in it to keep the averaged model alone.

        Cost: a copy of what is averaged.

        Raises:
            StepError: Outside the context; or, from the optimizer's step, if one is taken inside.
        """
        self._check_inside("averaged()")
        return self._model.holding_average()
