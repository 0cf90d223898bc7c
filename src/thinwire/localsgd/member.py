"""What fronts of members that come and go have in common: who they are, how they join, leave and count."""

from __future__ import annotations

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
from torch import nn

from thinwire.algorithms import Algorithm
from thinwire.algorithms.error_feedback import ERROR
from thinwire.channel import Description
from thinwire.checks import whole_number
from thinwire.errors import AttachError, ConfigError, LeftError, StateError, StepError
from thinwire.fronts.ddp_model import is_fsdp2, plain_name
from thinwire.localsgd.fragment import Averaged, Buckets, fragments_of
from thinwire.localsgd.members.front import Front
from thinwire.localsgd.members.group import Group
from thinwire.localsgd.members.handing import plain
from thinwire.localsgd.members.membership import Membership
from thinwire.localsgd.members.presence import MembershipStats
from thinwire.localsgd.model import AveragedModel, unwrapped
from thinwire.localsgd.outer import held_by
from thinwire.localsgd.validation import checked_optimizer
from thinwire.sync import Engine, GradientSync
from thinwire.sync.checksum import check_readable, check_undamaged, with_checksum
from thinwire.sync.precision import full_precision
from thinwire.sync.state import LoadedState
from thinwire.sync.stats import Stats

Entered = TypeVar("Entered", bound="Member")
STATE_VERSION = 4
KEYS = {
    "version", "lineage", "step", "turns", "averaged", "not_averaged", "sync", "residual_of", "outer",
    "optimizers", "checksum",
}  # fmt: skip


class Member:
    """One member of a group that changes; the base of `elastic.LocalSGD` and `elastic.Steps`.

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
        # If there are several optimizers, the one that steps last is enough to count steps.
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


class MemberFront(Front):
    """What is averaged of a member, and what a newcomer starts from."""

    def __init__(self, member: Member, purpose: str) -> None:
        self._member, self._purpose = member, purpose

    @property
    def step(self) -> int:
        """As `Front.step`."""
        return self._member._steps

    def described(self) -> Description:
        """As `Front.described`."""
        member = self._member
        sent = ", ".join(type(each).__name__ for each in member._sent_optimizers)
        return {
            **member._engine.described(self._purpose, member._device),
            "torch": torch.__version__.partition("+")[0],
            "group": member._group.kind,
            "kind": type(member).__name__,
            "optimizer": sent or "each its own",
        }

    def state(self) -> Mapping[str, Any]:
        """As `Front.state`."""
        member = self._member
        return with_checksum(
            {
                "version": STATE_VERSION,
                "lineage": member._membership.lineage,
                # As of the last averaging, which is what a newcomer gets: later steps are in no model but
                # this one's.
                "step": member._steps - member._pending_steps,
                "turns": member._turns,
                "averaged": self.held(),
                "not_averaged": member._not_averaged(),
                "sync": member._engine.common_state(),
                "residual_of": member._residual_of(),
                "outer": None if member._outer is None else member._outer.state_dict(),
                "optimizers": [each.state_dict() for each in member._sent_optimizers],
            }
        )

    def adopt(self, state: Mapping[str, Any]) -> None:
        """As `Front.adopt`."""
        member = self._member
        _check_received(state)
        averaged, others = self.held(), member._not_averaged()
        _check_like("averaged", state["averaged"], averaged)
        _check_like("not_averaged", state["not_averaged"], others)
        loaded = member._engine.check_state_dict(state["sync"])
        outers = [] if member._outer is None else [member._outer]
        sent = [*[state["outer"]] * len(outers), *state["optimizers"]]
        _load_optimizers([*outers, *member._sent_optimizers], sent)
        member._load(loaded, state["residual_of"])
        for name, tensor in (averaged | others).items():
            tensor.copy_((state["averaged"] | state["not_averaged"])[name])
        member._steps, member._turns, member._pending_steps = int(state["step"]), int(state["turns"]), 0
        self.adopted()

    @abstractmethod
    def held(self) -> dict[str, torch.Tensor]:
        """Return by name what is the same on all members after an averaging, the tensors themselves."""

    @abstractmethod
    def adopted(self) -> None:
        """Go on from a state whose tensors and counts are there; what was made until then counts no more."""


def _plain_module(model: object) -> nn.Module:
    """Return the module that a member trains."""
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
    """Return the optimizers that train a module, in the order of their steps."""
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
    from thinwire.localsgd.members.torchft_group import TorchftGroup  # noqa: PLC0415

    return TorchftGroup()


def _check_like(key: str, tensors: object, own: Mapping[str, torch.Tensor]) -> None:
    """Refuse what the group has sent, if it is of other tensors than this member's."""
    if (
        not isinstance(tensors, Mapping)
        or tensors.keys() != own.keys()
        or not all(isinstance(each, torch.Tensor) for each in tensors.values())
        or any(
            tensors[name].shape != own[name].shape or tensors[name].dtype != own[name].dtype for name in own
        )
    ):
        raise StateError(
            f"the group's {key} is of other tensors than this member's model; start the same script as the "
            "others"
        )


def _check_received(state: Mapping[str, Any]) -> None:
    """Refuse what the group has sent to start from, if it is damaged or not of this member's kind."""
    check_readable(state)
    if state.keys() != KEYS or type(state["version"]) is not int or state["version"] != STATE_VERSION:
        got = f"version {state.get('version')!r} with {sorted(map(str, state))}"
        raise StateError(
            f"what the group has sent to start from is of {got[:400]}, expected version {STATE_VERSION} of "
            "Thinwire's states; install the same Thinwire on all members"
        )
    check_undamaged(state)
    for key in ("step", "turns"):
        whole_number(key, state[key], minimum=0, error=StateError)
    for key, kind in ("residual_of", str), ("optimizers", Mapping):
        listed = state[key]
        if not isinstance(listed, list | tuple) or not all(isinstance(each, kind) for each in listed):
            raise StateError(
                f"the group's {key} must be a list of {kind.__name__}, got a {type(listed).__name__}"
            )


def _load_optimizers(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any]) -> None:
    """Let optimizers go on from what the group has sent: all of them, or none."""
    if len(states) != len(optimizers):
        raise StateError(
            f"the group has sent the states of {len(states)} optimizers, expected {len(optimizers)}; start "
            "the same script as the others"
        )
    before = [(each.state, each.param_groups) for each in optimizers]
    for optimizer, its_state in zip(optimizers, states, strict=True):
        try:
            # Loading does not look into them, and the next step would.
            if not all(isinstance(each, Mapping) for each in its_state["state"].values()):
                raise TypeError("it has a parameter's state that is no mapping")
            optimizer.load_state_dict(dict(its_state))
        except Exception as error:  # optimizers raise what they like
            for each, (state, groups) in zip(optimizers, before, strict=True):
                each.state, each.param_groups = state, groups
            raise StateError(
                f"the group's state is of another {type(optimizer).__name__} than this member's: {error}"
            ) from error
