"""Averagings with members that come and go: all members commit an averaging or none does."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import gather_numbers
from thinwire.errors import CommunicationError, LeftError
from thinwire.local_sgd.admission import (
    NUMBER_BITS,
    Admission,
    RefusedError,
    TooFewError,
    TryAgainError,
    admitted,
    next_lineage,
)
from thinwire.local_sgd.elastic_contributor import ElasticContributor, Values
from thinwire.local_sgd.groups.group import NoQuorumError
from thinwire.local_sgd.groups.machine_group import (
    BrokenMemberError,
    in_all_processes,
    reduced_over_local_processes,
)
from thinwire.local_sgd.groups.state_transfer import broadcast_residual, plain
from thinwire.local_sgd.inner_optimizers import inner_settings
from thinwire.local_sgd.member_status import MembershipStats, MemberStatus, StatusGather
from thinwire.local_sgd.pending_average import PendingAverage, are_finite
from thinwire.local_sgd.saved_state import LoadedState
from thinwire.sync.state import digest_of

logger = logging.getLogger(__name__)


class _Averaging(NamedTuple):
    """A pending averaging, or one whose last message, which commits it on all members, failed."""

    pending: PendingAverage[Any] | None
    lineage: int
    statuses: tuple[MemberStatus, ...]

    def abandon(self) -> None:
        if self.pending is not None:
            self.pending.abandon()


class ElasticMembership:
    """Averages with all present members, repeatedly if it fails; keeps track of the members.

    All members commit an averaging, or none: its last message says that each has received everything. A
    member that misses only that is in doubt: it keeps the averaging, until the others say what holds.

    When members come or go, those who stay multiply their residual by new over old number, which keeps the
    mean over the members.
    """

    has_left = False

    def __init__(self, contributor: ElasticContributor, kind: str) -> None:
        self.group, self._contributor = contributor.group, contributor
        self.stats = MembershipStats()
        self.is_leaving = False  # may be set: whether to leave after the next averaging
        self.statuses: tuple[MemberStatus, ...] = ()  # at the last committed averaging
        self._admission = Admission(contributor, kind)
        # No other member has this number. It does not depend on seeds that the user's script sets.
        number = random.SystemRandom().getrandbits(NUMBER_BITS) | 1
        self._member = int(self.group.broadcast_scalar(number))
        # The number of members over which this residual is averaged; 0 for members that resume together.
        self._residual_members = 1
        self._agreed_at_change = 0  # the group's `num_changes` when settings were last compared
        self._open: _Averaging | None = None
        self._doubt: _Averaging | None = None
        self._is_saving = False
        self._saved: dict[str, Any] | None = None
        self.group.is_leaving = lambda: self.is_leaving

    @property
    def is_open(self) -> bool:
        """Whether an averaging was started and not finished."""
        return self._open is not None

    def start(self) -> None:
        """Find the members, gather their statuses, and send the first messages. Collective."""
        if self.stats.averagings == 1:
            plain(self._contributor.state())  # check again: optimizers create their state in the first step
        self._repeated(self._start)

    def finish(self) -> None:
        """Wait for the means, and commit them on all members. Collective."""
        self._repeated(self._finish)
        # Use the flag that the others have read: a member asked to leave later has not handed over anything.
        if self.statuses[self.group.control.rank].is_leaving:
            self.leave()
            raise LeftError(
                "this member has left the group, after it handed its unsent changes to the others"
            )

    def abandon(self) -> None:
        """Drop nothing: the next `finish` continues an averaging that was started."""

    def average(self) -> None:
        """Average once with all members. Collective."""
        self.start()
        self.finish()

    def save(self) -> dict[str, Any]:
        """Return the engine's state, with the mean residual of all present members. Collective."""
        self._is_saving = True
        try:
            while self._saved is None:
                self.average()
            return self._saved
        finally:
            self._is_saving, self._saved = False, None  # it has the residual's bytes

    def resume(self) -> None:
        """Continue from a saved state that the contributor has loaded, and other members may have, too."""
        self._residual_members = 0

    def leave(self) -> None:
        """Leave immediately. A residual that has not been handed over is lost."""
        if self.has_left:
            return
        for averaging in (self._open, self._doubt):
            if averaging is not None:
                averaging.abandon()
        self._open, self.has_left = None, True
        self.group.leave()

    def _repeated(self, attempt: Callable[[], None]) -> None:
        """Repeat the attempt until it succeeds, or for the group's `wait_seconds`.

        A member that ends leaves before it raises: the others ask for a quorum now, and must not wait for it.
        """
        group, give_up_at, logged = self.group, math.inf, ""
        while True:
            try:
                attempt()
                return
            except RefusedError as refused:
                self.leave()
                raise refused.error from None
            except (BrokenMemberError, LeftError, NoQuorumError):
                self.leave()
                raise
            except (CommunicationError, TryAgainError) as error:
                now = time.monotonic()
                # Count from the first failure: the others may be late by as long as a quorum may take.
                give_up_at = min(give_up_at, now + group.wait_seconds)
                # First: it aborts the others' messages, which would wait for this member until they time out.
                group.commit(False)
                self.stats.retries += not isinstance(error, TooFewError)
                if str(error) != logged:  # waiting raises the same error again and again
                    logged, waits = str(error), isinstance(error, TooFewError)
                    happens = "waiting for more members" if waits else "an averaging failed and is retried"
                    logger.warning("%s: %s", happens, error)
                if group.broadcast_scalar(now >= give_up_at):
                    raise CommunicationError(
                        f"no averaging succeeded within {group.wait_seconds:g} s; the last error: {error}. "
                        "Nothing was averaged; check the lighthouse, and that at least "
                        f"min_members={group.min_members} members are running"
                    ) from error

    def _start(self) -> None:
        group, contributor = self.group, self._contributor
        statuses, known = self._gather_members()
        lineage = next_lineage(contributor.lineage, group.quorum_id, statuses)
        total = sum(status.weight for status in statuses)
        pending = None
        if total:
            scale = statuses[group.control.rank].weight * len(statuses) / total
            step = max(status.step for status in statuses)
            is_last = all(status.is_leaving for status in statuses)
            pending = in_all_processes(lambda: contributor.start(known, scale, step, is_last=is_last), group)
        self._open = _Averaging(pending, lineage, statuses)

    def _finish(self) -> None:
        if self._open is None:
            self._start()
        assert self._open is not None
        opened, self._open = self._open, None
        try:
            if opened.pending is not None:
                with self._contributor.engine.clock.inside():
                    in_all_processes(opened.pending.receive, self.group)
        except BaseException:
            opened.abandon()
            raise
        try:
            gather_numbers([1.0], self.group.control, "whether all have received everything")
        except BaseException:
            # Don't abandon it: another member may have received this message, and committed.
            self._doubt = opened
            raise
        # Hand over after the commit: before it, a message that fails on rank 0 alone would make rank 0 repeat
        # the averaging that rank 1 commits.
        self.group.commit(True)
        self._commit(opened)
        self._hand_over(opened.statuses)
        # Leaving members have handed over their residual, and saving would count it again.
        is_anyone_leaving = any(status.is_leaving for status in opened.statuses)
        if not is_anyone_leaving and any(status.is_saving for status in opened.statuses):
            saved = in_all_processes(self._contributor.next_engine.state_dict, self.group)
            self._saved = saved if self._is_saving else None

    def _commit(self, averaging: _Averaging) -> None:
        contributor, pending, statuses = self._contributor, averaging.pending, averaging.statuses
        if pending is not None:
            pending.wait()  # first: it raises if a mean is not finite, and then nothing has changed
        contributor.lineage = averaging.lineage
        contributor.commits += 1
        if pending is None:
            # While a member joins or saves, this is fine: members contribute next time.
            may_be_empty = any(status.is_new or status.is_saving for status in statuses)
            contributor.commit_empty(may_be_empty=may_be_empty)
        else:
            contributor.commit(pending, max(status.step for status in statuses), len(statuses))
            self.stats.averagings += 1
        self.stats.count(self.statuses, statuses)
        self.statuses = statuses

    def _hand_over(self, statuses: Sequence[MemberStatus]) -> None:
        """Add the residuals of leaving members, in equal parts, to those of the members that stay."""
        stayers = [rank for rank, status in enumerate(statuses) if not status.is_leaving]
        leavers = [rank for rank, status in enumerate(statuses) if status.is_leaving]
        errors, transport = self._contributor.next_engine.state.memory[ERROR], self.group.transport
        # All members have residuals for the same parameters.
        names = sorted(errors)
        if not stayers or not names:
            return
        for number, rank in enumerate(leavers):
            try:
                arrived = broadcast_residual([errors[name] for name in names], transport, rank)
            except CommunicationError as error:
                # No message can follow a failed one, so the residuals of the other leavers are lost, too.
                logger.warning(
                    "the residuals of %d leaving members are lost: %s", len(leavers[number:]), error
                )
                self.stats.lost_error += sum(statuses[rank].error_norm for rank in leavers[number:])
                return
            if transport.rank in stayers:
                for name, part in zip(names, arrived, strict=True):
                    errors[name].add_(part, alpha=1 / len(stayers))

    # The members of the next averaging.

    def _gather_members(self) -> tuple[tuple[MemberStatus, ...], Values]:
        """Return the members of the next averaging, and this member's values as far as they are known.

        1. A quorum is formed, which connects its members.
        2. All exchange statuses. If any is in doubt, it then knows what the others have done, and all
           exchange statuses again. From these alone they refuse members, and choose the lineage to continue.
        3. If the members have changed, they compare their settings, and newcomers receive the others' state.
        """
        group, start = self.group, time.perf_counter()
        try:
            group.start_quorum(self._contributor.commits)
        finally:
            self.stats.quorum_seconds += time.perf_counter() - start
        statuses, values = self._gather_statuses()
        # Decide in this order, and from the statuses alone. Otherwise rank 0 could continue and rank 1 start
        # over: rank 0 waits for rank 1's round 1, rank 1 for rank 0 at the lighthouse, until both time out.
        self._admission.check_number(admitted(statuses))
        if any(status.doubt for status in statuses):
            self._resolve_doubt(statuses)
            statuses, values = self._gather_statuses()
        statuses = admitted(statuses)
        self._admission.check_finite(statuses)
        self._admission.check_optimizers(statuses)
        if self._agreed_at_change != group.num_changes or any(status.is_new for status in statuses):
            # Agree before adopting a state: a refused member has changed nothing. Scale the residual even if
            # the averaging then fails: the next change of members starts from this number.
            self._admission.agree(statuses)
            self._join(statuses)
            self._agreed_at_change = group.num_changes
        # A newcomer's values are those of its own model, which the others' has replaced.
        return statuses, {} if statuses[group.control.rank].is_new else values

    def _gather_statuses(self) -> tuple[tuple[MemberStatus, ...], Values]:
        group, contributor = self.group, self._contributor
        weight, values = contributor.contribution()
        own = MemberStatus(
            step=contributor.steps,
            weight=weight,
            is_finite=are_finite(values),
            is_leaving=self.is_leaving,
            is_saving=self._is_saving,
            member=self._member,
            lineage=contributor.lineage,
            commits=contributor.commits,
            doubt=0 if self._doubt is None else self._doubt.lineage,
            min_members=group.min_members,
            error_norm=contributor.next_engine.state.error_norm(),
            inner_settings=digest_of(inner_settings(contributor.model.optimizers)),
            averagings=self.stats.averagings,
        )
        own = reduced_over_local_processes(own, group)
        return StatusGather(own, group.control, "who takes part in an averaging").read(), values

    def _resolve_doubt(self, statuses: Sequence[MemberStatus]) -> None:
        """Commit the averaging in doubt if another member has, and else drop it."""
        doubt, self._doubt = self._doubt, None
        if doubt is None:
            return
        if any(status.lineage == doubt.lineage for status in statuses):
            self._commit(doubt)
        else:
            doubt.abandon()

    def _join(self, statuses: Sequence[MemberStatus]) -> None:
        """Start with changed members: newcomers load one's state, and residuals fit the members' number."""
        group, contributor = self.group, self._contributor
        old = [rank for rank, status in enumerate(statuses) if not status.is_new] or [0]
        source = old[0]
        newcomers = [rank for rank, status in enumerate(statuses) if status.is_new and rank != source]
        state = in_all_processes(lambda: group.join(contributor.state, source, newcomers), group)
        if state is not None:
            self._load(contributor.check_state(state))
        # Members that resume from a state each have its mean residual; a newcomer has none.
        before = self._residual_members or len(old)
        for engine in {contributor.engine, contributor.engine_after(0)}:
            engine.regroup(group.control.size / before)
        self._residual_members = group.control.size

    def _load(self, loaded: LoadedState) -> None:
        """Start from a state that another member has sent."""
        contributor = self._contributor
        lost = contributor.next_engine.state.error_norm()
        # If a run resumes, the members that continued before this one have its residual.
        if contributor.lineage and self._residual_members:
            loss = f", and its residual of norm {lost:g} is lost" if lost else ""
            logger.warning("this member was away, so it restarts from the others' state%s", loss)
            self.stats.lost_error += lost
        contributor.start_from(loaded)
        self._residual_members, self.statuses = self.group.control.size, ()
