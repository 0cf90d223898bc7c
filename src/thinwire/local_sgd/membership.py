"""Averagings with all members of a group that never changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from thinwire.errors import StepError
from thinwire.local_sgd.contributor import Contributor
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.loaded_weights import LOADED
from thinwire.local_sgd.member_status import MemberStatus, StatusGather
from thinwire.local_sgd.outer import settings_digest
from thinwire.local_sgd.pending_average import PendingAverage

MAX_LISTED = 8


class Membership:
    """Averages what a contributor puts in with all members of a group: at most one average is under way.

    1. `start` asks who takes part, gathers the status of each member, and sends the first messages.
    2. `advance`, while training goes on: sends the next rounds, if the algorithm has several.
    3. `finish` waits for the means and lets the contributor commit them.

    Members that stay refuse alike, all of them: `StepError` if they are at different steps or one has
    parameters that are not finite, `CommunicationError` if a collective failed.
    """

    has_left = False

    def __init__(self, group: Group, contributor: Contributor) -> None:
        self.pending: PendingAverage[Any] | None = None
        self.group, self._contributor = group, contributor
        self._step = 0  # of the members, when it was sent
        self._gathers: list[StatusGather] = []  # not read yet, in this order
        self._to_read = 0  # of those: before the latest round is waited for

    @property
    def is_open(self) -> bool:
        """Whether an averaging was started, and not finished."""
        return self.pending is not None

    def average(self, statuses: Sequence[MemberStatus] = ()) -> None:
        """Average once with all members; with their statuses, if these are known. Collective."""
        self.start(statuses=statuses)
        self.finish()

    def start(self, *, is_delayed: bool = False, statuses: Sequence[MemberStatus] = ()) -> None:
        """Send the first messages of an averaging. Collective."""
        self.group.start_quorum()
        contributor = self._contributor
        contribution = contributor.contribution()
        if not statuses:
            self.gather_status(contribution.weight, is_finite=contribution.is_finite)
            self._to_read = len(self._gathers)
            # Read first: a process at a different step sends no changes to wait for. If it is delayed, before
            # the first round is waited for; but the engine's comparison blocks, and all must come to it.
            if not is_delayed or not contributor.engines[0].buckets.has_agreed:
                statuses = self.read()
        total = sum(status.weight for status in statuses)
        scale = contribution.weight * len(statuses) / total if total else 1.0
        self._step = contributor.steps
        self.pending = contributor.start(contribution.tensors, scale, self._step, is_delayed=is_delayed)

    @property
    def is_behind(self) -> bool:
        """Whether more rounds of the averaging under way are due than were sent."""
        pending, contributor = self.pending, self._contributor
        return pending is not None and not pending.is_done and pending.num_rounds < contributor.rounds_due

    def advance(self) -> None:
        """Send the rounds of the averaging under way that are due. Collective."""
        assert self.pending is not None
        # A status goes before all that is sent. Else, with rank 0 a step behind: rank 1 sends round 2, rank 0
        # leaves the context and sends its status, and each waits for the other. So both read two statuses.
        self.gather_status()
        self.pending.send(self._contributor.rounds_due, self._read_due)

    def wait(self) -> None:
        """Wait for the means of the averaging under way; they are applied by `finish`. Collective."""
        if self.pending is None or self.pending.is_done:
            return
        if self.pending.is_delayed:
            self.gather_status()
        self.pending.send(before=self._read_due)
        self.pending.wait()
        # Only now is it known; the next averaging spreads them over the delay.
        for fragment in self.pending.changes:
            fragment.num_rounds = self.pending.num_rounds

    def settle(self) -> None:
        """Wait for the means, as `wait`, if all members are at one step. Collective."""
        self.gather_status()
        self.read()  # before anything is waited for: members that are at other steps send other rounds
        self.wait()

    def finish(self) -> None:
        """Apply the averaging that was started. Collective."""
        self.wait()
        # Only then: what has raised above is still to be abandoned.
        pending, self.pending = self.pending, None
        members = self.group.transport.size
        self._contributor.commit(pending, self._step, members, may_be_empty=True)

    def abandon(self) -> None:
        """Forget what is under way: its changes are sent again when their turn comes."""
        if self.pending is not None:
            self.pending.abandon()
        self.pending, self._gathers, self._to_read = None, [], 0
        self._contributor.abandon()

    def resume(self, pending: PendingAverage[Any], step: int) -> None:
        """Go on from an average whose means had come when the state was saved."""
        self.pending, self._step = pending, step

    # The statuses of the members.

    def gather_status(self, weight: float = 1.0, *, is_finite: bool = True, **flags: bool) -> StatusGather:
        """Ask all members at which step they are; do not wait for the answers. Collective."""
        status = self.status(weight, is_finite=is_finite, **flags)
        purpose = f"step {status.step}, the consensus check before an averaging"
        self._gathers.append(StatusGather(status, self.group.transport, purpose))
        return self._gathers[-1]

    def status(self, weight: float = 1.0, *, is_finite: bool = True, **flags: bool) -> MemberStatus:
        """Return this member's status."""
        outer = settings_digest(self._contributor.model.outer)
        return MemberStatus(self._contributor.steps, weight, is_finite, outer_settings=outer, **flags)

    def read(self) -> tuple[MemberStatus, ...]:
        """Wait for all statuses that were asked for; return the last ones, or refuse on all alike."""
        statuses: tuple[MemberStatus, ...] = ()
        # In the order of asking, the same on all ranks: so all refuse at the same question.
        while self._gathers:
            statuses = self._gathers.pop(0).read()
            check_alike(statuses)
        self._to_read = 0
        return statuses

    def _read_due(self) -> None:
        """Read what was asked before the round that is waited for next: if members differ, it never comes."""
        due, self._gathers = self._gathers[: self._to_read], self._gathers[self._to_read :]
        for gather in due:
            check_alike(gather.read())
        self._to_read = len(self._gathers)


def check_alike(statuses: Sequence[MemberStatus]) -> None:
    """Refuse, on all members alike, to average at different steps or what is not finite."""
    broken = [rank for rank, status in enumerate(statuses) if not status.is_finite]
    if broken:
        raise StepError(
            f"parameters or buffers of rank {_listed(broken)} are not finite (inf or NaN); nothing was "
            "averaged. Restart from a checkpoint (last average: state_dict()['last_average'])"
        )
    if len({status.step for status in statuses}) > 1:
        steps = _listed([f"{rank}: {status.step}" for rank, status in enumerate(statuses)])
        raise StepError(
            f"ranks are at different steps ({steps}), so nothing was averaged; pass grad_scaler=, or for "
            "uneven inputs train inside thinwire.join(local)"
        )
    if any(status.has_loaded for status in statuses):
        raise StepError(LOADED)
    if not are_alike(statuses):
        usual = Counter(status.outer_settings for status in statuses).most_common(1)[0][0]
        others = [rank for rank, status in enumerate(statuses) if status.outer_settings != usual]
        raise StepError(
            f"the outer optimizer of rank {_listed(others)} is set otherwise than the others'; nothing was "
            "averaged. Step a schedule of local.outer on all processes alike"
        )


def are_alike(statuses: Sequence[MemberStatus]) -> bool:
    """Return whether all are at one step, finite, and average alike."""
    is_finite = all(status.is_finite for status in statuses)
    return is_finite and len({(status.step, status.outer_settings) for status in statuses}) == 1


def _listed(values: Sequence[object]) -> str:
    listed = ", ".join(map(str, values[:MAX_LISTED]))
    return listed if len(values) <= MAX_LISTED else f"{listed} and {len(values) - MAX_LISTED} more"
