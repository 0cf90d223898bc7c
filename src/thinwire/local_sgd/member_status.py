"""The status of each member before an averaging, and how it shows which members come and go."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_type_hints

import torch

from thinwire.comm import Transport
from thinwire.local_sgd.groups.group import Group

logger = logging.getLogger(__name__)

NUMBER_BITS = 52  # a float64 holds every integer of this many bits


class MemberStatus(NamedTuple):
    """The status of a member at the beginning of an averaging, in numbers that a float64 holds."""

    step: int  # steps so far
    weight: float  # of its contribution
    is_finite: bool  # whether its contribution is finite
    # Set by fixed members; `has_…` only in `average()`.
    has_changed: bool = False  # parameters changed since the last averaging without a counted step
    has_loaded: bool = False  # parameters were loaded inside the context, with steps after the last averaging
    outer_settings: int = 0  # a digest of the outer optimizer's settings that schedules change
    # Set by elastic members.
    is_leaving: bool = False  # after this averaging
    is_new: bool = False  # it starts from the others' state
    is_saving: bool = False  # after this averaging
    member: int = 0  # a random number, drawn when it joined
    lineage: int = 0  # the digest of the committed averagings behind its model
    doubt: int = 0  # the lineage after an averaging that it can commit if others have; 0 if there is none
    weight_behind_doubt: float = 0.0  # its contribution's, if the averaging in doubt was committed
    min_members: int = 1  # the number that it needs for an averaging
    error_norm: float = 0.0  # of its residual
    inner_settings: int = 0  # a digest of its inner optimizers' settings
    averagings: int = 0  # since it joined


KINDS = tuple(get_type_hints(MemberStatus).values())


class StatusGather:
    """The statuses of all members of a group, gathered in the background until they are read. Collective.

    Cost: a message of 136 bytes from each member and, when they are read, a host synchronisation.
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


def reduced_over_local_processes(status: MemberStatus, group: Group) -> MemberStatus:
    """Return a member's status: work and health over all its processes, the rest from rank 0. Collective."""
    if group.inside.size == 1:
        return status
    everyone = StatusGather(status, group.inside, "the status of each process of a member").read()
    norms = [status.error_norm for status in everyone]
    return everyone[0]._replace(
        weight=sum(status.weight for status in everyone),
        weight_behind_doubt=sum(status.weight_behind_doubt for status in everyone),
        error_norm=math.hypot(*norms) if group.has_parts else norms[0],
        is_finite=all(status.is_finite for status in everyone),
        is_leaving=any(status.is_leaving for status in everyone),
        is_saving=any(status.is_saving for status in everyone),
    )


def next_lineage(lineage: int, quorum_id: int, statuses: Sequence[MemberStatus]) -> int:
    """Return the lineage after an averaging: the same on all members of its quorum, and on no others."""
    # The quorum's number is not enough: a restarted lighthouse counts from the beginning.
    members = [status.member for status in statuses]
    digest = hashlib.sha256(f"{lineage} {quorum_id} {members}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << NUMBER_BITS) | 1


def kept_lineage(statuses: Sequence[MemberStatus]) -> int:
    """Return the lineage that all continue from; members of another one must start again."""
    lineages = [status.lineage for status in statuses]
    committed = {status.doubt for status in statuses if status.doubt}.intersection(lineages)
    if committed:  # a member has committed the averaging that others are in doubt of
        return min(committed)
    # Newcomers have no vote: they would count the member that sent them its model twice.
    counts = Counter([status.lineage for status in statuses if not status.is_new] or lineages)
    # All members see the same rows, so all choose the same one: the most frequent, or the first of these.
    return max(counts, key=lambda lineage: counts[lineage])


def count_changes(
    stats: MembershipStats, before: Sequence[MemberStatus], now: Sequence[MemberStatus]
) -> None:
    """Count the members that have come and gone from one committed averaging to the next."""
    stats.members = len(now)
    members = {status.member for status in now}
    for gone in (status for status in before if status.member not in members):
        if gone.is_leaving:
            stats.leaves += 1
            continue
        stats.losses += 1
        stats.lost_error += gone.error_norm
        norm = f", and its residual is lost (norm {gone.error_norm:g} when last seen)"
        logger.warning("a member vanished after step %d%s", gone.step, norm if gone.error_norm else "")
    if before:
        stats.joins += len(members - {status.member for status in before})
