"""Steps with each priced algorithm, timed or planned: timelines, and predictions from them for a link."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from thinwire.advice.advice_page import Advice
from thinwire.advice.losses import BASELINE, Training, expected_losses
from thinwire.advice.notes import notes_on_size
from thinwire.advice.prediction import NATIVE, Prediction, code_of
from thinwire.advice.priced import priced
from thinwire.probe.measured_link import MeasuredLink, Transfer
from thinwire.wire import Collective, wire_bytes

ROUND_TRIPS_MS = (0, 5, 20, 80)
MIN_SPREAD = 0.2  # a smaller spread hardly shows in measurements

Quartiles = tuple[float, float, float]  # the median comes first
# Returns a collective's time for the bytes that each process contributes.
Network = Callable[[Collective, int], Transfer]


class Sent(NamedTuple):
    """A message."""

    at_seconds: float
    handed_bytes: int
    waited_seconds: float
    collective: Collective = "all_reduce"


class Timeline(NamedTuple):
    """A step: its messages in the order in which they were sent, and its time without a network."""

    sent: tuple[Sent, ...]
    seconds: float

    def wire_bytes(self, members: int) -> int:
        return sum(wire_bytes(message.collective, message.handed_bytes, members) for message in self.sent)

    def step_seconds(self, network: Network) -> float:
        """Return the step's time on a network that carries one message after the other."""
        # A wait for a message that has not arrived delays everything after it, including later messages.
        delay = busy_until = 0.0
        arrivals: list[float] = []
        for seconds, is_wait, index in self._in_order():
            if is_wait:
                delay = max(delay, arrivals[index] - seconds)
            else:
                took = network(self.sent[index].collective, self.sent[index].handed_bytes)
                busy_until = max(busy_until, seconds + delay) + took.busy_seconds
                arrivals.append(busy_until + took.late_seconds)
        return self.seconds + delay

    @property
    def rounds(self) -> int:
        """The longest chain of messages in which each was sent after the wait for the one before."""
        longest, rounds = 0, list[int]()
        for _, is_wait, index in self._in_order():
            if is_wait:
                longest = max(longest, rounds[index])
            else:
                rounds.append(longest + 1)
        return longest

    def _in_order(self) -> list[tuple[float, bool, int]]:
        # At equal times, keep the order of sending.
        sends = [(message.at_seconds, False, index) for index, message in enumerate(self.sent)]
        waits = [(message.waited_seconds, True, index) for index, message in enumerate(self.sent)]
        return sorted(sends + waits)


@dataclass
class TimedSteps:
    """Timings of steps with an algorithm, and the bytes that it keeps between steps."""

    timelines: list[Timeline] = field(default_factory=list)
    memory_bytes: int = 0
    residual_bytes: int = 0

    def step_seconds(self, network: Network, members: int) -> Quartiles:
        """Return the quartiles of a step of all members on a network."""
        # A step's messages are of one kind on all members, and kinds take turns: mix no members of two.
        of_kinds = [
            slowest_of([timeline.step_seconds(network) for timeline in alike], members)
            for alike in self._by_messages()
        ]
        median, low, high = map(fmean, zip(*of_kinds, strict=True))
        return median, low, high

    def wire_bytes(self, members: int) -> float:
        return fmean(alike[-1].wire_bytes(members) for alike in self._by_messages())

    def _by_messages(self) -> list[list[Timeline]]:
        """Return the timelines, those with equal messages together: alternating low rank has two kinds."""
        alike: dict[tuple[int, ...], list[Timeline]] = {}
        for timeline in self.timelines:
            alike.setdefault(tuple(message.handed_bytes for message in timeline.sent), []).append(timeline)
        return list(alike.values())


class PricedSteps:
    """Steps with each priced algorithm, timed or planned, and what they would take on a network."""

    def __init__(
        self,
        training: Training,
        gradient_bytes: int,
        mean_over_processes: Callable[[list[float]], list[float]],
        shards: int | None = None,
    ) -> None:
        self.training, self.gradient_bytes = training, gradient_bytes
        self.mean_over_processes = mean_over_processes  # of all that measure
        self.shards = shards  # processes that together hold a replica
        self.variants, self.losses = priced(), expected_losses(training)
        self.baseline = NATIVE if shards else BASELINE
        self.variants[self.baseline] = self.variants.pop(BASELINE)
        self.losses[self.baseline] = self.losses.pop(BASELINE)
        self.alone = TimedSteps()
        self.timed = {name: TimedSteps() for name in self.variants}

    def advice(
        self, link: MeasuredLink, least_gain: float, budget_loss: float, notes: Iterable[str]
    ) -> Advice:
        """Predict steps on a link, and return advice. Collective."""
        members, round_trips = self.training.members, ROUND_TRIPS_MS if link.counts_round_trips else ()
        inside_seconds = link.inside_seconds(self.gradient_bytes)
        alone = [timeline.seconds for timeline in self.alone.timelines]
        # Without averaging, too, the slowest process sets the pace. The spread is that of single processes.
        numbers = [slowest_of(alone, link.members * link.processes)[0], *slowest_of(alone, 1)[1:]]
        for timed in self.timed.values():
            on_others = [partial(link.transfer, round_trip_seconds=ms / 1e3) for ms in round_trips]
            others = (timed.step_seconds(network, members)[0] for network in on_others)
            seconds = *timed.step_seconds(link.transfer, members), *others
            numbers += [timed.wire_bytes(members), timed.memory_bytes, timed.residual_bytes]
            numbers += [inside_seconds + taken for taken in seconds]
        # In one message. Equal on all processes, so that all choose the same, although shards' bytes differ.
        means = iter(self.mean_over_processes(numbers))
        compute_seconds, low_seconds, high_seconds = next(means), next(means), next(means)
        predictions = []
        for name, timed in self.timed.items():
            prediction = Prediction(
                name,
                code_of(name, "FSDP2" if self.shards else "DDP"),
                # The processes of a replica send over one link.
                sent_bytes=(self.shards or 1) * next(means),
                memory_bytes=round(next(means)),
                residual_bytes=round(next(means)),
                step_seconds=next(means),
                low_seconds=next(means),
                high_seconds=next(means),
                is_lossy=not self.variants[name].keeps_16_bits,
                loss=self.losses[name],
                rounds=timed.timelines[-1].rounds,
                seconds_at={ms: next(means) for ms in round_trips},
            )
            predictions.append(prediction)
        advice = Advice(
            predictions=tuple(sorted(predictions, key=lambda prediction: prediction.step_seconds)),
            baseline=next(prediction for prediction in predictions if prediction.name == self.baseline),
            compute_seconds=compute_seconds,
            least_gain=least_gain,
            budget_loss=budget_loss,
            optimizer=self.training.optimizer,
            shards=self.shards,
            processes=link.processes,
        )
        best, notes = advice.best, [*notes, *notes_on_size(self.training)]
        if best.residual_bytes:
            residual = f"the residual of {best.name}, {best.residual_bytes / 1e6:.3g} MB"
            about = f"about {link.transfer('all_reduce', best.residual_bytes).seconds:.2g} s each time"
            notes.append(f"Saving (state_dict) averages {residual}, over the link: {about}.")
        if high_seconds > (1 + MIN_SPREAD) * low_seconds:
            spread = f"{1e3 * low_seconds:.1f} to {1e3 * high_seconds:.1f} ms"
            surer = "on a quiet machine predictions are surer"
            notes.append(f"Half of the steps without averaging took {spread}: {surer}.")
        return replace(advice, notes=tuple(notes))


def slowest_of(seconds: Sequence[float], processes: int) -> Quartiles:
    """Return median and quartiles of the slowest step out of one per process."""
    # The chance that all of k independent steps are below a time is the k-th power of the chance for one.
    ordered = sorted(seconds)

    def below(share: float) -> float:
        return ordered[math.ceil(len(ordered) * math.pow(share, 1 / processes)) - 1]

    return below(0.5), below(0.25), below(0.75)
