"""Members that come and go, to their user: how they join, leave, count, and are saved."""

from __future__ import annotations

import copy
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp_model import plain_name
from thinwire.algorithms import Algorithm
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import Description
from thinwire.errors import AttachError, ConfigError, LeftError, StateError, StepError
from thinwire.local_sgd.core import Averager
from thinwire.local_sgd.fragment import Averaged, layouts_of
from thinwire.local_sgd.groups.averageable import Averageable
from thinwire.local_sgd.groups.elastic import Elastic
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.groups.inner_settings import InnerSettings, inner_settings
from thinwire.local_sgd.groups.machine import MachineGroup
from thinwire.local_sgd.groups.presence import MembershipStats
from thinwire.local_sgd.groups.state_transfer import plain
from thinwire.local_sgd.model import (
    AveragedModel,
    Optimizers,
    as_sharded,
    checked_optimizers,
    replica_of,
    unwrapped,
)
from thinwire.local_sgd.outer import held_by
from thinwire.local_sgd.replica import Replica
from thinwire.local_sgd.settings import Streaming
from thinwire.local_sgd.state import MEMBERS_KEY, LoadedState, checked_state, members_of
from thinwire.sync import Engine, Settings
from thinwire.sync.precision import full_precision
from thinwire.sync.state import FORMAT, in_memory_order
from thinwire.tensors.layout import local_tensor

Entered = TypeVar("Entered", bound="Member")


class Member(Averager, Averageable):
    """One member of a group that changes; the base of `elastic.LocalSGD` and `elastic.Steps`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        algorithm: Algorithm,
        group: Group | None,
        streaming: Streaming,
    ) -> None:
        module, ddp = unwrapped(model)
        in_job = dist.get_world_size() if dist.is_initialized() else 1
        _check_model(module, ddp, in_job if group is None else group.inside.size)
        self._group = _group_of_environment() if group is None else group
        replica = Replica()
        if self._group.inside.size > 1:
            self._group = MachineGroup(self._group, has_parts=ddp is None)
            if ddp is None:
                replica = replica_of(module, self._group.transport, has_subgroup=False)
        held = AveragedModel(module, replica, ddp, buffers=streaming.average_buffers)
        averaged = held.tensors()
        optimizers = checked_optimizers(optimizer, averaged, module, replica)
        self._sent_optimizers = optimizers if self._group.send_optimizer else ()
        if self._sent_optimizers:
            _check_hold_all(self._sent_optimizers, averaged)
        specs, parts = [tensor.spec for tensor in averaged], layouts_of(averaged, streaming.fragments)
        # If each process has a part, a mean is finite if those of all are.
        settings = Settings(health_group=self._group.inside if self._group.has_parts else None)
        engine = Engine(algorithm, self._group.transport, specs, settings, parts=parts)
        super().__init__(held, optimizers, engine, replica.sync_of(engine))
        self._device = averaged[0].tensor.device
        self._membership = Elastic(self._group, engine, self, self._device)
        self._turns = self._pending_steps = 0

    @property
    def is_leaving(self) -> bool:
        """Whether this member leaves after its next averaging."""
        return self._membership.is_leaving

    @property
    def has_left(self) -> bool:
        """Whether this member has left."""
        return self._membership.has_left

    def membership(self) -> MembershipStats:
        """Return who has come and gone so far, as this member has seen it."""
        return replace(self._membership.stats)

    def numbers(self) -> dict[str, float]:
        """Return `membership()` by name, as a `thinwire.Watch` logs it."""
        return {name: float(value) for name, value in vars(self._membership.stats).items()}

    def leave(self) -> None:
        """Leave after the next averaging, handing over what this member has not transmitted."""
        self._membership.is_leaving = True

    @torch.inference_mode(False)
    def __enter__(self: Entered) -> Entered:
        """Join: wait until the others, and enough of them, are there, and start from what they hold.

        With `elastic.Steps` it takes part in a step of the others, to which it adds nothing. After
        `load_state_dict` it starts from the state, with all that have loaded it.
        """
        if self._model.entered:
            raise StepError("this context has been entered before; make a new one")
        self._begin()
        with ExitStack() as attached:
            attached.callback(self._membership.leave)
            if self._loaded is not None:
                self._start_from(self._loaded)
                members = members_of(self._loaded)
                self._membership.resume(members["lineage"], members["commits"])
                self._loaded = None
            self._model.enter(self._model.tensors())
            # A state that can't be sent fails here, before training; else the first newcomer would stop all.
            plain(self._state())
            attached.callback(setattr, self, "_is_inside", False)
            # Undone from the last: SIGTERM gets its old handler first, so one that comes while the group is
            # left ends the process.
            if self._group.leaves_on_sigterm and threading.current_thread() is threading.main_thread():
                attached.enter_context(_on_sigterm(self.leave))
            # Asked to leave while it waited for others: its first step says so, and the loop ends as ever.
            with suppress(LeftError):
                self._transact(self._membership.average)
            self._is_inside = True
            attached.enter_context(self._in_loop())
            self._attached = attached.pop_all()
        return self

    def _begin(self) -> None:
        """Make what a member needs only inside the context."""

    def _in_loop(self) -> AbstractContextManager[None]:
        """Count the steps of the user's loop while this is open."""
        return nullcontext()

    def _transact(self, average: Callable[[], Any]) -> Any:
        """Average, or a part of it. Collective."""
        if self._membership.stats.averagings == 1:
            plain(self._state())  # again: optimizers have their state only since the first step
        with full_precision(self._device):  # the step may stand under autocast
            return average()

    def _check_inside(self, call: str) -> None:
        self._check_there(call)
        super()._check_inside(call)

    def _check_there(self, call: str) -> None:
        """Refuse a call of a member that has left, or while the model shows the last average."""
        if self.has_left:
            raise LeftError(f"{call} came after this member has left its group; end the loop")
        self._model.check_own(call)

    def _not_averaged(self) -> dict[str, torch.Tensor]:
        """Return, by name, what a newcomer must be given besides: frozen parameters and other buffers."""
        # Found by identity: a compiled block's names are not those it is averaged under.
        averaged = {id(item.tensor) for item in self._model.tensors()}
        held = chain(self.module.named_parameters(), self.module.named_buffers())
        return {plain_name(name): local_tensor(tensor) for name, tensor in held if id(tensor) not in averaged}

    @abstractmethod
    def _held(self) -> dict[str, torch.Tensor]:
        """Return by name what is the same on all members after an averaging, the tensors themselves."""

    # Members compare this, and a newcomer starts from it.

    def _described(self) -> Description:
        sent = ", ".join(type(optimizer).__name__ for optimizer in self._sent_optimizers)
        return {
            **self._engine.buckets.described("an averaging", self._device),
            "torch": torch.__version__.partition("+")[0],
            "group": self._group.kind,
            "kind": type(self).__name__,
            "optimizer": sent or "each its own",
        }

    @property
    def _may_be_set_otherwise(self) -> bool:
        return not self._sent_optimizers

    def _inner_settings(self) -> InnerSettings:
        return inner_settings(self._optimizers)

    def _follow(self, step: int) -> None:
        """Use the algorithm that the others do after this step."""

    def _state(self, sync: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the state a newcomer starts from, or (with the engine's own state) a run that resumes."""
        # It is as of the last averaging, for a newcomer too: later steps are in no model but this one's.
        step = self._steps - self._pending_steps
        state: dict[str, Any] = {
            "version": FORMAT,
            "step": step,
            "sent_after": (step,),
            "in_flight": (),
            "last_average": self._held(),
            "sync": self._engine.state.common_state(self._engine.algorithm) if sync is None else sync,
            "outer": None if self._model.outer is None else self._model.outer.state_dict(),
        }
        state[MEMBERS_KEY] = {
            "lineage": self._membership.lineage,
            "commits": self._membership.commits,
            "turns": self._turns,
            "not_averaged": self._not_averaged(),
            "residual_of": tuple(sorted(self._engine.state.memory[ERROR])),
            "optimizers": [_own_state(optimizer) for optimizer in self._sent_optimizers],
        }
        return state

    def _checked(self, state: Mapping[str, Any]) -> LoadedState:
        """Return a state that was saved or received, if it is one of this model."""
        shapes = {tensor.name: tuple(tensor.value.shape) for tensor in self._model.tensors()}
        loaded = checked_state(state, [shapes], has_outer=self._make_outer is not None)
        if loaded.in_flight:
            raise StateError(
                "the state was saved while an average was in flight, and members that come and go start from "
                "an average; save after average()"
            )
        return loaded

    def _adopt(self, state: Mapping[str, Any]) -> None:
        self._start_from(self._checked(state))

    def _start_from(self, loaded: LoadedState) -> None:
        """Go on from a state; what was made until then counts no more."""
        # All that may refuse comes first: then nothing has changed.
        held, others, members = self._held(), self._not_averaged(), members_of(loaded)
        if loaded.members is not None:  # a fixed group's has no others
            _check_like(members["not_averaged"], others)
        of_engine = self._engine.check_state_dict(loaded.sync)
        outer = self._model.outer if loaded.outer is not None else None
        optimizers, states = [] if outer is None else [outer], [] if outer is None else [loaded.outer]
        if loaded.members is not None:
            optimizers, states = [*optimizers, *self._sent_optimizers], [*states, *members["optimizers"]]
        _load_optimizers(optimizers, states)
        errors = of_engine.slots.get(ERROR, {})
        common = {slot: tensors for slot, tensors in of_engine.slots.items() if not slot.is_local}
        self._engine.load(of_engine._replace(slots=common))
        for spec in self._engine.specs:
            # On which parameters there is a residual decides what messages look like: a newcomer's is zeros.
            if spec.name in errors or spec.name in members["residual_of"]:
                error = errors.get(spec.name, torch.zeros(spec.shape))
                self._engine.state.put_error(spec.name, in_memory_order(ERROR, error, spec, self._device))
        for tensors, targets in (loaded.last_average, held), (members["not_averaged"], others):
            for name, tensor in tensors.items():
                targets[name].copy_(tensor)
        self._model.loads.forget()
        self._steps, self._turns, self._pending_steps = loaded.step, members["turns"], 0

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run: model, outer optimizer, residual, counts, lineage. Collective.

        What is pending is averaged first, so the model is the last average. All members that are there take
        part, those that do not call this at their next averaging; the residual becomes its mean over them,
        here and in the state. So the states of all members that call it are the same but for the optimizers
        inside, of which each has its own. Any number of members may resume from one.

        Raises:
            StepError: Outside the context.
            LeftError: This member has left.
            CommunicationError: No averaging has succeeded in the group's `wait_seconds`.
        """
        self._check_inside("state_dict()")
        self._transact(self._average_pending)
        state = self._state(self._transact(self._membership.save))
        copied: dict[str, Any] = plain(state)
        return copy.deepcopy(copied)

    def _average_pending(self) -> None:
        """Average what has not been averaged yet. Collective."""

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved by `state_dict`; before entering.

        Members that have loaded it start from it together; those that have not take it over from them. The
        model and (with `send_optimizer`) the optimizers become those of the state, on entry.

        Raises:
            StateError: It is not such a state, or is of a different model.
            StepError: The context was entered already.
        """
        if self._model.entered:
            raise StepError("load the state before the context is entered")
        self._loaded = self._checked(copy.deepcopy(state))


def _check_model(module: nn.Module, ddp: DistributedDataParallel | None, num_processes: int) -> None:
    """Refuse a model that the processes of a member do not hold together."""
    meshes = (parameter.device_mesh for parameter in module.parameters() if hasattr(parameter, "device_mesh"))
    inside = max((mesh.size() for mesh in meshes), default=1) if ddp is None else ddp.process_group.size()
    if inside != num_processes:
        raise AttachError(
            f"the model is on {inside} processes, and this member has {num_processes}. Call "
            "init_process_group() for the processes of this member alone, before its group is made, and give "
            "its DDP model, or one of DTensors over them (fully_shard, tensor or expert parallelism); or, if "
            "each process is a member, call no init_process_group, and give the plain module: members find "
            "each other through the lighthouse"
        )


def _check_hold_all(optimizers: Sequence[torch.optim.Optimizer], averaged: Sequence[Averaged]) -> None:
    held = set[int]().union(*map(held_by, optimizers))
    # Statistics are buffers, which no one trains.
    trained = [parameter for parameter in averaged if not parameter.spec.is_statistic]
    others = [parameter.name for parameter in trained if id(parameter.tensor) not in held]
    if others:
        raise ConfigError(
            f"{len(others)} of the model's {len(trained)} trainable parameters, such as {others[0]!r}, are "
            "in none of the optimizers that were passed, and a member that joins is given the state of these "
            "only: pass all that train the model, [first, second], in the order of their steps, and freeze "
            "what none of them trains: requires_grad_(False)"
        )


@contextmanager
def _on_sigterm(leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` on SIGTERM while this is open."""

    def handler(number: int, frame: FrameType | None) -> None:
        leave()

    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # None is a handler that was not installed from Python; it can't be put back from here.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def _group_of_environment() -> Group:
    """Return a `TorchftGroup` as the environment says."""
    # Imported here: torchft is an extra, and a group of a different kind does without.
    from thinwire.local_sgd.groups.torchft_group import TorchftGroup  # noqa: PLC0415

    return TorchftGroup()


def _check_like(tensors: object, own: Mapping[str, torch.Tensor]) -> None:
    """Refuse a state whose tensors that are not averaged are others than this member's."""

    def kind(of: object) -> object:
        return (of.shape, of.dtype) if isinstance(of, torch.Tensor) else None

    is_like = isinstance(tensors, Mapping) and tensors.keys() == own.keys()
    if not is_like or any(kind(tensors[name]) != kind(own[name]) for name in own):  # type: ignore[index]
        raise StateError(
            "the state's not_averaged is of other tensors than this member's model; start the same script as "
            "the others, or load the state of the same model"
        )


def _own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, of sharded parameters that of what this process holds."""
    state = optimizer.state_dict()
    held = {
        number: {key: local_tensor(it) if hasattr(it, "to_local") else it for key, it in of_one.items()}
        for number, of_one in state["state"].items()
    }
    return {**state, "state": held}


def _as_held(states: Mapping[Any, Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return an optimizer's state of each parameter, by number, as this process holds the parameter."""
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    held: dict[Any, Any] = dict(states)
    for number, state in states.items():
        parameter = parameters[number]
        if hasattr(parameter, "to_local"):
            shape = local_tensor(parameter).shape
            held[number] = {
                key: as_sharded(parameter, value.clone()) if getattr(value, "shape", None) == shape else value
                for key, value in state.items()
            }
    return held


def _load_optimizers(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any]) -> None:
    """Let optimizers go on from a state: all of them, or none."""
    if len(states) != len(optimizers):
        raise StateError(
            f"the state is of {len(states)} optimizers, expected {len(optimizers)}; start the same script as "
            "the others"
        )
    before = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
    for optimizer, its_state in zip(optimizers, states, strict=True):
        try:
            # Loading does not look into them, and the next step would.
            if not all(isinstance(values, Mapping) for values in its_state["state"].values()):
                raise TypeError("it has a parameter's state that is no mapping")
            optimizer.load_state_dict({**its_state, "state": _as_held(its_state["state"], optimizer)})
        except Exception as error:  # optimizers raise what they like
            for restored, (state, groups) in zip(optimizers, before, strict=True):
                restored.state, restored.param_groups = state, groups
            raise StateError(
                f"the state is of a different {type(optimizer).__name__} than this member's: {error}"
            ) from error
