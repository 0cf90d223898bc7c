"""Averagings in flight: changes are sent round by round until they are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TypeAlias

import torch

from thinwire.algorithms import all_finite
from thinwire.channel import Transport, true_for_all
from thinwire.errors import StepError
from thinwire.fronts.local_sgd.consensus import Consensus
from thinwire.fronts.local_sgd.fragment import Fragment
from thinwire.sync import Engine
from thinwire.sync.step import Step

Changes: TypeAlias = Mapping[Fragment, list[torch.Tensor]]
"""By fragment, flat, a tensor for each of its buckets: see `Fragment.changes`."""


class Flight:
    """Changes of some fragments under way; they become their means, in place. Collective: the first is sent.

    Args:
        changes: By fragment, as from `Fragment.changes`; the flight's from now on.
        engine: What averages them; None if they are means already, as in a loaded state.
        consensus: What was asked before they are sent; None if that was read already.

    Attributes:
        changes: As given.
        consensus: What was asked before the latest round was sent: to be read before that is waited for.
        num_rounds: Rounds that were sent so far.

    Raises:
        AgreementError: The processes have other algorithms, parameters or loaded states.
        CommunicationError: A collective failed.
    """

    def __init__(self, changes: Changes, engine: Engine | None, consensus: Consensus | None = None) -> None:
        self.changes, self.consensus = changes, consensus
        self.num_rounds = 1
        self._engine = engine
        self._step: Step | None = None
        if engine is None:
            return
        buckets = [
            bucket
            for fragment, flats in changes.items()
            for bucket in zip(fragment.layout, flats, strict=True)
        ]
        # Once for all buckets: they follow from the model, which is compared here, and are opened as agreed.
        engine.agree(buckets[0][1].device)
        # Pipelined, starting a bucket may wait for others; what is delayed must not wait for anything here.
        self._step = engine.start(buckets, pipelined=consensus is None, is_agreed=True)

    @property
    def has_landed(self) -> bool:
        """Whether the changes are their means."""
        return self._step is None

    def advance(self) -> bool:
        """Wait for the round under way and send the next one; return whether there was one to send.

        Raises:
            CommunicationError: A collective failed. Memory is as it was.
        """
        assert self._step is not None, "advanced after it has landed"
        is_under_way = self._step.advance()
        self.num_rounds += is_under_way
        return is_under_way

    def land(self) -> None:
        """Wait until all changes are their means, and let memory be written.

        Raises:
            StepError: A mean is not finite. Memory is as it was.
            CommunicationError: A collective failed. Memory is as it was.
        """
        assert self._engine is not None
        assert self._step is not None, "landed before"
        with self._engine.clock.inside(self._engine.traffic):
            committed = self._step.finish()
        # An algorithm without memory commits whatever has come: nobody has looked at its means.
        if not committed or not are_finite(self.changes, self._engine.settings.together):
            raise StepError(
                "the mean change of the parameters is not finite though that of each process is: it has left "
                "the range of the type it travels in. Nothing was averaged; average more often, or otherwise"
            )
        # Last: what has raised above is still to be abandoned.
        self._step = None

    def abandon(self) -> None:
        """Forget it. Memory is as it was before."""
        if self._step is not None:
            self._step.abandon()


def are_finite(changes: Changes, together: Transport | None) -> bool:
    """Return whether changes are finite, on all shards of a replica.

    Args:
        changes: Of at least one fragment.
        together: Joins the shards; None where there is one.

    Cost: one host synchronisation, however many types and devices there are.
    """
    # `isfinite()` of whole tensors would take several times as long on a CPU as a copy of them.
    are = all_finite(*chain(*changes.values()))
    return bool(are if together is None else true_for_all(are, together, "whether all shards are finite"))


def have_moved(changes: Changes, together: Transport | None) -> bool:
    """Return whether any parameter has changed, on some shard of a replica; buffers do in every forward pass.

    Args:
        changes: Of at least one fragment.
        together: As of `are_finite`.

    Cost: one host synchronisation.
    """
    moved = [
        flat.any()
        for fragment, of_one in changes.items()
        for specs, flat in zip(fragment.layout, of_one, strict=True)
        if not specs[0].is_statistic
    ]
    # One shard may hold nothing but statistics; it is asked as well.
    still = ~torch.stack([each.to(moved[0].device) for each in moved]).any() if moved else torch.tensor(True)
    return not (still if together is None else true_for_all(still, together, "whether all shards are still"))
