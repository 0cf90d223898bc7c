"""What `Membership` lets average: a model's changes, or its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from thinwire.channel import Description
from thinwire.checks import whole_number
from thinwire.errors import StateError
from thinwire.sync.checksum import check_readable, check_undamaged, with_checksum

if TYPE_CHECKING:
    from thinwire.elastic.member import Member

__all__ = ["Front", "Prepared"]

STATE_VERSION = 4
KEYS = {
    "version", "lineage", "step", "turns", "averaged", "not_averaged", "sync", "residual_of", "outer",
    "optimizers", "checksum",
}  # fmt: skip


class Prepared(Protocol):
    """An averaging whose messages have all come, and that has changed nothing yet."""

    def commit(self) -> None:
        """Let it change model and memory. Sends nothing."""

    def abandon(self) -> None:
        """Forget it; nothing has changed."""


class Front(ABC):
    """What is averaged of a member, and what a newcomer starts from.

    Args:
        member: Whose.
        purpose: What its averagings are, for errors.
    """

    def __init__(self, member: Member, purpose: str) -> None:
        self._member, self._purpose = member, purpose

    @property
    def step(self) -> int:
        """Steps so far, of those who have been here longest."""
        return self._member._steps

    def described(self) -> Description:
        """Return what must be the same on all members, by subject."""
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
        """Return what a newcomer starts from: tensors and plain values."""
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
        """Start from such a state. All is checked before anything is changed."""
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

    @abstractmethod
    def weight(self, turns_ahead: int = 0) -> float:
        """Return how much this member's part weighs in an averaging: 0 if it has done nothing.

        Args:
            turns_ahead: Of which: 0 for the next one, 1 for the one behind it, if this member does nothing
                in between.
        """

    @abstractmethod
    def is_finite(self, turns_ahead: int = 0) -> bool:
        """Return whether what this member would put in is finite.

        Args:
            turns_ahead: As of `weight`.
        """

    @abstractmethod
    def prepare(self, scale: float) -> Prepared:
        """Send all messages of an averaging. Collective.

        Args:
            scale: What this member's part is multiplied by.
        """

    @abstractmethod
    def committed(self, step: int, *, was_averaged: bool, has_newcomers: bool) -> None:
        """Go on from a committed averaging.

        Args:
            step: That the furthest member had made.
            was_averaged: Whether anybody had anything to put in.
            has_newcomers: Whether somebody has started from the others in it, and so had nothing.

        Raises:
            StepError: Nobody had, though all came for it.
        """


def _check_like(key: str, tensors: object, own: Mapping[str, torch.Tensor]) -> None:
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


def _check_received(state: Mapping[str, Any]) -> None:
    """Refuse what the group has sent to start from, if it is damaged or not of this member's kind.

    Raises:
        StateError: It is damaged, has other keys or is of another version; or its counts are none.
    """
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
