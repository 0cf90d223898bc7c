"""What is averaged now, what is in flight, and what is due: the mechanism behind `LocalSGD`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from thinwire.localsgd.consensus import Answer, Consensus, do_agree
from thinwire.localsgd.flight import Changes, Flight, are_finite, have_moved
from thinwire.localsgd.fragment import Fragments
from thinwire.localsgd.outer import settings_digest
from thinwire.localsgd.schedule import Members, Schedule
from thinwire.sync import Engine

logger = logging.getLogger(__name__)


class Averagings:
    """The averagings of a model's fragments, at points that the schedule fixes.

    What is collective raises on all processes alike: `StepError` where they are at different steps or one has
    parameters that are not finite, `CommunicationError` where a collective failed.

    Attributes:
        fragments: Of the model; none before entry.
        outer: Steps them; None for the mean itself.
        flights: In the order of their start.
        step: Attempted steps.
        own_pending_steps: This process's own since the last averaging.
        divides_by_contributors: Whether to divide by those alone that had input since then.
    """

    def __init__(self, schedule: Schedule, engine: Engine, exact: Mapping[Members, Engine]) -> None:
        self.fragments = Fragments()
        self.outer: torch.optim.Optimizer | None = None
        self.flights: list[Flight] = []
        self.step = self.own_pending_steps = 0
        self.divides_by_contributors = False
        self._schedule, self._engine, self._exact = schedule, engine, exact
        # The processes of a machine have the same changes, so they need not ask each other.
        self._together = engine.settings.together if engine.places is None else None
        # And not read yet, in the order in which they were asked.
        self._asked: list[Consensus] = []

    def go_on(self) -> None:
        """Average within the subgroup, advance what is in flight, and start what is due. Collective."""
        schedule, step = self._schedule, self.step
        sent = [self.fragments[number] for number in schedule.fragments_after(step)]
        is_delayed = schedule.delay_steps > 0 and not schedule.is_warm_up(step)
        if schedule.meets_in_subgroups:
            changes: Changes = {each: each.changes() for each in self.fragments}
            self._agree_within(changes)
            # What the group averages at once needs no mean of the subgroup before.
            within = {each: flats for each, flats in changes.items() if is_delayed or each not in sent}
            if within:
                Flight(within, self._exact["subgroup"]).land()
                for fragment, means in within.items():
                    fragment.write(means)
        # A fragment that is still in flight lands before its next change is taken.
        for flight in tuple(self.flights):
            self._advance(flight, is_sent_again=any(each in sent for each in flight.changes))
        if not sent:
            return
        changes = {each: each.changes() for each in sent}
        asked = self._ask(changes)
        if not is_delayed:
            # The answers first: who is at another step sends no changes, and would be waited for in vain.
            self._average_now(changes, self._read(asked))
            return
        # The engine's comparison blocks anyway, and all must be known to come to it: so the answers are read.
        if not self._engine.has_agreed:
            self._read(asked)
        self.flights.append(Flight(changes, self._engine, asked))
        for fragment in sent:
            fragment.sent_after = step

    def average_all(self) -> None:
        """Apply what is in flight, then average what has changed since each fragment was sent. Collective."""
        changes = {each: each.changes() for each in self.fragments}
        if self._schedule.meets_in_subgroups:
            self._agree_within(changes)
        # An optimizer that steps after the one whose steps count, or in its place, leaves models that differ.
        in_flight = {each for flight in self.flights for each in flight.changes}
        quiet = [each for each in self.fragments if self.step == each.sent_after and each not in in_flight]
        has_changed = bool(quiet) and have_moved({each: changes[each] for each in quiet}, self._together)
        if has_changed:
            logger.warning(
                "parameters have changed since the last averaging without a step of the optimizer that was "
                "given; they are averaged now, and were not in between. If another optimizer trains them, or "
                "it was made anew, pass the one that steps last"
            )
        asked = self._ask(changes, has_changed=has_changed)
        answers = self._read(asked)
        anyone_has_changed = any(answer.has_changed for answer in answers)
        # A copy of the list, for what lands leaves it.
        for flight in tuple(self.flights):
            (fragment,) = flight.changes
            self._land(flight, asked)
            changes[fragment] = fragment.changes()
        pending = [each for each in self.fragments if anyone_has_changed or self.step > each.sent_after]
        if self._schedule.is_warm_up(self.step):
            turns = [pending] if pending else []
        else:
            # Each by itself as ever, those first that have waited longest: the same order everywhere.
            turns = [[each] for each in sorted(pending, key=lambda fragment: fragment.sent_after)]
        # All are known to be at this step: one question is enough for all turns.
        for fragments in turns:
            self._average_now({each: changes[each] for each in fragments}, answers)

    def finish_all(self) -> None:
        """Wait for all that is in flight; it is applied when it is due. Collective."""
        # Read before anything is waited for: members that are at other steps send other rounds.
        asked = self._ask({})
        self._read(asked)
        for flight in self.flights:
            flight.finish(self._read, asked)

    def abandon(self) -> None:
        """Forget what is in flight: it is sent again when its turn comes."""
        for flight in self.flights:
            flight.abandon()
            # What it has changed is still to be sent, so the next averaging must not pass over it.
            for fragment in flight.changes:
                fragment.sent_after = min(fragment.sent_after, self.step - 1)
        self.flights, self._asked = [], []

    def _average_now(self, changes: Changes, answers: Sequence[Answer]) -> None:
        """Average over the group, all members having agreed."""
        num_contributors = sum(answer.contributes for answer in answers)
        # What goes in is scaled, not what comes out: the residual keeps one unit.
        if self.divides_by_contributors and num_contributors:
            for flat in chain(*changes.values()):
                flat.mul_(len(answers) / num_contributors)
        # In the warm-up nothing is compressed, so that its end is that of plain data-parallel training.
        is_exact = self._schedule.is_warm_up(self.step)
        engine = self._exact["group"] if is_exact else self._engine
        # As one, from the first message to the last mean: nothing of it overlaps the user's steps.
        with engine.clock.inside(engine.traffic):
            Flight(changes, engine).land()
        # Only when all have come: where one fails, no fragment has moved.
        for fragment, means in changes.items():
            fragment.move(means, None if is_exact else self.outer)
            fragment.sent_after = self.step
        self.own_pending_steps = 0

    # What is in flight.

    def _advance(self, flight: Flight, *, is_sent_again: bool) -> None:
        """Send what is due of a flight by now, or land it. Collective, at points that the schedule fixes.

        Whatever may be sent, a question goes before it. So a process that has left the common course, and
        asks before it averages what is left, meets a question of the others, and all learn of it.
        """
        # What is delayed is sent one fragment at a time.
        (fragment,) = flight.changes
        age = self.step - fragment.sent_after
        # A fragment is sent again before it has landed only after resuming with other settings.
        if age >= self._schedule.delay_steps or is_sent_again:
            self._land(flight, None if flight.has_landed else self._ask({}))
            return
        num_rounds = self._schedule.rounds_sent(age, fragment.num_rounds)
        if flight.num_rounds < num_rounds and not flight.has_landed:
            flight.send(num_rounds, self._read, self._ask({}))

    def _land(self, flight: Flight, asked: Consensus | None) -> None:
        """Wait until a flight's changes are their means, and move its fragment by them."""
        flight.finish(self._read, asked)
        # Only then: what has raised above is still to be abandoned.
        self.flights.remove(flight)
        local_weight = self._schedule.local_weight(self._engine.algorithm)
        for fragment, means in flight.changes.items():
            # Without a step since it was sent there is nothing of one's own to keep.
            fragment.move(means, self.outer, local_weight if self.step > fragment.sent_after else 0.0)

    # What members ask each other.

    def _agree_within(self, changes: Changes) -> None:
        """Check consistency before averaging, so that all members raise together. Collective; blocks.

        The subgroup is asked first each time, so that members at different steps meet there, and not in
        different groups. If they disagree, they ask the group at once, where the others, the next time that
        they ask it, refuse with them.
        """
        own = self._answer(changes)
        if not do_agree(Consensus(own, self._exact["subgroup"].transport).answers()):
            Consensus(own, self._engine.transport).checked()

    def _ask(self, changes: Changes, *, has_changed: bool = False) -> Consensus:
        """Ask all members of the group at which step they are; do not wait for the answers. Collective."""
        asked = Consensus(self._answer(changes, has_changed=has_changed), self._engine.transport)
        self._asked.append(asked)
        return asked

    def _answer(self, changes: Changes, *, has_changed: bool = False) -> Answer:
        # Of all shards of this replica: so the answers, and what follows from them, are those of every shard.
        is_finite = not changes or are_finite(changes, self._together)
        contributes = self.own_pending_steps > 0
        return Answer(self.step, is_finite, contributes, has_changed, settings_digest(self.outer))

    def _read(self, until: Consensus | None) -> list[Answer]:
        """Wait for the answers to what was asked until then; return the last ones, or refuse on all alike."""
        answers: list[Answer] = []
        while until in self._asked:
            # In the order of asking, the same everywhere: so all refuse at the same question.
            answers = self._asked.pop(0).checked()
        return answers
