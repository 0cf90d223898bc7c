"""A member to those who average it: what it gives, and takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from thinwire.comm import Description
from thinwire.local_sgd.groups.inner_settings import InnerSettings
from thinwire.local_sgd.pending_average import PendingAverage


class Part(NamedTuple):
    """The contribution of a member to an averaging."""

    weight: float  # 0 if it has done nothing
    is_finite: bool
    tensors: Any  # for the adapter to start with


class Averageable(Protocol):
    """The source of the tensors to average: a model's changes, or its gradients."""

    @property
    def steps(self) -> int:
        """Steps so far, of those who have been here longest."""

    def _part(self, turns_ahead: int = 0) -> Part:
        """Return the contribution of this member to the next averaging, or the one after it."""

    def _described(self) -> Description:
        """Return the settings and shapes that must be the same on all members, by subject."""

    def _follow(self, step: int) -> None:
        """Use what the others do after this step."""

    @property
    def _may_be_set_otherwise(self) -> bool:
        """Whether a member whose optimizers are set otherwise is warned, and else refused."""

    def _inner_settings(self) -> InnerSettings:
        """Return the settings of the optimizers inside."""

    def _state(self) -> Mapping[str, Any]:
        """Return the state that a newcomer starts from: tensors and plain values."""

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Start from such a state. All is checked before anything is changed."""

    def _start(self, tensors: Any, scale: float, step: int) -> PendingAverage[Any]:
        """Send the first messages of an averaging, of what `_part` has looked at if it is still that."""

    def _committed(
        self, pending_average: PendingAverage[Any] | None, step: int, num_members: int, *, may_be_empty: bool
    ) -> None:
        """Take the means of a committed averaging; None if no one had anything to average."""
