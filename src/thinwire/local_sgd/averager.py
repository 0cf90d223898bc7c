"""One averaging: ask all processes, exchange the changes, move the replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from thinwire.algorithms import Algorithm, AllReduce
from thinwire.arithmetic import exact_arithmetic
from thinwire.channel import ProcessGroupChannel
from thinwire.engine import Engine
from thinwire.errors import NonfiniteError, StepError
from thinwire.local_sgd.replica import Replica
from thinwire.local_sgd.roll_call import Answer, check_agreement, do_agree, roll_call
from thinwire.nonfinite import OnNonfinite
from thinwire.plan import ParameterSpec

__all__ = ["EXACT", "Averager"]

EXACT = AllReduce()


class Averager:
    """Averages a replica over a group and within a subgroup.

    Args:
        group: The group.
        subgroup: This process's subgroup of it, None if there is none.
        algorithm: How changes become their mean over the group.
        specs: What is averaged.
        device: Where that is.
        on_nonfinite: What becomes of gradients that are averaged exactly and are not finite.
        asks_subgroup: Whether there are averagings within the subgroup. Then it is asked before every
            averaging, so that members that disagree meet there and not in different groups.

    Attributes:
        channel: That of the group.
        engine: Averages changes over the group, with `algorithm`.
        exact: Averages changes or gradients over the group exactly, through the same channel.
        inner: Averages within the subgroup exactly.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        subgroup: dist.ProcessGroup | None,
        algorithm: Algorithm,
        specs: Iterable[ParameterSpec],
        device: torch.device,
        *,
        on_nonfinite: OnNonfinite,
        asks_subgroup: bool,
    ) -> None:
        specs = list(specs)
        self.channel = ProcessGroupChannel(group, device)
        self.engine = Engine(algorithm, self.channel, specs)
        self.exact = Engine(EXACT, self.channel, specs, on_nonfinite=on_nonfinite)
        self.exact.clock = self.engine.clock  # as they share the channel and its counts
        inner_channel = None if subgroup is None else ProcessGroupChannel(subgroup, device)
        self.inner = (
            None if inner_channel is None else Engine(EXACT, inner_channel, specs, on_nonfinite=on_nonfinite)
        )
        self._asked_channel = inner_channel if asks_subgroup else None

    def over_group(
        self,
        replica: Replica,
        step: int,
        *,
        exactly: bool,
        outer: torch.optim.Optimizer | None,
        nothing_new: bool,
        contributes: bool,
        divides_by_contributors: bool,
    ) -> None:
        """Average over the group. Collective.

        Args:
            replica: Moved to the new average.
            step: Steps this process has attempted.
            exactly: Whether to average as in the warm-up, without `algorithm` and `outer`.
            outer: The outer optimizer.
            nothing_new: Whether there was no step since the last averaging; then this only asks.
            contributes: Whether this process has had input since the last averaging.
            divides_by_contributors: Whether to divide the sum of changes by the processes that had, instead
                of by all.

        Raises:
            StepError: Processes disagree; nothing was averaged.
            CommunicationError: A collective failed.
        """
        with exact_arithmetic(replica.device):
            changes = replica.changes()
            own = Answer(step, _are_finite(changes), contributes)
            answers = self._ask(own, replica.device, everywhere=True)
            if nothing_new:
                return
            if divides_by_contributors:
                _divide_by_contributors(changes, answers)
            means = _means(self.exact if exactly else self.engine, replica, changes)
            if outer is None or exactly:
                replica.move(means)
            else:
                replica.move_by(outer, means)

    def in_subgroup(self, replica: Replica, step: int) -> None:
        """Average within the subgroup; the last average over the group stays what it was. Collective there.

        Raises:
            StepError: Processes disagree, in the subgroup or anywhere; told on all processes of the group.
            CommunicationError: A collective failed.
        """
        with exact_arithmetic(replica.device):
            changes = replica.changes()
            self._ask(Answer(step, _are_finite(changes), True), replica.device, everywhere=False)
            if self.inner is not None:
                replica.write(_means(self.inner, replica, changes))

    def _ask(self, own: Answer, device: torch.device, *, everywhere: bool) -> list[Answer]:
        """Those who disagree in a subgroup ask everywhere at once, where the others refuse with them."""
        answers = []
        if self._asked_channel is not None:
            answers = roll_call(self._asked_channel, own, device)
            everywhere = everywhere or not do_agree(answers)
        if everywhere:
            answers = roll_call(self.channel, own, device)
            check_agreement(answers)
        return answers


def _divide_by_contributors(changes: Sequence[torch.Tensor], answers: Sequence[Answer]) -> None:
    """Scale what goes in, so that the mean over the group is the sum over the number of contributors."""
    num_contributors = sum(answer.contributes for answer in answers)
    for change in changes if num_contributors else ():
        change.mul_(len(answers) / num_contributors)


def _means(engine: Engine, replica: Replica, changes: list[torch.Tensor]) -> list[torch.Tensor]:
    """The mean changes, in place of the changes.

    Raises:
        StepError: A mean is not finite. The memory is as it was.
        CommunicationError: A collective failed. The memory is as it was.
    """
    try:
        for specs, change in zip(replica.layout, changes, strict=True):
            engine.start(specs, change)
        committed = engine.finish()
    except NonfiniteError:
        committed = False
    except BaseException:
        engine.abandon()
        raise
    if not committed or not _are_finite(changes):
        raise StepError(
            "the mean change of the parameters is not finite though that of each process is: it has left the "
            "range of the type it travels in. Nothing was averaged; average more often, or otherwise"
        )
    return changes


def _are_finite(flats: Sequence[torch.Tensor]) -> bool:
    """Whether every element is finite; one host synchronisation."""
    device = flats[0].device
    return bool(torch.stack([flat.isfinite().all().to(device) for flat in flats]).all())
