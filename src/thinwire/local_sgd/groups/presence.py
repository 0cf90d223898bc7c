"""The report of each member before an averaging, and the members that come and go by it."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger(__name__)

NUMBER_BITS = 52  # a float64 holds every such number


class Presence(NamedTuple):
    """The report of a member at the beginning of an averaging, in numbers that a float64 holds."""

    member: int  # drawn when it joined
    lineage: int  # of the committed averagings that its model comes from
    doubt: int  # the lineage after an averaging that it could commit if others have; 0 if there is none
    step: int  # so far
    min_members: int  # that it needs for an averaging
    weight: float  # of its part
    weight_behind_doubt: float  # of its part if what it is in doubt of was committed
    error_norm: float  # of its residual
    is_finite: bool  # what it would put in
    is_leaving: bool  # after this averaging
    is_new: bool  # it starts from the others' state
    is_saving: bool = False  # behind this averaging
    settings: int = 0  # a digest of what its optimizers inside are set to
    averagings: int = 0  # since it joined

    @classmethod
    def of(cls, row: Sequence[float]) -> Presence:
        """Return the report that a row of numbers encodes."""
        member, lineage, doubt, step, min_members = map(int, row[:5])
        weight, weight_behind_doubt, error_norm = row[5:8]
        is_finite, is_leaving, is_new, is_saving = map(bool, row[8:12])
        settings, averagings = map(int, row[12:])
        whole = member, lineage, doubt, step, min_members
        flags = is_finite, is_leaving, is_new, is_saving
        return cls(*whole, weight, weight_behind_doubt, error_norm, *flags, settings, averagings)

    def without_doubt(self, kept: int) -> Presence:
        """Return the report that holds once it is known which lineage is kept."""
        if self.doubt != kept:
            return self
        return self._replace(lineage=kept, doubt=0, weight=self.weight_behind_doubt)


@dataclass
class MembershipStats:
    """Members that have come and gone, as this member has seen it.

    Attributes:
        members: In the last averaging.
        averagings: Committed, since this member joined.
        retries: Averagings that failed and were repeated.
        joins: Members that joined after this one.
        leaves: Members that left on purpose, and handed over their residual.
        losses: Members that vanished.
        lost_error: Sum of the norms of residuals that vanished with them, as last known.
        quorum_seconds: Time spent waiting for it to be decided who takes part.
    """

    members: int = 0
    averagings: int = 0
    retries: int = 0
    joins: int = 0
    leaves: int = 0
    losses: int = 0
    lost_error: float = 0.0
    quorum_seconds: float = 0.0


def of_one_member(everyone: Sequence[Presence], *, have_parts: bool) -> Presence:
    """Combine the reports of a member's processes. The first one's counts where all must be the same."""
    norms = [presence.error_norm for presence in everyone]
    return everyone[0]._replace(
        weight=sum(presence.weight for presence in everyone),
        weight_behind_doubt=sum(presence.weight_behind_doubt for presence in everyone),
        error_norm=math.hypot(*norms) if have_parts else norms[0],
        is_finite=all(presence.is_finite for presence in everyone),
        is_leaving=any(presence.is_leaving for presence in everyone),
        is_saving=any(presence.is_saving for presence in everyone),
    )


def next_lineage(lineage: int, quorum_id: int, present: Sequence[Presence]) -> int:
    """Return the lineage behind an averaging: the same on all of its quorum, and on no one else."""
    # The quorum's number is not enough: a lighthouse that has died and come back counts from the beginning.
    members = [presence.member for presence in present]
    digest = hashlib.sha256(f"{lineage} {quorum_id} {members}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << NUMBER_BITS) | 1


def kept_lineage(present: Sequence[Presence]) -> int:
    """Return the lineage that all go on from; the others must start again."""
    lineages = [presence.lineage for presence in present]
    committed = {presence.doubt for presence in present if presence.doubt}.intersection(lineages)
    if committed:  # somebody has committed what others are in doubt of
        return min(committed)
    # Newcomers have no vote: they would count the member that has sent them its model twice.
    counts = Counter([presence.lineage for presence in present if not presence.is_new] or lineages)
    # All see the same rows, and so all choose the same: the most frequent, of several the first.
    return max(counts, key=lambda lineage: counts[lineage])


def count_changes(stats: MembershipStats, before: Sequence[Presence], now: Sequence[Presence]) -> None:
    """Count who has come and gone from one committed averaging to the next."""
    stats.members = len(now)
    members = {presence.member for presence in now}
    for gone in (presence for presence in before if presence.member not in members):
        if gone.is_leaving:
            stats.leaves += 1
            continue
        stats.losses += 1
        stats.lost_error += gone.error_norm
        owed = (
            f", and with it a residual of norm {gone.error_norm:g}, as last known" if gone.error_norm else ""
        )
        logger.warning("a member has vanished after step %d%s", gone.step, owed)
    if before:
        stats.joins += len(members - {presence.member for presence in before})
