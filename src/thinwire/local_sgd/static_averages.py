"""Averagings of members that stay, besides those of the schedule: all on request, and within subgroups."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from thinwire.comm import gather_numbers, true_for_all
from thinwire.errors import StepError
from thinwire.local_sgd.engines import Engines
from thinwire.local_sgd.fragment import Fragment, Fragments
from thinwire.local_sgd.member_status import StatusGather
from thinwire.local_sgd.membership import Membership, are_alike, check_alike
from thinwire.local_sgd.model_changes import ModelChanges
from thinwire.local_sgd.pending_average import PendingAverage, are_finite, have_moved

logger = logging.getLogger(__name__)


class StaticAverages:
    """Averages all of a model over the group now, or within the subgroup what the group does not average."""

    def __init__(self, engines: Engines, membership: Membership, changes: ModelChanges) -> None:
        self._engines, self._membership, self._changes = engines, membership, changes
        self.has_subgroup = changes.schedule.has_inner_averagings

    def average_all(self) -> None:
        """Apply what is under way, then average what steps have changed since each fragment was sent.

        What has changed without a step is taken over if it is the same on all members. Collective.
        """
        membership, changes = self._membership, self._changes
        fragments, step = changes.fragments, changes.steps
        flats = {fragment: fragment.changes() for fragment in fragments}
        is_finite = are_finite(flats, changes.together)
        if self.has_subgroup:
            self._agree_within(is_finite=is_finite)
        # Weights that were loaded, or are those of an optimizer that nobody counts.
        under_way = () if membership.pending is None else membership.pending.changes
        quiet = {f: flats[f] for f in fragments if step == f.sent_after and f not in under_way}
        membership.gather_status(
            changes.own_weight,
            is_finite=is_finite,
            has_changed=bool(quiet) and have_moved(quiet, changes.together),
            has_loaded=len(quiet) < len(fragments) and changes.model.loads.have_changed(),
        )
        statuses = membership.read()
        if any(status.has_changed for status in statuses):
            self._take_over(list(quiet))
        if membership.is_open:
            membership.finish()
        pending = [fragment for fragment in fragments if step > fragment.sent_after]
        # Each by itself as ever, those first that have waited longest: the same order everywhere.
        turns = [[fragment] for fragment in sorted(pending, key=lambda fragment: fragment.sent_after)]
        if changes.schedule.is_warm_up(step):
            turns = [pending] if pending else []
        try:
            for changes.chosen in turns:  # all are known to be at this step: one question is enough
                membership.average(statuses)
        finally:
            changes.chosen = None

    def _take_over(self, fragments: Sequence[Fragment]) -> None:
        """Take what the model holds for the last average, or refuse it on all members alike. Collective."""
        purpose = "comparing parameters that have changed without a step"
        together = self._changes.together
        checksum = float(Fragments(fragments).checksum())
        rows = gather_numbers([checksum], self._engines.main.transport, purpose)
        are_alike = torch.tensor(len({row[0] for row in rows}) == 1)
        if together is not None:
            are_alike = true_for_all(are_alike, together, purpose)
        if not are_alike:
            raise StepError(
                "parameters have changed since the last averaging without a step of an optimizer passed, and "
                "not on all ranks alike; nothing was averaged. Pass all optimizers; load alike on all ranks"
            )
        for fragment in fragments:
            fragment.set_last_parameters()
        self._changes.model.loads.forget()
        logger.info("parameters that have changed without a step, on all processes alike, are taken over")

    def average_within(self) -> None:
        """Average within the subgroup, exactly, what the group does not average now. Collective."""
        changes, engine = self._changes, self._engines.subgroup
        assert engine is not None
        averaged = {fragment: fragment.changes() for fragment in changes.fragments}
        self._agree_within(is_finite=are_finite(averaged, changes.together))
        # Fragments that the group averages at once need no mean of the subgroup before.
        if changes.is_due() and not changes.schedule.is_delayed(changes.steps):
            for fragment in changes.fragments_after(changes.steps):
                del averaged[fragment]
        if averaged:
            PendingAverage(averaged, engine).wait()
            for fragment, means in averaged.items():
                fragment.write_means(means)

    def _agree_within(self, *, is_finite: bool) -> None:
        """Check consistency inside a subgroup, so that all members raise together. Collective; blocks.

        The subgroup is asked first each time, so that members at different steps meet there, and not in
        different groups. If they disagree, they ask the group at once; the others refuse with them the next
        time that they ask it.
        """
        engines, status = self._engines, self._membership.status(is_finite=is_finite)
        assert engines.subgroup is not None
        purpose = f"step {status.step}, the consensus check before an averaging"
        if not are_alike(StatusGather(status, engines.subgroup.transport, purpose).read()):
            check_alike(StatusGather(status, engines.main.transport, purpose).read())
