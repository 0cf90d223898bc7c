"""Counts of the members that come and go."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.local_sgd.member_status import MemberStatus

logger = logging.getLogger(__name__)


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
