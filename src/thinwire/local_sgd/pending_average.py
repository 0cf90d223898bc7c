"""A pending average: changes that are sent round by round until they have become means."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Generic, TypeVar

import torch

from thinwire.algorithms import all_finite
from thinwire.comm import Transport, true_for_all
from thinwire.errors import StepError
from thinwire.local_sgd.fragment import Buckets
from thinwire.sync import Engine
from thinwire.sync.step import Step

Part = TypeVar("Part", bound=Buckets)


class PendingAverage(Generic[Part]):
    """Changes of some fragments, one flat tensor for each bucket; they become means, in place.

    Collective: the constructor sends the first messages. Without an engine the changes are already means,
    from a saved state.
    """

    def __init__(
        self,
        changes: Mapping[Part, list[torch.Tensor]],
        engine: Engine | None,
        *,
        is_delayed: bool = False,
        subject: str = "change of the parameters",
    ) -> None:
        self.changes, self.is_delayed, self._subject = changes, is_delayed, subject
        self.num_rounds = 1  # sent so far
        self._engine = engine
        self._step: Step | None = None
        if engine is None:
            return
        pairs = (zip(fragment.layout, flats, strict=True) for fragment, flats in changes.items())
        buckets = list(chain(*pairs))
        # Once for all buckets: they depend only on the model, which this compares.
        engine.buckets.agree(buckets[0][1].device)
        # If pipelined, starting a bucket may wait for others; a delayed average must not wait for anything.
        self._step = engine.start(buckets, pipelined=not is_delayed)

    @property
    def is_done(self) -> bool:
        """Whether the changes have become means."""
        return self._step is None

    def advance(self) -> bool:
        """Wait for the round in flight, and send the next one; False if it was the last."""
        assert self._step is not None
        is_in_flight = self._step.advance()
        self.num_rounds += is_in_flight
        return is_in_flight

    def receive(self) -> None:
        """Wait for all rounds. Memory is not written yet, so the averaging may still be abandoned."""
        while self.advance():
            pass

    def wait(self) -> None:
        """Wait until all changes have become means, and write memory."""
        assert self._engine is not None
        assert self._step is not None
        with self._engine.clock.inside():
            committed = self._step.finish()
        # An algorithm without memory commits unchecked means, so check them now.
        if not committed or not are_finite(self.changes, self._engine.settings.health_group):
            # Memory was written before the means were converted to the model's dtype.
            residual_moved = committed and self._engine.state.memory_bytes() > 0
            became = "No model has changed, but the residual has: load a checkpoint"
            raise StepError(
                f"the averaged {self._subject} overflowed the dtype it is sent in, on all processes. "
                f"{became if residual_moved else 'Nothing was averaged'}; average more often, or choose a "
                "wider dtype"
            )
        # Last: if anything above raised, the step must still be abandoned.
        self._step = None

    def abandon(self) -> None:
        """Drop it. Memory is as it was before."""
        if self._step is not None:
            self._step.abandon()


def are_finite(changes: Mapping[Part, list[torch.Tensor]], shards: Transport | None = None) -> bool:
    """Return whether changes are finite, on all shards of a replica. Cost: one host synchronisation."""
    # `isfinite()` on whole tensors would take several times as long on a CPU as copying them.
    are = all_finite(*chain(*changes.values()))
    return bool(are if shards is None else true_for_all(are, shards, "whether all shards are finite"))
