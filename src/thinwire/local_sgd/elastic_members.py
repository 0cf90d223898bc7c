"""Elastic members: the contexts that users enter around a loop whose other members come and go."""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm, Quantize
from thinwire.checks import number
from thinwire.comm import gather_numbers
from thinwire.errors import AttachError, ConfigError, LeftError, StepError
from thinwire.local_sgd.averaged_model import AveragedModel, replica_of, unwrapped
from thinwire.local_sgd.averager import Averager, ModelAverager
from thinwire.local_sgd.elastic_contributor import ElasticChanges, ElasticContributor
from thinwire.local_sgd.elastic_membership import ElasticMembership
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.groups.machine_group import MachineGroup
from thinwire.local_sgd.groups.state_transfer import plain
from thinwire.local_sgd.groups.torchft_group import TorchftGroup
from thinwire.local_sgd.inner_optimizers import Optimizers, parameters_of
from thinwire.local_sgd.member_status import MembershipStats
from thinwire.local_sgd.outer import Nesterov, Outer, check_outer
from thinwire.local_sgd.replica import Replica
from thinwire.local_sgd.schedule import EXACT, NO_WARMUP, WHOLE, Schedule, Streaming, Warmup
from thinwire.local_sgd.training_loop import call_on_sigterm
from thinwire.sync.precision import full_precision

Entered = TypeVar("Entered", bound="Member")

MANY_STEPS = 30


class Member(Averager):
    """One member of a group that changes; the base of `elastic.LocalSGD` and `elastic.Steps`."""

    _contributor: ElasticContributor
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
        """Return the members that have come and gone so far, as this member has seen it."""
        return replace(self._membership.stats)

    def numbers(self) -> dict[str, float]:
        """Return `membership()` as numbers by name, as a `thinwire.Watch` logs them."""
        return {name: float(value) for name, value in vars(self._membership.stats).items()}

    def leave(self) -> None:
        """Leave after the next averaging, which hands this member's residual to the others."""
        self._membership.is_leaving = True

    @torch.inference_mode(False)
    def __enter__(self: Entered) -> Entered:
        """Join: wait for enough other members, and start from their state.

        With `elastic.Steps`, this member takes part in one step of the others, and adds nothing to it. After
        `load_state_dict` it starts from that state, together with all members that have loaded it.
        """
        membership = self._membership
        if self._model.entered or membership.has_left:
            raise StepError("this context was already entered; create a new one")
        self._refuse_nested()
        with ExitStack() as attached:
            attached.callback(membership.leave)
            if self._loaded is not None:
                self._contributor.start_from(self._loaded)
                membership.resume()
                self._loaded = None
            self._model.enter(self._model.tensors())
            # If a state can't be sent, fail now, before training; the first newcomer would stop all members.
            plain(self._contributor.state())
            attached.callback(setattr, self, "_is_inside", False)
            # Callbacks run in reverse: SIGTERM gets its old handler back first, so a SIGTERM while the group
            # is left ends the process.
            in_main_thread = threading.current_thread() is threading.main_thread()
            if membership.group.leaves_on_sigterm and in_main_thread:
                call_on_sigterm(self.leave, attached)
            # A member that is asked to leave while it waits here has left: its first step ends the loop.
            with suppress(LeftError), full_precision(self._model.device):
                membership.average()
            self._is_inside = True
            self._watch_loop(attached)
            self._attached = attached.pop_all()
        return self

    @abstractmethod
    def _watch_loop(self, attached: ExitStack) -> None:
        """Watch the user's loop until `attached` is closed."""

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run: model, outer optimizer, residual, counts, lineage. Collective.

        Pending changes are averaged first, so the model is the last average. All present members take part;
        a member that does not call this does so at its next averaging. The residual becomes the members' mean
        residual, in memory and in the state. States differ only in the inner optimizers. Any number of
        members can resume from one state.

        Raises:
            StepError: Outside the context.
            LeftError: This member has left.
            CommunicationError: No averaging has succeeded in the group's `wait_seconds`.
        """
        self._check_inside("state_dict()")
        with full_precision(self._model.device):
            state: dict[str, Any] = plain(self._contributor.state(self._membership.save()))
        return copy.deepcopy(state)

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state saved by `state_dict`; call it before entering.

        Members that have loaded it start from it together; the others receive it from them. On entry, the
        model and (with `send_optimizer`) the optimizers are set to the state.

        Raises:
            StateError: It is not such a state, or is from a different model.
            StepError: The context was entered already.
        """
        if self._model.entered:
            raise StepError("load the state before you enter the context")
        self._loaded = self._contributor.check_state(copy.deepcopy(state))


class LocalSGD(ModelAverager, Member):
    """Train each process on its own for some steps, then average with all present members.

    Like `thinwire.LocalSGD`, on a group whose members change. If a member dies or does not respond for too
    long in an averaging, the others repeat it immediately without that member. A member that joins, or comes
    back, waits on entry for the others' next averaging. It then receives their model, outer optimizer and
    counters, to the bit, and the state of one member's inner optimizers after its latest step.

    Each member's change is weighted by its work, in steps or as the group's `weigh_by` says. Its residual
    (what it has not transmitted) is kept when others come or go. A member that leaves on purpose (SIGTERM, or
    `leave()`) hands its residual over at its last averaging. Then the optimizer's step raises `LeftError`,
    which the context catches. The residual of a member that vanishes is lost; `membership()` and a warning
    say how much.

    Loop on `local.steps`, which a joining member gets from the others: `while local.steps < 1000: …`

    Args:
        model: A module. For a member of several processes, a DDP model or one in parts.
        optimizer: As in `thinwire.LocalSGD`, like `algorithm` and `grad_scaler`.
        every_steps: Steps from one averaging of a parameter to the next.
        every_seconds: In its place, the time from one to the next. Each member makes as many steps as it can
            and is weighted by them, so slow machines don't slow fast ones; `steps` is the fastest's count.
        group: Finds the members; None for `TorchftGroup()`.
        outer: As in `thinwire.LocalSGD`. A `Nesterov` without a learning rate chooses one at every averaging
            by the number of members.
        streaming: As in `thinwire.LocalSGD`. If a member is lost during an averaging, the averaging is
            repeated when it is due, with all that the others have learnt by then.
        warmup: Steps at the start with an averaging after each, without `outer`; None for none. The changes
            are averaged by its `algorithm`; the last of these steps sends, uncompressed, what the algorithm
            has not transmitted.

    Cost: that of `thinwire.LocalSGD`. In addition an averaging takes a quorum (a request to the lighthouse),
    128 bytes from each member before it and 8 bytes after it. When members change, each sends some kilobytes,
    and a newcomer receives the model, the outer optimizer's state, the algorithm's state, and with the
    group's `send_optimizer` the optimizers' state (with AdamW twice the model's bytes).

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model, or trains only part of
            it although its state is sent.
        AttachError: The model is not on all processes of this member, or is all frozen.
        GradientError: The algorithm can't average a parameter.
    """

    _contributor: ElasticChanges

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
                f"pass either every_steps or every_seconds, got {every_steps!r} and {every_seconds!r}: a "
                "member averages after so many of its steps, or after so many seconds"
            )
        # A minimum, used only to choose the outer momentum.
        every_steps = max(MANY_STEPS, streaming.fragments) if every_steps is None else every_steps
        warmup = NO_WARMUP if warmup is None else warmup
        schedule = Schedule(every_steps, warmup, streaming=streaming, every_seconds=every_seconds)
        check_outer(outer)
        schedule.check_gradient_settings(grad_scaler)
        averaged_model, group = prepare_member(
            model, optimizer, group, buffers=streaming.average_buffers, outer=outer
        )
        changes = ElasticChanges(averaged_model, schedule, algorithm, group)
        super().__init__(changes, ElasticMembership(changes, type(self).__name__), grad_scaler)

    def __str__(self) -> str:
        return f"elastic.{super().__str__()}"

    def count_work(self, amount: float) -> None:
        """Add to the weight of this member's change in the next averaging, if the group weighs by "work".

        Args:
            amount: How much this member has learnt from, for example in tokens.

        Raises:
            ConfigError: It is not a number, or negative, or the group weighs by steps.
            StepError: Outside the context.
        """
        if self._membership.group.weigh_by != "work":
            raise ConfigError(
                'count_work() needs a group with weigh_by="work"; in this group all steps count the same'
            )
        self._check_inside("count_work()")
        self._contributor.count_work(float(number("amount", amount, minimum=0)))

    @torch.inference_mode(False)
    def __enter__(self) -> LocalSGD:
        model = self._model
        if not model.entered:
            self._check_copies()
            # The number of members is not known yet: a learning rate for it is chosen at every averaging.
            self._contributor.divide(model.tensors(), 1)
            for fragment in model.fragments:
                fragment.set_last()
            self._check_momentum(stacklevel=3)
        return super().__enter__()

    @torch.inference_mode(False)
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Average what is left, unless an exception was raised, and leave. Catches `LeftError`."""
        with self._attached:
            # The end of this `with` leaves the group, so the last averaging must come inside it.
            if kind is None and not self.has_left and self._is_any(self._has_work_left):
                with suppress(LeftError), self._collective("the end of the context"):
                    self._model.check_loads()
                    if self._membership.is_open:
                        self._membership.finish()
                    self.leave()
                    self._membership.average()
        return kind is not None and issubclass(kind, LeftError) and self.has_left

    @property
    def _has_work_left(self) -> bool:
        contributor = self._contributor
        # Fragments whose turn was not the last one have work left.
        fragments_have_work = any(fragment.work for fragment in self._model.fragments)
        return contributor.steps > contributor.averaged_steps or fragments_have_work

    def _is_any(self, own: bool) -> bool:
        """Return whether it is true in any process of this member. Collective inside."""
        # A signal may have reached only one of them, and only one may have counted work.
        numbers = gather_numbers([float(own)], self._membership.group.inside, "whether this member averages")
        return [1.0] in numbers

    def average(self) -> None:
        """Average now with all present members: the pending changes, then each fragment. Collective.

        With `outer`, these are outer steps. Steps to the next averaging are counted from now. A member that
        does not call this takes part at its next averaging, one fragment at a time. A member that has made no
        step since the last one has the average, and waits for nobody.

        Raises:
            StepError: Outside the context, or this member's parameters are not finite, and it has left.
            LeftError: This member has left.
            CommunicationError: No averaging has succeeded in the group's `wait_seconds`.
        """
        with self._collective("average()"):
            self._model.check_loads()
            # It would idle until the others average next, and then count their steps as its own.
            if not self._is_any(self._has_work_left or self.is_leaving):
                return
            if self._membership.is_open:
                self._membership.finish()
            is_warm_up = self._schedule.is_warm_up(self.steps)
            for _ in range(1 if is_warm_up else len(self._model.fragments)):
                self._membership.average()

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        self._check_inside("state_dict()")
        self.average()
        return super().state_dict()


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    Takes the arguments of `elastic.LocalSGD`, with the outer step and the defaults of `thinwire.DiLoCo`:
    every 30 steps, unless `every_seconds` is given.
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
        settings |= {"every_steps": every_steps, "algorithm": algorithm, "outer": outer}
        super().__init__(model, optimizer, **settings)


def prepare_member(
    model: nn.Module, optimizer: Optimizers, group: Group | None, *, buffers: bool, outer: Outer | None = None
) -> tuple[AveragedModel, Group]:
    """Check a member's model and optimizers; return them, and the member's end of the group."""
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
    group = TorchftGroup() if group is None else group
    replica = Replica()
    if group.inside.size > 1:
        group = MachineGroup(group, has_parts=ddp is None)
        if ddp is None:
            parts = replica_of(module, group.transport, has_subgroup=False)
            # If a message inside fails, the member ends. Each process saves its own part.
            replica = replace(parts, inside=group.inside, pieces={})
    averaged_model = AveragedModel(module, replica, ddp, buffers=buffers, make_outer=outer)
    averaged_model.set_optimizers(optimizer)
    if group.send_optimizer:
        stepped = {id(parameter) for inner in averaged_model.optimizers for parameter in parameters_of(inner)}
        tensors = averaged_model.tensors()
        others = [it.name for it in tensors if not it.is_buffer and id(it.tensor) not in stepped]
        if others:
            raise ConfigError(
                f"{len(others)} trainable parameters (e.g. {others[0]!r}) are in none of the given "
                "optimizers, so a member that joins would not receive their state; pass every optimizer, or "
                "freeze them"
            )
    return averaged_model, group
