"""The status of each member before an averaging, and counts of the members that come and go."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_type_hints

import torch

from thinwire.checks import listed
from thinwire.comm import Transport
from thinwire.errors import StepError
from thinwire.local_sgd.training_loop import LOADED

logger = logging.getLogger(__name__)


class MemberStatus(NamedTuple):
    """The status of a member at the beginning of an averaging, in numbers that a float64 holds."""

    step: int  # steps so far
    weight: float = 1.0  # of its contribution
    is_finite: bool = True  # whether its contribution is finite
    # Set by fixed members, the first two only in `average()`.
    unstepped: int = 0  # a digest of parameters that changed since the last averaging without a counted step
    has_loaded: bool = False  # parameters were loaded inside the context, with steps after the last averaging
    outer_settings: int = 0  # a digest of the outer optimizer's settings that schedules change
    # Set by elastic members.
    is_leaving: bool = False  # after this averaging
    is_saving: bool = False  # after this averaging
    member: int = 0  # a random number, drawn when it joined
    lineage: int = 0  # the digest of the committed averagings behind its model; 0 if it starts from others
    commits: int = 0  # the number of these averagings
    doubt: int = 0  # the lineage after an averaging that it can commit if others have; 0 if there is none
    min_members: int = 1  # the number that it needs for an averaging
    error_norm: float = 0.0  # of its residual
    inner_settings: int = 0  # a digest of its inner optimizers' settings
    averagings: int = 0  # since it joined

    @property
    def is_new(self) -> bool:
        """Whether it starts from another member's state; see `admitted`."""
        return self.lineage == 0


KINDS = tuple(get_type_hints(MemberStatus).values())


class StatusGather:
    """The statuses of all members of a group, gathered in the background until they are read. Collective.

    Cost: a message of 128 bytes from each member and, when they are read, a host synchronisation.
    """

    def __init__(self, status: MemberStatus, transport: Transport, purpose: str) -> None:
        # Kept alive: the backend may still read it.
        self._row = torch.tensor(status, dtype=torch.float64, device=transport.control_device)
        self._rows = self._row.new_empty(transport.size, len(status))
        self._work = transport.all_gather(self._rows, self._row, purpose)

    def read(self) -> tuple[MemberStatus, ...]:
        """Return the statuses, by rank. Blocks until all have arrived."""
        self._work.wait()
        rows = self._rows.tolist()
        return tuple(MemberStatus(*(kind(it) for kind, it in zip(KINDS, row, strict=True))) for row in rows)


def check_alike(statuses: Sequence[MemberStatus]) -> None:
    """Raise on all members if they are at different steps or a contribution is not finite."""
    broken = [rank for rank, status in enumerate(statuses) if not status.is_finite]
    if broken:
        raise StepError(
            f"parameters or buffers of rank {listed(broken)} are not finite (inf or NaN); nothing was "
            "averaged. Restart from a checkpoint (last average: state_dict()['last_average'])"
        )
    if len({status.step for status in statuses}) > 1:
        steps = listed([f"{rank}: {status.step}" for rank, status in enumerate(statuses)])
        raise StepError(
            f"ranks are at different steps ({steps}), so nothing was averaged; call average() and "
            "state_dict() on all, pass grad_scaler=, or for uneven inputs train inside thinwire.join(local)"
        )
    if any(status.has_loaded for status in statuses):
        raise StepError(LOADED)
    usual = Counter(status.outer_settings for status in statuses).most_common(1)[0][0]
    others = [rank for rank, status in enumerate(statuses) if status.outer_settings != usual]
    if others:
        raise StepError(
            f"rank {listed(others)} has other settings of the outer optimizer than the other ranks; "
            "nothing was averaged. Step a scheduler of local.outer on all ranks alike"
        )
    if len({status.unstepped for status in statuses}) > 1:
        raise StepError(
            "parameters changed since the last averaging without a step of a given optimizer, and not "
            "equally on all ranks; nothing was averaged. Pass all optimizers; load the same state on "
            "all ranks"
        )


@dataclass
class MembershipStats:
    """Members that have come and gone, as seen by this member.

    Attributes:
        members: Members of the last averaging.
        averagings: Committed averagings since this member joined.
        retries: Averagings that failed and were repeated.
        joins: Members that joined after this one.
        leaves: Members that left on purpose, and handed over their residual.
        losses: Members that vanished.
        lost_error: Sum of the last known norms of the residuals that vanished with them.
        quorum_seconds: Time spent waiting for quorums.
    """

    members: int = 0
    averagings: int = 0
    retries: int = 0
    joins: int = 0
    leaves: int = 0
    losses: int = 0
    lost_error: float = 0.0
    quorum_seconds: float = 0.0

    def count(self, before: Sequence[MemberStatus], now: Sequence[MemberStatus]) -> None:
        """Count the members that have come and gone from one committed averaging to the next."""
        self.members = len(now)
        members = {status.member for status in now}
        for gone in (status for status in before if status.member not in members):
            if gone.is_leaving:
                self.leaves += 1
                continue
            self.losses += 1
            self.lost_error += gone.error_norm
            norm = f", and its residual is lost (norm {gone.error_norm:g} when last seen)"
            logger.warning("a member vanished after step %d%s", gone.step, norm if gone.error_norm else "")
        if before:
            self.joins += len(members - {status.member for status in before})
