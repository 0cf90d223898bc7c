"""Members that come and go, to their user: how they join, leave, count, and are saved."""

from __future__ import annotations

import copy
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from thinwire.errors import AttachError, ConfigError, LeftError, StepError
from thinwire.local_sgd.averaged_model import AveragedModel, replica_of, unwrapped
from thinwire.local_sgd.averager import Averager
from thinwire.local_sgd.elastic_membership import ElasticMembership
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.groups.machine_group import MachineGroup
from thinwire.local_sgd.groups.state_transfer import plain
from thinwire.local_sgd.inner_optimizers import Optimizers, checked_optimizers, parameters_of
from thinwire.local_sgd.member_status import MembershipStats
from thinwire.local_sgd.outer import Outer
from thinwire.local_sgd.replica import Replica
from thinwire.local_sgd.saved_state import members_of
from thinwire.sync.precision import full_precision

Entered = TypeVar("Entered", bound="Member")


def joining(
    model: nn.Module, optimizer: Optimizers, group: Group | None, *, buffers: bool, outer: Outer | None = None
) -> tuple[AveragedModel, tuple[torch.optim.Optimizer, ...], Group]:
    """Check a user's model and optimizers, and find the group."""
    module, ddp = unwrapped(model)
    if group is None:
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
    else:
        num_processes = group.inside.size
    meshes = (parameter.device_mesh for parameter in module.parameters() if hasattr(parameter, "device_mesh"))
    spanned = max((mesh.size() for mesh in meshes), default=1) if ddp is None else ddp.process_group.size()
    if spanned != num_processes:
        raise AttachError(
            f"this member has {num_processes} processes but the model spans {spanned}. Pass its DDP model or "
            "one of DTensors, and call init_process_group() for the member's processes only (docs/elastic.md)"
        )
    if group is None:
        # Imported here: torchft is an extra, and a group of a different kind does without.
        from thinwire.local_sgd.groups.torchft_group import TorchftGroup  # noqa: PLC0415

        group = TorchftGroup()
    replica = Replica()
    if group.inside.size > 1:
        group = MachineGroup(group, has_parts=ddp is None)
        if ddp is None:
            replica = replica_of(module, group.transport, has_subgroup=False)
    averaged = AveragedModel(module, replica, ddp, buffers=buffers, make_outer=outer)
    tensors = averaged.tensors()
    optimizers = checked_optimizers(optimizer, tensors, module, is_sharded=replica.is_sharded)
    if group.send_optimizer:
        stepped = {id(parameter) for inner in optimizers for parameter in parameters_of(inner)}
        others = [it.name for it in tensors if not it.is_buffer and id(it.tensor) not in stepped]
        if others:
            raise ConfigError(
                f"{len(others)} trainable parameters (e.g. {others[0]!r}) are in no optimizer passed, and a "
                "member that joins is given the state of these only; pass every optimizer or freeze them"
            )
    return averaged, optimizers, group


class Member(Averager):
    """One member of a group that changes; the base of `elastic.LocalSGD` and `elastic.Steps`."""

    _membership: ElasticMembership

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
        """Leave after the next averaging, which takes over what this member has not transmitted."""
        self._membership.is_leaving = True

    @torch.inference_mode(False)
    def __enter__(self: Entered) -> Entered:
        """Join: wait until the others, and enough of them, are there, and start from what they hold.

        With `elastic.Steps` it takes part in a step of the others, to which it adds nothing. After
        `load_state_dict` it starts from the state, with all that have loaded it.
        """
        membership = self._membership
        if self._model.entered:
            raise StepError("this context has been entered before; make a new one")
        with ExitStack() as attached:
            attached.callback(membership.leave)
            if self._loaded is not None:
                self._contributor.start_from(self._loaded)
                members = members_of(self._loaded)
                membership.stand_at(members["lineage"], members["commits"])
                self._loaded = None
            self._model.enter(self._model.tensors())
            # A state that can't be sent fails here, before training; else the first newcomer would stop all.
            plain(membership.state())
            attached.callback(setattr, self, "_is_inside", False)
            # Undone from the last: SIGTERM gets its old handler first, so one that comes while the group is
            # left ends the process.
            in_main_thread = threading.current_thread() is threading.main_thread()
            if membership.group.leaves_on_sigterm and in_main_thread:
                attached.enter_context(_on_sigterm(self.leave))
            # Asked to leave while it waited for others: its first step says so, and the loop ends as ever.
            with suppress(LeftError), full_precision(self._contributor.device):
                membership.average()
            self._is_inside = True
            attached.enter_context(self._in_loop())
            self._attached = attached.pop_all()
        return self

    @abstractmethod
    def _in_loop(self) -> AbstractContextManager[None]:
        """Watch the user's loop while this is open."""

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
        with full_precision(self._contributor.device):
            state = self._membership.state(self._membership.save())
        copied: dict[str, Any] = plain(state)
        return copy.deepcopy(copied)

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
        self._loaded = self._contributor.check_state(copy.deepcopy(state))


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
