"""What fronts of members that come and go have in common: who they are, how they join, leave and count."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from types import FrameType
from typing import TypeVar

import torch
from torch import nn

from thinwire.algorithms import Algorithm
from thinwire.algorithms.error_feedback import ERROR
from thinwire.elastic.front import Front
from thinwire.elastic.group import Group
from thinwire.elastic.membership import Membership
from thinwire.elastic.plain import plain
from thinwire.elastic.presence import MembershipStats
from thinwire.errors import AttachError, ConfigError, LeftError, StepError
from thinwire.fronts.ddp_model import is_fsdp2, plain_name
from thinwire.fronts.local_sgd.averaged import Averaged
from thinwire.fronts.local_sgd.division import fragments_of
from thinwire.fronts.local_sgd.fragment import Buckets
from thinwire.fronts.local_sgd.model import AveragedModel, unwrapped
from thinwire.fronts.local_sgd.outer import held_by
from thinwire.fronts.local_sgd.validation import checked_optimizer
from thinwire.sync import Engine, GradientSync
from thinwire.sync.precision import full_precision
from thinwire.sync.state import LoadedState
from thinwire.sync.stats import Stats

__all__ = ["Member"]

Entered = TypeVar("Entered", bound="Member")


class Member:
    """One member of a group that changes; the base of `elastic.LocalSGD` and `elastic.Steps`.

    Args:
        model: As of `elastic.LocalSGD`.
        optimizer: As of `elastic.LocalSGD`.
        algorithm: As of `elastic.LocalSGD`.
        group: As of `elastic.LocalSGD`.
        front: What `Membership` lets average.
        average_buffers: As of `thinwire.Streaming`.
        send_optimizer: As of `elastic.LocalSGD`.
        fragments: As of `thinwire.Streaming`.

    Attributes:
        module: The model, without what is around it.
        observers: Are called after every step, with True; see `thinwire.Watch`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        group: Group | None,
        front: Front,
        *,
        average_buffers: bool,
        send_optimizer: bool,
        fragments: int = 1,
    ) -> None:
        module = _plain_module(model)
        self._averaged, self._front = AveragedModel(module, buffers=average_buffers), front
        averaged = self._averaged.tensors()
        # Of several whose state each keeps, the one that steps last is enough to count steps.
        self._optimizers = _checked_optimizers(optimizer, averaged, module, must_hold_all=send_optimizer)
        self._sent_optimizers = self._optimizers if send_optimizer else ()
        parts = [Buckets(part).layout for part in fragments_of(averaged, fragments)]
        self._group = _group_of_environment() if group is None else group
        specs = [each.spec for each in averaged]
        self._engine = Engine(algorithm, self._group.transport, specs, parts=parts if fragments > 1 else ())
        self.module = module
        self.observers: list[Callable[[bool], None]] = []
        self._sync = GradientSync(self._engine)
        self._device = averaged[0].tensor.device
        self._membership = Membership(self._group, self._engine, front, self._device)
        self._attached = ExitStack()
        self._outer: torch.optim.Optimizer | None = None
        self._is_inside = False
        self._steps = self._steps_here = self._turns = self._pending_steps = 0

    @property
    def sync(self) -> GradientSync:
        """What averages: its plan and its figures."""
        return self._sync

    @property
    def steps(self) -> int:
        """Steps so far; a member that joins takes over those of the others."""
        return self._steps

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

    def stats(self) -> Stats:
        """Return what was sent, and how much less that is than exact data-parallel training."""
        return self._compared(self._sync.stats())

    def counts(self) -> Stats:
        """Return `stats()` without errors; see `Engine.counts`."""
        return self._compared(self._engine.counts())

    def _compared(self, stats: Stats) -> Stats:
        step_bytes = sum(spec.gradient_bytes for spec in self._engine.specs if not spec.is_statistic)
        return replace(stats, steps=self._steps, gradient_bytes=self._steps_here * step_bytes)

    def leave(self) -> None:
        """Leave after the next averaging, handing over what this member has not transmitted."""
        self._membership.is_leaving = True

    def __enter__(self: Entered) -> Entered:
        """Join: wait until the others, and enough of them, are there, and start from what they hold.

        With `elastic.Steps` it takes part in a step of the others, to which it adds nothing.

        Raises:
            StepError: It was entered before.
            ConfigError: `outer` does not make an optimizer of the tensors it is given.
            AgreementError: This member is configured otherwise than the others; they go on.
            StateError: What the others have sent is damaged, or does not fit; or what this member would send
                to others can't be sent, such as the settings or state of an optimizer.
            CommunicationError: Nobody, or too few, came in `wait_seconds`.
        """
        if self._averaged.entered:
            raise StepError("this context has been entered before; make a new one")
        self._begin()
        with ExitStack() as attached:
            attached.enter_context(self._joined())
            attached.enter_context(self._in_loop())
            self._attached = attached.pop_all()
        return self

    def _begin(self) -> None:
        """Make what a member needs only inside the context."""

    def _in_loop(self) -> AbstractContextManager[None]:
        """Count the steps of the user's loop while this is open."""
        return nullcontext()

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Join, and leave at the end of the context. Collective."""
        self._averaged.enter(self._averaged.tensors())
        with ExitStack() as attached:
            attached.callback(self._membership.leave)
            # Now, where the user sees it; else the first newcomer would stop all others.
            plain(self._front.state())
            attached.callback(setattr, self, "_is_inside", False)
            # Undone from the last: SIGTERM gets its old handler first, so one that comes while the group is
            # left ends the process.
            if self._group.leaves_on_sigterm and threading.current_thread() is threading.main_thread():
                attached.enter_context(_on_sigterm(self.leave))
            # Asked to leave while it waited for others: its first step says so, and the loop ends as ever.
            with suppress(LeftError):
                self._average()
            self._is_inside = True
            yield

    def _average(self) -> None:
        if self._membership.stats.averagings == 1:
            plain(self._front.state())  # again: optimizers have their state only since the first step
        with full_precision(self._device):  # the step may stand under autocast
            self._membership.average()

    def _check_inside(self, call: str) -> None:
        if self.has_left:
            raise LeftError(f"{call} came after this member has left its group; end the loop")
        if not self._is_inside:
            raise StepError(f"{call} was called outside the context; call it inside: with local: …")
        self._averaged.check_unchanged()

    def _not_averaged(self) -> dict[str, torch.Tensor]:
        """Return, by name, what a newcomer must be given besides: frozen parameters and other buffers."""
        # By identity: a compiled block's names are not those it is averaged under.
        averaged = {id(each.tensor) for each in self._averaged.tensors()}
        held = chain(self.module.named_parameters(), self.module.named_buffers())
        return {plain_name(name): tensor.detach() for name, tensor in held if id(tensor) not in averaged}

    def _residual_of(self) -> tuple[str, ...]:
        return tuple(sorted(self._engine.memory[ERROR]))

    def _load(self, loaded: LoadedState, residual_of: tuple[str, ...]) -> None:
        """Go on from the others' common state, without a residual."""
        self._engine.load(loaded)
        for spec in self._engine.specs:
            # A residual of zeros: on which parameters there is one decides what messages look like.
            if spec.name in residual_of:
                zeros = torch.zeros(spec.numel, dtype=spec.memory_dtype, device=self._device)
                self._engine.put_error(spec.name, zeros)


def _plain_module(model: object) -> nn.Module:
    """Return the module that a member trains.

    Raises:
        AttachError: A DDP or a sharded model.
        ConfigError: It is no module.
    """
    module, ddp = unwrapped(model)
    if ddp is not None:
        raise AttachError(
            "a DDP model's process group can't change; pass the plain module, and do not call "
            "init_process_group: the members find each other through the lighthouse"
        )
    if is_fsdp2(module):
        raise AttachError(
            f"{type(module).__name__} is sharded by fully_shard; a member that comes and goes is "
            "one process with a whole model. thinwire.LocalSGD averages sharded ones"
        )
    return module


def _checked_optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    averaged: Sequence[Averaged],
    module: nn.Module,
    *,
    must_hold_all: bool,
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that train a module, in the order of their steps.

    Args:
        given: As the user gave them: one, or several.
        averaged: What is averaged of the module.
        module: To which all that they hold must belong.
        must_hold_all: Whether a trainable parameter that none of them holds is refused.

    Raises:
        ConfigError: One is no optimizer or is there twice, or does not train this model; or another one seems
            to train it as well.
    """
    listed = list(given) if isinstance(given, list | tuple) else [given]
    optimizers = tuple(checked_optimizer(each, averaged, module) for each in listed)
    if not optimizers or len({id(each) for each in optimizers}) < len(optimizers):
        raise ConfigError(f"expected one optimizer or several, each once, got {listed}")
    held = set[int]().union(*map(held_by, optimizers))
    # Statistics are buffers, which nobody trains.
    trained = [each for each in averaged if not each.spec.is_statistic]
    others = [each.name for each in trained if id(each.tensor) not in held]
    if must_hold_all and others:
        raise ConfigError(
            f"{len(others)} of the model's {len(trained)} trainable parameters, such as {others[0]!r}, are "
            "in none of the optimizers that were passed, and a member that joins is given the state of these "
            "only: pass all that train the model, [first, second], in the order of their steps, and freeze "
            "what none of them trains: requires_grad_(False)"
        )
    return optimizers


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
    # Imported here: torchft is an extra, and a group of another kind does without.
    from thinwire.elastic.torchft_group import TorchftGroup  # noqa: PLC0415

    return TorchftGroup()
