"""Averagings with members that come and go: all members commit an averaging or none does."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import gather_numbers
from thinwire.errors import CommunicationError, LeftError
from thinwire.local_sgd.admission import (
    NUMBER_BITS,
    Admission,
    RefusedError,
    TooFewError,
    TryAgainError,
    kept_lineage,
    next_lineage,
)
from thinwire.local_sgd.elastic_contributor import ElasticContributor, Values
from thinwire.local_sgd.groups.group import NoQuorumError
from thinwire.local_sgd.groups.machine_group import (
    BrokenMemberError,
    in_all_processes,
    reduced_over_local_processes,
)
from thinwire.local_sgd.groups.state_transfer import broadcast_residual, lineage_of, plain
from thinwire.local_sgd.inner_optimizers import inner_settings
from thinwire.local_sgd.member_status import MembershipStats, MemberStatus, StatusGather
from thinwire.local_sgd.pending_average import PendingAverage, are_finite
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
    member that misses only that is in doubt: it keeps the averaging, and the next quorum says what holds.

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
        self._member = self._draw_number()
        # The number of members over which this residual is averaged; 0 for members that resume together.
        self._residual_members = 1
        self._agreed_at_change = 0  # the group's `num_changes` when settings were last compared
        self._open: _Averaging | None = None
        self._doubt: _Averaging | None = None
        self._is_saving = False
        self._saved: dict[str, Any] | None = None
        self.group.provide = self._provided
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
        self.group.reset(self._contributor.commits)

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

        1. A quorum is formed; it may send this member the others' state, which replaces its own.
        2. All exchange statuses. From these alone they refuse members, and choose the lineage to continue. If
           any is in doubt, it then knows what the others have done, and all exchange statuses again.
        3. If the members have changed, they compare their settings, and newcomers load their state.
        """
        group = self.group
        self._start_quorum()
        (statuses, values), is_new = self._gather_statuses(), group.received is not None
        if is_new and not all(status.is_finite for status in statuses):
            # The received state may be from a member that has diverged, optimizers too: receive another one.
            self._start_over()
        # Decide in this order, and from the statuses alone. Otherwise rank 0 could continue and rank 1 start
        # over: rank 0 waits for rank 1's round 1, rank 1 for rank 0 at the lighthouse, until both time out.
        self._admission.check_number(statuses)
        # Chosen before doubts are resolved: what some have committed goes before what most have.
        kept = kept_lineage(statuses)
        if any(status.doubt for status in statuses):
            self._resolve_doubt(kept)
            statuses, values = self._gather_statuses()
        self._check_lineage(statuses, kept)
        self._admission.check_finite(statuses)
        self._admission.check_optimizers(statuses)
        if self._agreed_at_change != group.num_changes:
            # Agree before adopting a state: a refused member has changed nothing. Scale the residual even if
            # the averaging then fails: the next change of members starts from this number.
            self._admission.agree(statuses)
            self._join(statuses)
            self._agreed_at_change = group.num_changes
        # A newcomer's values are those of its own model, which the others' has replaced.
        return statuses, {} if statuses[group.control.rank].is_new else values

    def _start_quorum(self) -> None:
        """Wait for a quorum, and decide what a state from the others means."""
        start = time.perf_counter()
        try:
            self.group.start_quorum()
        finally:
            self.stats.quorum_seconds += time.perf_counter() - start
        received = self.group.received
        if received is None:
            return
        if self._doubt is not None and self._doubt.lineage == lineage_of(received):
            # The others have committed the averaging that this member has prepared. It will commit it too,
            # and then has their state, and keeps its residual.
            self.group.received = None
        else:
            self._member = self._draw_number()  # for the others, it is a new member

    def _gather_statuses(self) -> tuple[tuple[MemberStatus, ...], Values]:
        group, contributor = self.group, self._contributor
        weight, values = contributor.contribution()
        is_new = group.received is not None
        own = MemberStatus(
            step=0 if is_new else contributor.steps,
            weight=0.0 if is_new else weight,
            is_finite=are_finite(values),
            is_leaving=self.is_leaving,
            is_new=is_new,
            is_saving=self._is_saving,
            member=self._member,
            lineage=contributor.lineage if group.received is None else lineage_of(group.received),
            doubt=0 if self._doubt is None else self._doubt.lineage,
            min_members=group.min_members,
            error_norm=contributor.next_engine.state.error_norm(),
            inner_settings=digest_of(inner_settings(contributor.model.optimizers)),
            averagings=self.stats.averagings,
        )
        own = reduced_over_local_processes(own, group)
        return StatusGather(own, group.control, "who takes part in an averaging").read(), values

    def _join(self, statuses: Sequence[MemberStatus]) -> None:
        """Start with changed members: load a received state, and rescale the residual to their number."""
        group, are_new = self.group, [status.is_new for status in statuses]
        if group.has_parts and all(are_new):
            # The member that sent its state to the first process has gone, and so have the other parts.
            self._start_over()
            raise TryAgainError("no member is left that holds all parts of the model")
        # The member's first process has received the state: give it to the others.
        in_all_processes(lambda: group.join(are_new), group)
        if group.received is not None:
            self._load(group.received)
        # Members that resume from a state each have its mean residual; a newcomer has none.
        before = self._residual_members or sum(not is_new for is_new in are_new)
        for engine in {self._contributor.engine, self._contributor.engine_after(0)}:
            engine.regroup(group.control.size / before)
        self._residual_members = group.control.size

    def _load(self, received: Mapping[str, Any]) -> None:
        """Start from a state that the others have sent."""
        contributor = self._contributor
        lost = contributor.next_engine.state.error_norm()
        # If a run resumes, the members that continued before this one have its residual.
        if contributor.lineage and self._residual_members:
            loss = f", and its residual of norm {lost:g} is lost" if lost else ""
            logger.warning("this member was away, so it restarts from the others' state%s", loss)
            self.stats.lost_error += lost
        contributor.start_from(contributor.check_state(received))
        self._residual_members = self.group.control.size
        self.statuses, self.group.received = (), None

    def _start_over(self) -> None:
        """Let the next quorum send this member the others' state, in place of one already received."""
        self.group.received = None
        self.group.reset()

    def _provided(self) -> Mapping[str, Any]:
        """Return the state that a newcomer starts from."""
        device = self._contributor.model.device
        if device.type != "cpu":
            # This runs on a torchft thread, whose stream does not wait for the training stream.
            torch.accelerator.synchronize(device)
        # Send the state it is about to load: its own model is not shared yet.
        return self._contributor.state() if self.group.received is None else self.group.received

    def _resolve_doubt(self, kept: int) -> None:
        """Commit the averaging in doubt if all continue from it, and else drop it."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None and doubt.lineage == kept:
            self.group.received = None
            self._commit(doubt)
        elif doubt is not None:
            doubt.abandon()

    def _check_lineage(self, statuses: Sequence[MemberStatus], kept: int) -> None:
        """Make members of another lineage start again."""
        if any(status.lineage != kept for status in statuses):
            if statuses[self.group.control.rank].lineage != kept:
                self._start_over()
            raise TryAgainError(
                "members come from different averagings, so some must restart from the others' state"
            )

    def _draw_number(self) -> int:
        """Return a number that no other member has, independent of seeds that the user's script sets."""
        return int(self.group.broadcast_scalar(random.SystemRandom().getrandbits(NUMBER_BITS) | 1))
