"""Averagings with all members of a group that never changes; `elastic_membership` has groups that do."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from thinwire.comm import Transport, agree, gather_numbers
from thinwire.comm.agreement import alike_on_all_shards
from thinwire.errors import StepError
from thinwire.local_sgd.fragment import Averaged, Fragment
from thinwire.local_sgd.member_status import MemberStatus, StatusGather, check_alike
from thinwire.local_sgd.model_changes import Changes, ModelChanges
from thinwire.local_sgd.outer import settings_digest
from thinwire.local_sgd.pending_average import PendingAverage, are_finite
from thinwire.local_sgd.saved_state import LoadedState, load_fragments
from thinwire.sync.state import digest_of

logger = logging.getLogger(__name__)

LOADED_STATE = "loaded state"


class StaticMembership:
    """Averages with fixed members: as scheduled, on request (`average_all`) and within subgroups.

    At most one average is pending. All members raise the same error: `StepError` if they are at different
    steps or one has parameters that are not finite, `CommunicationError` if a collective failed.
    """

    has_left = False

    def __init__(self, changes: ModelChanges) -> None:
        self._contributor = changes
        self._transport = changes.engine.transport
        self._shards = changes.model.replica.inside
        # Averages the models within the subgroup, if there is one. (Of a DDP model, gradients are averaged.)
        self._subgroup = changes.subgroup_engine if changes.schedule.averages_within else None
        self.divides_by_contributors = False  # by the members that have made steps, not by all
        self.pending: PendingAverage[Fragment] | None = None
        self._unread: list[StatusGather] = []  # in the order of gathering

    # On entry.

    def check_models(self, averaged: Sequence[Averaged], name: str) -> None:
        """Raise on all processes if models differ, or have changed since this was made."""
        engine = self._contributor.engine
        self._agree({}, lambda: engine.buckets.agree(averaged[0].value.device))
        # The engine's plan is for the parameters that were trained when this was made. Messages of different
        # lengths would crash the process; with equal lengths, different parameters would be averaged.
        changed = sorted({spec.name for spec in {*engine.specs} ^ {tensor.spec for tensor in averaged}})[:4]
        self._agree({"parameters that changed since LocalSGD was created:": str(changed)} if changed else {})
        if changed:
            raise StepError(
                f"the model's trainable parameters or buffers have changed since this {name} was created: "
                f"{changed}; freeze, unfreeze or convert them first, then create it"
            )

    def agree_on_settings(self, loaded: LoadedState | None) -> None:
        """Raise on all processes if their settings differ. Collective."""
        digest = str(None if loaded is None else loaded.digest)
        self._agree(self._contributor.settings() | {LOADED_STATE: digest})

    def _agree(self, described: dict[str, str], action: Callable[[], None] | None = None) -> None:
        replica, group, purpose = self._contributor.model.replica, self._transport, "entering LocalSGD"
        algorithm = repr(self._contributor.engine.algorithm)
        of_shard = {"replica": f"{group.rank} of {group.size}", "algorithm": algorithm, **described}
        if not replica.pieces:  # each process has loaded its own part
            of_shard.pop(LOADED_STATE, None)
        action = action or (lambda: agree(group, described, purpose))
        alike_on_all_shards(replica.inside, purpose, of_shard, action)

    def resume(self, loaded: LoadedState) -> None:
        """Load fragments and the pending average from a state."""
        contributor = self._contributor
        load_fragments(loaded, contributor.model)
        self.abandon()  # an earlier attempt to enter may have failed
        contributor.end_warmup()
        for number, means in loaded.pending:
            # Version 0.2 could have several pending averages: all but the last are applied now.
            if self.is_open:
                self.finish()
            fragment = contributor.model.fragments[number]
            contributor.sent_at = fragment.sent_after
            flats = fragment.empty()
            for tensor, part in fragment.parts(flats):
                part.copy_(means[tensor.name])
            self.pending = PendingAverage({fragment: flats}, None)

    # An averaging.

    @property
    def is_open(self) -> bool:
        """Whether an averaging was started and not finished."""
        return self.pending is not None

    def start(self) -> None:
        """Gather the members' statuses, and send the first messages. Collective."""
        contributor = self._contributor
        is_delayed = contributor.schedule.is_delayed(contributor.steps)
        changes = contributor.changes_of(contributor.due_fragments())
        self._gather_status(weight=self._weight, is_finite=are_finite(changes, self._shards))
        # Read statuses before waiting for changes, which a member at a different step does not send. With a
        # delay it waits for none yet: `advance` reads them, unless the engine's blocking comparison is next.
        reads_later = is_delayed and contributor.engine.buckets.has_agreed
        self._send(changes, () if reads_later else self._read(), is_delayed=is_delayed)

    def _send(self, changes: Changes, statuses: Sequence[MemberStatus], *, is_delayed: bool = False) -> None:
        # All weights are 1 if the statuses are not read yet: contributors are not counted with a delay.
        total = sum(status.weight for status in statuses)
        scale = self._weight * len(statuses) / total if total else 1.0
        contributor = self._contributor
        self.pending = contributor.send(changes, scale, contributor.steps, is_delayed=is_delayed)

    @property
    def _weight(self) -> float:
        return float(not self.divides_by_contributors or self._contributor.model.fragments[0].work > 0)

    @property
    def rounds_due(self) -> int:
        """How many rounds of the pending averaging must have been sent by now; 0 if they have been."""
        if self.pending is None or self.pending.is_done:
            return 0
        (fragment,) = self.pending.changes  # a delayed average has one fragment
        due = self._contributor.schedule.rounds_sent(self._contributor.age, fragment.num_rounds)
        return due if due > self.pending.num_rounds else 0

    def advance(self, num_rounds: float) -> None:
        """Send the next round of the pending averaging, and more until this many were sent or all arrived."""
        pending = self.pending
        assert pending is not None
        # Send a status before everything else. Otherwise, if rank 0 is a step late, rank 1 would send round 2
        # while rank 0 leaves the context and sends its status, and each would wait for the other.
        newest = [self._start_gather(self._transport)] if pending.is_delayed else []
        # Before waiting for a round, read the statuses that were sent before it: if members differ, it never
        # arrives. Not yet the newest: slower members send it only when they come this far.
        self._read()
        self._unread = newest
        while pending.advance() and pending.num_rounds < num_rounds:
            self._read()

    def settle(self) -> None:
        """Wait for the means of the pending averaging, without applying them. Collective."""
        self._gather_status()
        self._read()  # before waiting for anything: members at other steps send other rounds
        self._wait()

    def _wait(self) -> None:
        pending = self.pending
        if pending is None or pending.is_done:
            return
        self.advance(math.inf)
        pending.wait()
        # The number of rounds is known only now; the next averaging spreads them over the delay.
        for fragment in pending.changes:
            fragment.num_rounds = pending.num_rounds

    def finish(self) -> None:
        """Wait for the means, and apply them. Collective."""
        self._wait()
        # Only now: if anything above raised, the pending average must still be abandoned.
        pending, self.pending = self.pending, None
        assert pending is not None
        self._contributor.apply(pending.changes, self._contributor.sent_at)

    def abandon(self) -> None:
        """Drop the pending average: its changes are sent again at their next turn."""
        if self.pending is not None:
            self.pending.abandon()
        self.pending, self._unread = None, []

    # Averagings outside the schedule.

    def average_all(self) -> None:
        """Apply the pending average, then average what steps have changed since each fragment was sent.

        Changes made without a step are kept if they are the same on all members. Collective.
        """
        contributor = self._contributor
        fragments, step = contributor.model.fragments, contributor.steps
        changes = contributor.changes_of(fragments)
        is_finite = are_finite(changes, self._shards)
        if self._subgroup is not None:
            self._check_within(self._subgroup.transport, is_finite=is_finite)
        # If these have changed since they were sent, then without a counted step: weights were loaded, or an
        # optimizer has stepped whose steps are not counted.
        sent = () if self.pending is None else self.pending.changes
        unstepped = [f for f in fragments if step == f.sent_after and f not in sent]
        self._gather_status(
            weight=self._weight,
            is_finite=is_finite,
            unstepped=self._digest_if_moved(unstepped, changes) if unstepped else 0,
            has_loaded=len(unstepped) < len(fragments) and contributor.model.has_loaded(),
        )
        statuses = self._read()
        if statuses[0].unstepped:  # the same on all
            for fragment in unstepped:
                fragment.set_last(buffers=False)
            logger.info(
                "parameters changed without an optimizer step, equally on all processes: they become the "
                "last average"
            )
        if len(unstepped) == len(fragments):  # the model is the last average now
            contributor.model.before_load = None
        if self.is_open:
            self.finish()
        # Average each by itself as usual, the one that has waited longest first: the same order on all ranks.
        waiting = sorted((f for f in fragments if step > f.sent_after), key=lambda f: f.sent_after)
        is_warm_up = contributor.schedule.is_warm_up(step)
        for turn in [waiting] if waiting and is_warm_up else [[fragment] for fragment in waiting]:
            # All members are at this step, as the statuses show, so they need not gather them again.
            self._send(contributor.changes_of(turn), statuses)
            self.finish()

    def _digest_if_moved(self, fragments: Sequence[Fragment], changes: Changes) -> int:
        """Return a digest of parameters on all shards; 0 if none has changed. Collective inside."""
        # Leave out buffers, which change in every forward pass.
        have_moved = any(
            flat.any()
            for fragment in fragments
            for specs, flat in zip(fragment.layout, changes[fragment], strict=True)
            if not specs[0].is_statistic
        )
        inside, purpose = self._contributor.model.replica.inside, "looking for changes without a step"
        if gather_numbers([float(have_moved)], inside, purpose) == [[0.0]] * inside.size:
            return 0
        values = [item.value for fragment in fragments for item in fragment if not item.is_buffer]
        digests = gather_numbers([float(digest_of(values))], inside, purpose)
        return digest_of(digests) | 1

    def average_within(self) -> None:
        """Average exactly, within the subgroup, fragments that the group does not average now. Collective."""
        contributor, engine = self._contributor, self._subgroup
        assert engine is not None
        changes = contributor.changes_of(contributor.model.fragments)
        self._check_within(engine.transport, is_finite=are_finite(changes, self._shards))
        # Fragments that the group averages now, without a delay, need no subgroup mean first.
        if contributor.is_due() and not contributor.schedule.is_delayed(contributor.steps):
            for fragment in contributor.due_fragments():
                del changes[fragment]
        if changes:
            PendingAverage(changes, engine).wait()
            for fragment, means in changes.items():
                fragment.write_means(means)

    # The statuses of the members.

    def _check_within(self, subgroup: Transport, *, is_finite: bool) -> None:
        """Compare statuses within the subgroup, so that all members raise together. Collective; blocks.

        The subgroup always compares first, so that members at different steps meet there, not in different
        groups. If they disagree, they send their statuses to the group right away; the other members raise
        too when they next compare there.
        """
        with suppress(StepError):
            check_alike(self._start_gather(subgroup, is_finite=is_finite).read())
            return
        check_alike(self._start_gather(self._transport, is_finite=is_finite).read())

    def _gather_status(self, **status: Any) -> None:
        self._unread.append(self._start_gather(self._transport, **status))

    def _start_gather(self, transport: Transport, **status: Any) -> StatusGather:
        """Send this member's status, without waiting for those of the others. Collective."""
        step, outer = self._contributor.steps, settings_digest(self._contributor.model.outer)
        own = MemberStatus(step, outer_settings=outer, **status)
        return StatusGather(own, transport, f"step {step}, the consensus check before an averaging")

    def _read(self) -> tuple[MemberStatus, ...]:
        """Wait for all gathered statuses; return the last ones, or raise on all members."""
        statuses: tuple[MemberStatus, ...] = ()
        # In the order of gathering, the same on all ranks, so that all raise at the same one.
        while self._unread:
            statuses = self._unread.pop(0).read()
            check_alike(statuses)
        return statuses
