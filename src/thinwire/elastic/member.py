"""What fronts of members that come and go have in common: who they are, how they join, leave and count."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import nn

from thinwire.algorithms.error_feedback import ERROR
from thinwire.checks import whole_number
from thinwire.elastic.front import Front
from thinwire.elastic.group import Group
from thinwire.elastic.membership import Membership
from thinwire.elastic.plain import packed
from thinwire.elastic.presence import MembershipStats
from thinwire.errors import AttachError, ConfigError, LeftError, StateError, StepError
from thinwire.fronts.ddp_model import is_fsdp2, plain_name
from thinwire.fronts.local_sgd.averaged import Averaged
from thinwire.fronts.local_sgd.model import AveragedModel, unwrapped
from thinwire.fronts.local_sgd.outer import held_by
from thinwire.fronts.local_sgd.validation import checked_optimizer
from thinwire.sync import Engine, GradientSync
from thinwire.sync.checksum import check_readable, check_undamaged
from thinwire.sync.precision import full_precision
from thinwire.sync.state import LoadedState
from thinwire.sync.stats import Stats


class Member:
    """One member of a group that changes; the base of `elastic.LocalSGD` and `elastic.Steps`.

    Args:
        averaged: The model.
        engine: Averages, over the group's transport.
        group: Who is there.
        front: What `Membership` lets average.
        leave_on_sigterm: As of `elastic.LocalSGD`.

    Attributes:
        module: The model, without what is around it.
        observers: Are called after every step, with True; see `thinwire.Watch`.
    """

    def __init__(
        self,
        averaged: AveragedModel,
        engine: Engine,
        group: Group,
        front: Front,
        *,
        leave_on_sigterm: bool,
    ) -> None:
        self.module = averaged.module
        self.observers: list[Callable[[bool], None]] = []
        self._averaged, self._engine, self._group = averaged, engine, group
        self._leave_on_sigterm = leave_on_sigterm
        self._sync = GradientSync(engine)
        self._device = averaged.tensors()[0].tensor.device
        self._membership, self._front = Membership(group, engine, front, self._device), front
        self._attached = ExitStack()
        self._is_inside = False
        self._steps = self._steps_here = 0

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

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Join, and leave at the end of the context. Collective.

        Raises:
            AgreementError: This member is configured otherwise than the others; they go on.
            StateError: What the others have sent is damaged, or does not fit; or what this member would send
                to others can't be sent.
            CommunicationError: Nobody, or too few, came in `wait_seconds`.
        """
        self._averaged.enter(self._averaged.tensors())
        with ExitStack() as attached:
            attached.callback(self._membership.leave)
            # Now, where the user sees it; else the first newcomer would stop all others.
            packed(self._front.state())
            attached.callback(setattr, self, "_is_inside", False)
            # Undone from the last: SIGTERM gets its old handler first, so one that comes while the group is
            # left ends the process.
            if self._leave_on_sigterm and threading.current_thread() is threading.main_thread():
                attached.enter_context(_on_sigterm(self.leave))
            # Asked to leave while it waited for others: its first step says so, and the loop ends as ever.
            with suppress(LeftError):
                self._average()
            self._is_inside = True
            yield

    def _average(self) -> None:
        if self._membership.stats.averagings == 1:
            packed(self._front.state())  # again: optimizers have their state only since the first step
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


def plain_module(model: object) -> nn.Module:
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


def checked_optimizers(
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


def check_like(key: str, tensors: object, own: Mapping[str, torch.Tensor]) -> None:
    """Refuse what the group has sent, if it is of other tensors than this member's.

    Args:
        key: What they are.
        tensors: As sent.
        own: This member's.

    Raises:
        StateError: They differ in names, shapes or types.
    """
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


def check_received(state: Mapping[str, Any], keys: Set[str], version: int) -> None:
    """Refuse what the group has sent to start from, if it is damaged or not of this member's kind.

    Args:
        state: As it was sent.
        keys: That it must have.
        version: Of this member's states.

    Raises:
        StateError: It is damaged, has other keys or is of another version; or its counts are none.
    """
    check_readable(state)
    if state.keys() != keys or type(state["version"]) is not int or state["version"] != version:
        got = f"version {state.get('version')!r} with {sorted(map(str, state))}"
        raise StateError(
            f"what the group has sent to start from is of {got[:400]}, expected version {version} of "
            "Thinwire's states; install the same Thinwire on all members"
        )
    check_undamaged(state)
    for key in sorted({"step", "turns"} & keys):
        whole_number(key, state[key], minimum=0, error=StateError)
    for key, kind in ("residual_of", str), ("optimizers", Mapping):
        listed = state[key]
        if not isinstance(listed, list | tuple) or not all(isinstance(each, kind) for each in listed):
            raise StateError(
                f"the group's {key} must be a list of {kind.__name__}, got a {type(listed).__name__}"
            )


def load_optimizers(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any]) -> None:
    """Let optimizers go on from what the group has sent: all of them, or none.

    Args:
        optimizers: This member's.
        states: A state for each, as sent.

    Raises:
        StateError: They are not as many, or one is not of its optimizer.
    """
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


def group_of_environment() -> Group:
    """Return a `TorchftGroup` as the environment says."""
    # Imported here: torchft is an extra, and a group of another kind does without.
    from thinwire.elastic.torchft_group import TorchftGroup  # noqa: PLC0415

    return TorchftGroup()
