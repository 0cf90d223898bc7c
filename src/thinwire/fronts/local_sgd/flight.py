"""What is in flight: changes of fragments on their way to becoming their means."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from thinwire.errors import StepError
from thinwire.fronts.local_sgd.consensus import Consensus
from thinwire.fronts.local_sgd.fragment import Fragment, are_finite
from thinwire.sync import Engine
from thinwire.sync.step import Step

__all__ = ["Flight"]


class Flight:
    """Changes of some fragments under way; they become their means, in place.

    Args:
        changes: By fragment, as from `Fragment.changes`; the flight's from now on.
        engine: What averages them.
        consensus: What was asked before they are sent; None if that was read already.

    Attributes:
        changes: As given.
        consensus: What was asked before the latest round was sent: to be read before that is waited for.
        num_rounds: Rounds that were sent so far.
        has_landed: Whether the changes are their means.
    """

    def __init__(
        self,
        changes: Mapping[Fragment, list[torch.Tensor]],
        engine: Engine,
        consensus: Consensus | None = None,
    ) -> None:
        self.changes, self.consensus = changes, consensus
        self.num_rounds, self.has_landed = 0, False
        self._engine = engine
        self._step: Step | None = None

    def start(self) -> None:
        """Send the first round. Collective, as are the others.

        Raises:
            AgreementError: The processes have other algorithms, parameters or loaded states.
            CommunicationError: A collective failed.
        """
        engine = self._engine
        engine.agree()
        # What is delayed must not wait for anything here.
        self._step = engine.begin(pipelined=self.consensus is None)
        try:
            with engine.clock.inside(engine.traffic):
                for fragment, flats in self.changes.items():
                    for specs, flat in zip(fragment.layout, flats, strict=True):
                        self._step.start(engine.open(specs, flat.device, is_agreed=True), flat)
        except BaseException:
            self.abandon()
            raise
        self.num_rounds = 1

    def advance(self) -> bool:
        """Wait for the round under way and send the next one; return whether there was one to send.

        Raises:
            CommunicationError: A collective failed. Memory is as it was.
        """
        assert self._step is not None, "advanced before start"
        is_under_way = self._step.advance()
        self.num_rounds += is_under_way
        return is_under_way

    def land(self) -> None:
        """Wait until all changes are their means, and let memory be written.

        Raises:
            StepError: A mean is not finite. Memory is as it was.
            CommunicationError: A collective failed. Memory is as it was.
        """
        with self._engine.clock.inside(self._engine.traffic):
            while self.advance():
                pass
            assert self._step is not None
            committed = self._step.finish()
        if not committed or not are_finite([flat for flats in self.changes.values() for flat in flats]):
            raise StepError(
                "the mean change of the parameters is not finite though that of each process is: it has left "
                "the range of the type it travels in. Nothing was averaged; average more often, or otherwise"
            )
        self.has_landed = True

    def abandon(self) -> None:
        """Forget it. Memory is as it was before."""
        if self._step is not None:
            self._step.abandon()
