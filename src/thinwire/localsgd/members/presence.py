"""What members say of themselves at an averaging, and what follows from that alone, on all of them alike."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Presence(NamedTuple):
    """What a member says of itself at the beginning of an averaging; numbers that a float64 holds.

    Attributes:
        member: Drawn when it joined.
        lineage: Of the committed averagings that its model comes from.
        doubt: The lineage after an averaging that it could commit if others have; 0 if there is none.
        step: Steps so far.
        min_members: That it needs for an averaging.
        weight: What its part weighs.
        weight_behind_doubt: What it weighs if what it is in doubt of was committed.
        error_norm: Norm of its residual.
        is_finite: Whether what it would put in is.
        is_leaving: Whether it leaves after this averaging.
        is_new: Whether it starts from the others' state.
        is_saving: Whether it saves behind this averaging.
    """

    member: int
    lineage: int
    doubt: int
    step: int
    min_members: int
    weight: float
    weight_behind_doubt: float
    error_norm: float
    is_finite: bool
    is_leaving: bool
    is_new: bool
    is_saving: bool = False

    @classmethod
    def of(cls, row: Sequence[float]) -> Presence:
        """Return what a row of numbers says."""
        member, lineage, doubt, step, min_members = map(int, row[:5])
        weight, weight_behind_doubt, error_norm, *flags = row[5:]
        whole = member, lineage, doubt, step, min_members
        return cls(*whole, weight, weight_behind_doubt, error_norm, *map(bool, flags))


@dataclass
class MembershipStats:
    """Who has come and gone, as this member has seen it.

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


def kept_lineage(present: Sequence[Presence]) -> int:
    """Return the lineage that all go on from; whoever is of another one must start anew."""
    lineages = [each.lineage for each in present]
    committed = {each.doubt for each in present if each.doubt}.intersection(lineages)
    if committed:  # somebody has committed what others are in doubt of
        return min(committed)
    # Newcomers have no vote: they would count the member that has sent them its model twice.
    counts = Counter([each.lineage for each in present if not each.is_new] or lineages)
    # All see the same rows, and so all choose the same: the most frequent, of several the first.
    return max(counts, key=lambda lineage: counts[lineage])


def count_changes(stats: MembershipStats, before: Sequence[Presence], now: Sequence[Presence]) -> None:
    """Count who has come and gone from one committed averaging to the next."""
    stats.members = len(now)
    members = {each.member for each in now}
    for gone in (each for each in before if each.member not in members):
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
        stats.joins += len(members - {each.member for each in before})
