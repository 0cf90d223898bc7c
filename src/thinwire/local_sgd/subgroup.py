"""Exact averagings within subgroups, between those over the group."""

from __future__ import annotations

from collections.abc import Collection

from thinwire.comm import Transport
from thinwire.local_sgd.member_status import StatusGather
from thinwire.local_sgd.membership import Membership, are_alike, check_alike
from thinwire.local_sgd.model_changes import ModelChanges
from thinwire.local_sgd.pending_average import PendingAverage, are_finite
from thinwire.sync import Engine


class SubgroupAverages:
    """Averages a model within a subgroup of fast neighbours."""

    def __init__(
        self, engine: Engine, group: Transport, membership: Membership, changes: ModelChanges
    ) -> None:
        self._engine, self._group = engine, group
        self._membership, self._changes = membership, changes

    def average(self, sent: Collection[int]) -> None:
        """Average all fragments but those that are sent to the group now. Collective."""
        changes = {fragment: fragment.changes() for fragment in self._changes.fragments}
        self.agree(is_finite=are_finite(changes, self._changes.together))
        # Fragments that the group averages at once need no mean of the subgroup before.
        for place in sent:
            del changes[self._changes.fragments[place]]
        if changes:
            PendingAverage(changes, self._engine).wait()
            for fragment, means in changes.items():
                fragment.write(means)

    def agree(self, *, is_finite: bool) -> None:
        """Check consistency inside a subgroup, so that all members raise together. Collective; blocks.

        The subgroup is asked first each time, so that members at different steps meet there, and not in
        different groups. If they disagree, they ask the group at once; the others refuse with them the next
        time that they ask it.
        """
        status = self._membership.status(is_finite=is_finite)
        purpose = f"step {status.step}, the consensus check before an averaging"
        if not are_alike(StatusGather(status, self._engine.transport, purpose).read()):
            check_alike(StatusGather(status, self._group, purpose).read())
