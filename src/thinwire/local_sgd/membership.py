"""Averagings with all members of a group that never changes; `elastic_membership` has groups that do."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from thinwire.comm import Transport, agree, gather_numbers, true_for_all
from thinwire.comm.agreement import alike_on_all_shards
from thinwire.errors import StepError
from thinwire.local_sgd.contributor import Contribution, Contributor, Terms
from thinwire.local_sgd.fragment import Averaged, Fragment, Fragments
from thinwire.local_sgd.member_status import MemberStatus, StatusGather
from thinwire.local_sgd.model_changes import ModelChanges
from thinwire.local_sgd.outer import settings_digest
from thinwire.local_sgd.pending_average import PendingAverage, are_finite
from thinwire.local_sgd.saved_state import LoadedState, load_fragments
from thinwire.local_sgd.training_loop import LOADED
from thinwire.sync import Engine

logger = logging.getLogger(__name__)

MAX_LISTED = 8
LOADED_STATE = "loaded"


class Membership(ABC):
    """Averages a contributor's tensors over the members of a group: at most one average is pending.

    1. `start` finds the members, gathers their statuses, and sends the first messages.
    2. `advance`, while training continues, sends the next rounds, if the algorithm has several.
    3. `finish` waits for the means, and the contributor commits them.
    """

    has_left = False

    def __init__(self, contributor: Contributor) -> None:
        self._contributor = contributor

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether an averaging was started and not finished."""

    @property
    def is_behind(self) -> bool:
        """Whether more rounds of the pending averaging are due than have been sent."""
        return False

    @abstractmethod
    def start(self, *, is_delayed: bool = False) -> None: ...

    def advance(self) -> None:  # noqa: B027 - most memberships send all rounds in `finish`
        """Send the rounds of the pending averaging that are due. Collective."""

    @abstractmethod
    def finish(self) -> None: ...

    def average(self) -> None:
        """Average once with all members. Collective."""
        self.start()
        self.finish()

    def abandon(self) -> None:  # noqa: B027 - as above
        """Drop the pending average: its changes are sent again at their next turn."""


class StaticMembership(Membership):
    """Averages with fixed members: as scheduled, on request (`average_all`) and within subgroups.

    All members raise the same error: `StepError` if they are at different steps or one has parameters that
    are not finite, `CommunicationError` if a collective failed.
    """

    _contributor: ModelChanges

    def __init__(self, changes: ModelChanges, subgroup: Engine | None) -> None:
        super().__init__(changes)
        self._transport = changes.engines[0].transport
        self.pending: PendingAverage[Fragment] | None = None
        self.subgroup = subgroup
        self._terms = Terms(0, self._transport.size, 1.0, is_delayed=False)  # of the pending average
        self._gathers: list[StatusGather] = []  # not read yet, in this order
        self._to_read = 0  # how many of them to read before waiting for the latest round

    # On entry.

    def check_models(self, averaged: Sequence[Averaged], name: str) -> None:
        """Raise on all processes if models differ, or have changed since this was made."""
        engine = self._contributor.engines[0]
        self._agree({}, lambda: engine.agree(averaged[0].value.device))
        # The plan is for the parameters trained then. Messages of different lengths would crash the process;
        # with equal lengths, different parameters would be averaged with each other.
        others = sorted({spec.name for spec in {*engine.specs} ^ {tensor.spec for tensor in averaged}})[:4]
        self._agree({"changed parameters": str(others)} if others else {})
        if others:
            raise StepError(
                f"the model's trainable parameters or buffers have changed since this {name} was created: "
                f"{others}; freeze, unfreeze or convert them first, then create it"
            )

    def agree_on_settings(self, loaded: LoadedState | None) -> None:
        """Raise on all processes if their settings differ. Collective."""
        state = "no state" if loaded is None else f"a state with checksum {loaded.digest}"
        self._agree(self._contributor.settings() | {LOADED_STATE: state})

    def _agree(self, described: dict[str, str], action: Callable[[], None] | None = None) -> None:
        replica, group, purpose = self._contributor.model.replica, self._transport, "entering LocalSGD"
        algorithm = repr(self._contributor.engines[0].algorithm)
        of_shard = {"replica": f"{group.rank} of {group.size}", "algorithm": algorithm, **described}
        if replica.saves_parts:  # each process has loaded its own part
            of_shard.pop(LOADED_STATE, None)
        action = action or (lambda: agree(group, described, purpose))
        alike_on_all_shards(replica.inside, purpose, lambda: of_shard, action)

    def resume(self, loaded: LoadedState) -> None:
        """Load fragments and the pending average from a state."""
        changes = self._contributor
        load_fragments(loaded, changes.model)
        self.abandon()  # from a failed attempt to enter
        changes.align_turns(loaded.step)
        changes.end_warmup()
        for number, means in loaded.pending:
            # Version 0.2 could have several pending averages: all but the last are applied now.
            if self.is_open:
                self.finish()
            fragment = changes.fragments[number]
            changes.sent_at = fragment.sent_after
            changes.align_turns(fragment.sent_after)
            flats = fragment.empty()
            for tensor, part in fragment.parts(flats):
                part.copy_(means[tensor.name])
            self.pending = PendingAverage({fragment: flats}, None)
            self._terms = self._terms._replace(step=fragment.sent_after)

    # An averaging.

    @property
    def is_open(self) -> bool:
        return self.pending is not None

    def start(self, *, is_delayed: bool = False) -> None:
        contribution = self._contributor.contribution()
        self._gather_status(contribution.weight, is_finite=contribution.is_finite)
        self._to_read = len(self._gathers)
        # Read statuses first: a process at a different step sends no changes to wait for. A delayed average
        # reads them before it waits for the first round, unless the engine's blocking comparison is due.
        must_read = not is_delayed or not self._contributor.engines[0].buckets.has_agreed
        self._send(contribution, self._read() if must_read else (), is_delayed=is_delayed)

    def _send(
        self, contribution: Contribution, statuses: Sequence[MemberStatus], *, is_delayed: bool = False
    ) -> None:
        total = sum(status.weight for status in statuses)
        scale = contribution.weight * len(statuses) / total if total else 1.0
        self._terms = Terms(self._contributor.steps, self._transport.size, scale, is_delayed)
        self.pending = self._contributor.start(contribution.tensors, self._terms)

    @property
    def is_behind(self) -> bool:
        pending, changes = self.pending, self._contributor
        return pending is not None and not pending.is_done and pending.num_rounds < changes.rounds_due

    def advance(self) -> None:
        assert self.pending is not None
        # Send a status before everything else. Otherwise, if rank 0 is a step late: rank 1 sends round 2,
        # rank 0 leaves the context and sends its status; each waits for the other. So both read two statuses.
        self._gather_status()
        self.pending.send(self._contributor.rounds_due, self._read_due)

    def settle(self) -> None:
        """Wait for the means of the pending averaging, without applying them. Collective."""
        self._gather_status()
        self._read()  # before waiting for anything: members at other steps send other rounds
        self._wait()

    def _wait(self) -> None:
        pending = self.pending
        if pending is None or pending.is_done:
            return
        if pending.is_delayed:
            self._gather_status()
        pending.send(before=self._read_due)
        pending.wait()
        # The number of rounds is known only now; the next averaging spreads them over the delay.
        for fragment in pending.changes:
            fragment.num_rounds = pending.num_rounds

    def finish(self) -> None:
        self._wait()
        # Only now: if anything above raised, the pending average must still be abandoned.
        pending, self.pending = self.pending, None
        self._contributor.commit(pending, self._terms)

    def abandon(self) -> None:
        if self.pending is not None:
            self.pending.abandon()
        self.pending, self._gathers, self._to_read = None, [], 0
        self._contributor.align_turns(self._contributor.steps)

    # Averagings outside the schedule.

    def average_all(self) -> None:
        """Apply the pending average, then average what steps have changed since each fragment was sent.

        Changes made without a step are kept if they are the same on all members. Collective.
        """
        changes = self._contributor
        fragments, step = changes.fragments, changes.steps
        flats = {fragment: fragment.changes() for fragment in fragments}
        is_finite = are_finite(flats, changes.together)
        if self.subgroup is not None:
            self._check_within(self.subgroup.transport, is_finite=is_finite)
        # Changes without counted steps: loaded weights, or those of an optimizer whose steps are not counted.
        sent = () if self.pending is None else self.pending.changes
        quiet = {f: flats[f] for f in fragments if step == f.sent_after and f not in sent}
        self._gather_status(
            changes.weight,
            is_finite=is_finite,
            has_changed=bool(quiet) and self._have_moved(quiet),
            has_loaded=len(quiet) < len(fragments) and changes.model.loads.have_changed(),
        )
        statuses = self._read()
        if any(status.has_changed for status in statuses):
            self._take_over(Fragments(quiet))
        if self.is_open:
            self.finish()
        # Each by itself as usual, the one that has waited longest first: the same order on all processes.
        waiting = sorted((f for f in fragments if step > f.sent_after), key=lambda f: f.sent_after)
        turns = [[fragment] for fragment in waiting]
        if waiting and changes.schedule.is_warm_up(step):
            turns = [waiting]
        try:
            for turn in turns:
                changes.chosen = turn
                # All members are known to be at this step: gathering one status is enough.
                self._send(changes.contribution(), statuses)
                self.finish()
        finally:
            changes.chosen = None

    def _have_moved(self, changes: Mapping[Fragment, Sequence[torch.Tensor]]) -> bool:
        """Return whether any parameter has changed on any shard of the replica."""
        # Not buffers: they change in every forward pass.
        have_moved = any(
            flat.any()
            for fragment, flats in changes.items()
            for specs, flat in zip(fragment.layout, flats, strict=True)
            if not specs[0].is_statistic
        )
        return not self._on_all_shards(not have_moved, "whether all shards are still")

    def _take_over(self, fragments: Fragments) -> None:
        """Make the model's values the last average, or raise on all members if they differ. Collective."""
        purpose = "comparing parameters that have changed without a step"
        rows = gather_numbers([float(fragments.checksum())], self._transport, purpose)
        if not self._on_all_shards(rows == rows[:1] * len(rows), purpose):
            raise StepError(
                "parameters changed since the last averaging without a step of a given optimizer, and not "
                "equally on all ranks; nothing was averaged. Pass all optimizers; load the same state on "
                "all ranks"
            )
        for fragment in fragments:
            fragment.set_last(buffers=False)
        self._contributor.model.loads.forget()
        logger.info(
            "parameters changed without an optimizer step, equally on all processes: they become the last "
            "average"
        )

    def _on_all_shards(self, is_true: bool, purpose: str) -> bool:
        return bool(true_for_all(torch.tensor(is_true), self._contributor.model.replica.inside, purpose))

    def average_within(self) -> None:
        """Average exactly, within the subgroup, fragments that the group does not average now. Collective."""
        changes, engine = self._contributor, self.subgroup
        assert engine is not None
        flats = {fragment: fragment.changes() for fragment in changes.fragments}
        self._check_within(engine.transport, is_finite=are_finite(flats, changes.together))
        # Fragments that the group averages now, without a delay, need no subgroup mean first.
        if changes.is_due() and not changes.schedule.is_delayed(changes.steps):
            for fragment in changes.fragments_after(changes.steps):
                del flats[fragment]
        if flats:
            PendingAverage(flats, engine).wait()
            for fragment, means in flats.items():
                fragment.write_means(means)

    # The statuses of the members.

    def _check_within(self, subgroup: Transport, *, is_finite: bool) -> None:
        """Compare statuses within the subgroup, so that all members raise together. Collective; blocks.

        The subgroup always compares first, so that members at different steps meet there, not in different
        groups. If they disagree, they send their statuses to the group right away; the other members raise
        too when they next compare there.
        """
        status = self._status(is_finite=is_finite)
        with suppress(StepError):
            check_alike(self._gathered(status, subgroup).read())
            return
        check_alike(self._gathered(status, self._transport).read())

    def _gather_status(self, weight: float = 1.0, **status: bool) -> None:
        """Start to gather the statuses of all members, without waiting for them. Collective."""
        self._gathers.append(self._gathered(self._status(weight, **status), self._transport))

    def _gathered(self, status: MemberStatus, transport: Transport) -> StatusGather:
        return StatusGather(status, transport, f"step {status.step}, the consensus check before an averaging")

    def _status(self, weight: float = 1.0, *, is_finite: bool = True, **flags: bool) -> MemberStatus:
        outer = settings_digest(self._contributor.model.outer)
        return MemberStatus(self._contributor.steps, weight, is_finite, outer_settings=outer, **flags)

    def _read(self) -> tuple[MemberStatus, ...]:
        """Wait for all gathered statuses; return the last ones, or raise on all members."""
        statuses: tuple[MemberStatus, ...] = ()
        # In the order of gathering, the same on all ranks, so that all raise at the same one.
        while self._gathers:
            statuses = self._gathers.pop(0).read()
            check_alike(statuses)
        self._to_read = 0
        return statuses

    def _read_due(self) -> None:
        """Read the statuses gathered before the round to wait for: if members differ, it never arrives."""
        due, self._gathers = self._gathers[: self._to_read], self._gathers[self._to_read :]
        for gather in due:
            check_alike(gather.read())
        self._to_read = len(self._gathers)


def check_alike(statuses: Sequence[MemberStatus]) -> None:
    """Raise on all members if they are at different steps or a contribution is not finite."""
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
    usual = Counter(status.outer_settings for status in statuses).most_common(1)[0][0]
    others = [rank for rank, status in enumerate(statuses) if status.outer_settings != usual]
    if others:
        raise StepError(
            f"rank {_listed(others)} has other settings of the outer optimizer than the other ranks; "
            "nothing was averaged. Step a scheduler of local.outer on all ranks alike"
        )


def _listed(values: Sequence[object]) -> str:
    listed = ", ".join(map(str, values[:MAX_LISTED]))
    return listed if len(values) <= MAX_LISTED else f"{listed} and {len(values) - MAX_LISTED} more"
