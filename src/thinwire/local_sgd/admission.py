"""Decides who takes part in an averaging: the same on all members, from the statuses of all.

A *lineage* is a digest of the averagings behind a model, and of their members. Members average only models of
one lineage; the others start from the state of a member that has it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from thinwire.comm import gather_values
from thinwire.comm.agreement import check_same
from thinwire.errors import AgreementError, LeftError, StepError
from thinwire.local_sgd.elastic_contributor import ElasticContributor
from thinwire.local_sgd.groups.machine_group import described_together
from thinwire.local_sgd.inner_optimizers import difference, inner_settings
from thinwire.local_sgd.member_status import MemberStatus

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
NUMBER_BITS = 52  # a float64 holds every integer of this many bits


class TryAgainError(Exception):
    """This averaging is not possible, but no message failed. Every member knows it, so all retry."""


class TooFewError(TryAgainError):
    """There are too few members; wait for others."""


class RefusedError(Exception):
    """This member is refused: it leaves, and raises `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Admission:
    """Decides from the statuses of all members, the same on all, who takes part in an averaging.

    Raises:
        RefusedError: On a member that is refused.
        TryAgainError: On the other members, which try again without the refused ones.
    """

    def __init__(self, contributor: ElasticContributor, kind: str) -> None:
        self._group, self._contributor, self._kind = contributor.group, contributor, kind
        self._warned = ""  # the last warning about its optimizers' settings

    def check_number(self, statuses: Sequence[MemberStatus]) -> None:
        """Refuse members with another `min_members`, and wait if there are fewer members than that."""
        # If it differed, some would send, and others ask for a quorum again.
        own = self._group.min_members
        needed = [status.min_members for status in statuses if not status.is_new]
        usual = Counter(needed or [status.min_members for status in statuses]).most_common(1)[0][0]
        error = AgreementError(
            f"this member has min_members={own}, but the members that it met have min_members={usual}, so "
            "it was refused and the others continue; start all members with the same value"
        )
        self._refuse([status.min_members != usual for status in statuses], "have other min_members", error)
        if len(statuses) < own:
            if statuses[self._group.control.rank].is_leaving:
                raise LeftError(
                    f"this member has left the group, and too few members are left ({len(statuses)} of "
                    f"min_members={own}) to take over its unsent changes"
                )
            time.sleep(PAUSE_SECONDS)  # a quorum of too few forms immediately, again and again
            there = "1 member is" if len(statuses) == 1 else f"{len(statuses)} members are"
            raise TooFewError(f"{there} present, but min_members={own} are needed")

    def check_finite(self, statuses: Sequence[MemberStatus]) -> None:
        """Refuse members whose values are not finite."""
        error = StepError(
            "this member's parameters, buffers or gradients are not finite (inf or NaN); nothing was "
            "averaged, and it has left. Find what diverged, then restart it: it receives the others' model"
        )
        self._refuse([not status.is_finite for status in statuses], "are not finite", error)

    def check_optimizers(self, statuses: Sequence[MemberStatus]) -> None:
        """Refuse members with other optimizer settings, or warn them. Collective if some differ."""
        # Newcomers receive the others' settings.
        old = [rank for rank, status in enumerate(statuses) if not status.is_new]
        if len({statuses[rank].inner_settings for rank in old}) < 2:
            return
        own = inner_settings(self._contributor.model.optimizers)
        everyone = gather_values(own, self._group.control, "comparing inner optimizers")
        # The right settings are the most common ones among the members that have been here longest.
        longest = max(statuses[rank].averagings for rank in old)
        oldest = [rank for rank in old if statuses[rank].averagings == longest]
        counts = Counter(statuses[rank].inner_settings for rank in oldest)
        usual = max(oldest, key=lambda rank: counts[statuses[rank].inner_settings])
        # Compare only members at the same step: at another step a schedule has other values.
        alike = [rank for rank in old if statuses[rank].step == statuses[usual].step]
        others = [rank for rank in alike if difference(everyone[rank], everyone[usual])]
        if not others:
            return
        words = (
            f"{difference(own, everyone[usual])} at step {statuses[usual].step}: a schedule must count "
            "`steps` of this context, not its own"
        )
        if not self._contributor.tolerates_other_settings:
            refused = StepError(f"{words}. This member was refused and has left; the others continue")
            self._refuse([rank in others for rank in range(len(statuses))], "have other settings", refused)
        elif self._group.control.rank in others and words != self._warned:
            self._warned = words
            logger.warning("%s", words)

    def agree(self, statuses: Sequence[MemberStatus]) -> None:
        """Refuse a member whose configuration differs from that of earlier members. Collective."""
        group, purpose = self._group, "joining a group"
        description = {"group": group.kind, "kind": self._kind, **self._contributor.description()}
        described = described_together(description, group)
        everyone = gather_values(described, group.control, purpose)
        texts = [json.dumps(description, sort_keys=True) for description in everyone]
        before = [text for text, status in zip(texts, statuses, strict=True) if not status.is_new] or texts
        usual = Counter(before).most_common(1)[0][0]
        refused = AgreementError()
        try:
            others = [everyone[texts.index(usual)], described]
            check_same(others, f"{purpose}, of which process 0 is a member")
        except AgreementError as error:
            refused = AgreementError(f"{error}, and this process, 1, was refused; the others continue")
        self._refuse([text != usual for text in texts], "have a different configuration", refused)

    def _refuse(self, are_refused: Sequence[bool], why: str, error: Exception) -> None:
        """Make some members leave with an error, and the others try again without them."""
        if are_refused[self._group.control.rank]:
            raise RefusedError(error)
        ranks = [rank for rank, is_refused in enumerate(are_refused) if is_refused]
        if ranks:
            raise TryAgainError(f"members {ranks} {why}, and are refused")


def next_lineage(lineage: int, quorum_id: int, statuses: Sequence[MemberStatus]) -> int:
    """Return the lineage after an averaging: the same on all members of its quorum, and on no others."""
    # The quorum's number is not enough: a restarted lighthouse counts from the beginning.
    members = [status.member for status in statuses]
    digest = hashlib.sha256(f"{lineage} {quorum_id} {members}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (1 << NUMBER_BITS) | 1


def admitted(statuses: Sequence[MemberStatus]) -> tuple[MemberStatus, ...]:
    """Return the statuses with a lineage of 0, and no contribution, for all that start from another's state.

    The lineage of the most averagings is kept; of several, that of the most members. If none has averaged
    yet, all are new.
    """
    furthest = max(status.commits for status in statuses)
    # All members see the same rows, so all choose the same one: the most frequent, or the first of these.
    lineages = [status.lineage for status in statuses if status.commits == furthest]
    kept = Counter(lineages).most_common(1)[0][0]
    restarted: dict[str, Any] = {"lineage": 0, "step": 0, "weight": 0.0, "error_norm": 0.0}
    return tuple(it if it.lineage == kept != 0 else it._replace(**restarted) for it in statuses)
