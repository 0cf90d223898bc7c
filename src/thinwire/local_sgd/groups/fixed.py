"""Members that stay: the processes of a group, or its subgroups."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import torch

from thinwire.adapters.common import averaging_model
from thinwire.algorithms import Algorithm
from thinwire.comm import (
    ProcessGroupTransport,
    Transport,
    gather_numbers,
    machines_of_subgroups,
    true_for_all,
)
from thinwire.errors import StepError
from thinwire.local_sgd.fragment import Fragment, Fragments, layouts_of
from thinwire.local_sgd.loads import LOADED
from thinwire.local_sgd.loop import driven_gradients
from thinwire.local_sgd.model import AveragedModel
from thinwire.local_sgd.outer import settings_digest
from thinwire.local_sgd.pending_average import Changes, PendingAverage, are_finite, have_moved
from thinwire.local_sgd.schedule import EXACT, Level, Schedule
from thinwire.sync import Engine, Settings

logger = logging.getLogger(__name__)

MAX_LISTED = 8


class Answer(NamedTuple):
    """The state of a process, as it tells the others."""

    step: int
    is_finite: bool  # what it has to average
    contributes: bool  # it had input since the last averaging
    has_changed: bool  # its parameters have changed since then, without a step that counts
    has_loaded: bool  # its parameters, inside the context, with steps behind the last averaging
    outer: int  # digest of the outer optimizer's settings, which a schedule changes; below 2**32

    @classmethod
    def of(cls, step: int, flags: int, outer: int) -> Answer:
        """Return the answer that three numbers encode."""
        is_finite, contributes, has_changed, has_loaded = (bool(flags & bit) for bit in (1, 2, 4, 8))
        return cls(step, is_finite, contributes, has_changed, has_loaded, outer)


class Consensus:
    """The answers of all members of a group, under way until they are read. Collective.

    Cost: a message of 24 bytes from each process and, when they are read, a host synchronisation.
    """

    def __init__(self, own: Answer, transport: Transport) -> None:
        # In one type, which holds any count of steps exactly. Kept: a backend may read it meanwhile.
        flags = own.is_finite + 2 * own.contributes + 4 * own.has_changed + 8 * own.has_loaded
        numbers = [own.step, flags, own.outer]
        self._own = torch.tensor(numbers, dtype=torch.float64, device=transport.control_device)
        self._rows = self._own.new_empty(transport.size, len(numbers))
        purpose = f"step {own.step}, the consensus check before an averaging"
        self._work = transport.all_gather(self._rows, self._own, purpose)

    def answers(self) -> list[Answer]:
        """Return the answers, by rank. Blocks until all have come."""
        self._work.wait()
        rows = [[int(number) for number in row] for row in self._rows.tolist()]
        return [Answer.of(*row) for row in rows]

    def checked(self) -> list[Answer]:
        """Return the answers, by rank, or refuse on all members alike. Blocks until all have come."""
        answers = self.answers()
        broken = [place for place, answer in enumerate(answers) if not answer.is_finite]
        if broken:
            raise StepError(
                f"the parameters or buffers of process {_listed(broken)} are not finite (inf or NaN); "
                "nothing was averaged, and every process has kept its own. Find what diverged there "
                "(learning rate, loss, overflow in fp16 without a GradScaler) and restart all processes from "
                "a checkpoint; the last average is in state_dict()['last_average']. Buffers that may be "
                "infinite: average_buffers=False"
            )
        if len({answer.step for answer in answers}) > 1:
            steps = _listed([f"{place}: {answer.step}" for place, answer in enumerate(answers)])
            raise StepError(
                f"processes are at different steps ({steps}), so their parameters can't be averaged. If a "
                "GradScaler skips steps, pass it: LocalSGD(…, grad_scaler=scaler). If processes have uneven "
                "batches (different numbers of them), train inside thinwire.join as well: with local, "
                "thinwire.join(local): … Call average() on all processes or on none"
            )
        if any(answer.has_loaded for answer in answers):
            raise StepError(LOADED)
        if not do_agree(answers):
            usual = Counter(answer.outer for answer in answers).most_common(1)[0][0]
            others = [place for place, answer in enumerate(answers) if answer.outer != usual]
            raise StepError(
                f"the outer optimizer's settings on process {_listed(others)} differ from the other "
                "processes', so models would differ; nothing was averaged. Step a schedule of local.outer on "
                "all processes alike, not by what differs between them, such as their own losses"
            )
        return answers


def do_agree(answers: Sequence[Answer]) -> bool:
    """Return whether all are at one step, finite, and average alike."""
    courses = {(answer.step, answer.outer) for answer in answers}
    return len(courses) == 1 and all(answer.is_finite for answer in answers)


def _listed(values: Sequence[object]) -> str:
    listed = ", ".join(map(str, values[:MAX_LISTED]))
    return listed if len(values) <= MAX_LISTED else f"{listed} and {len(values) - MAX_LISTED} more"


class Fixed:
    """The members of a group that does not change: processes, subgroups of them, or FSDP2 replicas.

    What is collective raises on all processes alike: `StepError` if they are at different steps or one has
    parameters that are not finite, `CommunicationError` if a collective failed.
    """

    def __init__(
        self,
        model: AveragedModel,
        schedule: Schedule,
        algorithm: Algorithm,
        group: Transport,
        within: Transport | None = None,
    ) -> None:
        self.pending_averages: list[PendingAverage[Fragment]] = []  # in the order of their start
        self.step = 0  # attempted steps
        self.own_pending_steps = 0  # of this process since the last averaging
        self.divides_by_contributors = False  # those alone that had input since then
        # Members that train on their own.
        self.num_members = group.size // (1 if within is None else within.size)
        self._model, self._schedule = model, schedule
        averaged, shards = model.tensors(), model.replica.shards
        specs = [tensor.spec for tensor in averaged]
        parts = layouts_of(averaged, schedule.streaming.fragments)
        # The processes of a subgroup have the same changes, so each sends a part of them.
        machines = None
        if isinstance(group, ProcessGroupTransport) and isinstance(within, ProcessGroupTransport):
            machines, _ = machines_of_subgroups(group, within)
        # With default settings: `on_nonfinite` is about gradients; changes that are not finite raise anyway.
        settings = Settings(health_group=shards)
        self.engine = Engine(algorithm, group, specs, settings, parts=parts, machines=machines)
        # All that averages over the group counts together; a subgroup has a faster network.
        traffic, clock = self.engine.traffic, self.engine.clock
        counts: dict[str, Any] = {"traffic": traffic, "clock": clock, "machines": machines}
        settings = Settings(on_nonfinite=schedule.warmup.on_nonfinite, health_group=shards)
        self._exact = self.warmup = Engine(EXACT, group, specs, settings, **counts)
        # A separate engine: it remembers gradients, not the parameters averaged when the warm-up ends.
        if schedule.warmup.algorithm is not None:
            self.warmup = Engine(schedule.warmup.algorithm, group, specs, settings, **counts)
        self._within = None if within is None else Engine(EXACT, within, specs, settings)
        # The processes of a machine have the same changes, so they need not ask each other.
        self._together = self.engine.settings.health_group if self.engine.partition is None else None
        self._asked: list[Consensus] = []  # and not read yet, in this order

    def gradients(self, owner: object) -> AbstractContextManager[None]:
        """Direct a DDP model's gradients; of a different model, refuse that they are averaged besides."""
        if self._model.ddp is None:
            return averaging_model(owner, self._model.module, self.engine.transport)
        engines: dict[Level, Engine] = {"group": self.warmup}
        if self._within is not None:
            engines["subgroup"] = self._within
        return driven_gradients(self._model.ddp, engines, lambda: self._schedule.gradients_in(self.step))

    def end_warmup(self) -> None:
        """Let the last step of the warm-up send what its algorithm has kept: no one would add to it later."""
        if self.warmup.algorithm != EXACT and self.step >= self._schedule.warmup.steps - 1:
            self.warmup.check_between_steps("use()")
            self.warmup.buckets.use(EXACT)

    @property
    def is_due(self) -> bool:
        """Whether anything is to be sent or waited for after this step."""
        return self._schedule.after(self.step) is not None or bool(self.pending_averages)

    def go_on(self) -> None:
        """Average within the subgroup, advance what is in flight, and start what is due. Collective."""
        schedule, step = self._schedule, self.step
        sent = [self._model.fragments[number] for number in schedule.fragments_after(step)]
        is_delayed = schedule.streaming.delay_steps > 0 and not schedule.is_warm_up(step)
        self._average_within(() if is_delayed else sent)
        # A fragment that is still in flight lands before its next change is taken.
        for pending_average in tuple(self.pending_averages):
            self._advance(
                pending_average, is_sent_again=any(fragment in sent for fragment in pending_average.changes)
            )
        if not sent:
            return
        changes = {fragment: fragment.changes() for fragment in sent}
        asked = self._ask(changes)
        if not is_delayed:
            # The answers first: a process at a different step sends no changes to wait for.
            self._average_now(changes, self._read(asked))
            return
        # The engine's comparison blocks anyway, and all must be known to come to it: so the answers are read.
        if not self.engine.buckets.has_agreed:
            self._read(asked)
        self.pending_averages.append(PendingAverage(changes, self.engine, asked, is_delayed=True))
        for fragment in sent:
            fragment.sent_after = step

    def average_all(self) -> None:
        """Apply what is in flight, then average what steps have changed since each fragment was sent.

        What has changed without a step is taken over if it is the same on all. Collective.
        """
        fragments = self._model.fragments
        changes = {fragment: fragment.changes() for fragment in fragments}
        self._agree_within(changes)
        # Weights that were loaded, or are those of an optimizer that nobody counts.
        in_flight = {fragment for average in self.pending_averages for fragment in average.changes}
        quiet = [
            fragment
            for fragment in fragments
            if self.step == fragment.sent_after and fragment not in in_flight
        ]
        has_changed = bool(quiet) and have_moved(
            {fragment: changes[fragment] for fragment in quiet}, self._together
        )
        has_loaded = len(quiet) < len(fragments) and self._model.loads.have_changed()
        asked = self._ask(changes, has_changed=has_changed, has_loaded=has_loaded)
        answers = self._read(asked)
        if any(answer.has_changed for answer in answers):
            self._take_over(quiet)
        # A copy of the list, for what lands leaves it.
        for pending_average in tuple(self.pending_averages):
            (fragment,) = pending_average.changes
            self._land(pending_average, asked)
            changes[fragment] = fragment.changes()
        pending = [fragment for fragment in fragments if self.step > fragment.sent_after]
        if self._schedule.is_warm_up(self.step):
            turns = [pending] if pending else []
        else:
            # Each by itself as ever, those first that have waited longest: the same order everywhere.
            turns = [[fragment] for fragment in sorted(pending, key=lambda fragment: fragment.sent_after)]
        # All are known to be at this step: one question is enough for all turns.
        for turn in turns:
            self._average_now({fragment: changes[fragment] for fragment in turn}, answers)

    def _take_over(self, fragments: Sequence[Fragment]) -> None:
        """Take what the model holds for the last average, or refuse it on all members alike. Collective."""
        purpose = "comparing parameters that have changed without a step"
        own = Fragments(fragments).checksum()
        rows = gather_numbers([float(own)], self.engine.transport, purpose)
        are_alike = torch.tensor(len({row[0] for row in rows}) == 1)
        if self._together is not None:
            are_alike = true_for_all(are_alike, self._together, purpose)
        if not are_alike:
            raise StepError(
                "parameters have changed since the last averaging without a step of the optimizer that was "
                "given, and not on all processes alike; nothing was averaged, and each has its own. Pass all "
                "optimizers that train the model, in the order of their steps; load the same weights on all"
            )
        for fragment in fragments:
            fragment.take_parameters()
        self._model.loads.forget()
        logger.info("parameters that have changed without a step, on all processes alike, are taken over")

    def finish_all(self) -> None:
        """Wait for all that is in flight; it is applied when it is due. Collective."""
        # Read before anything is waited for: members that are at other steps send other rounds.
        asked = self._ask({})
        self._read(asked)
        for pending_average in self.pending_averages:
            pending_average.finish(self._read, asked)

    def abandon(self) -> None:
        """Forget what is in flight: it is sent again when its turn comes."""
        for pending_average in self.pending_averages:
            pending_average.abandon()
            # Its change is still to be sent: the next averaging must not pass over it.
            for fragment in pending_average.changes:
                fragment.sent_after = min(fragment.sent_after, self.step - 1)
        self.pending_averages, self._asked = [], []

    def _average_now(self, changes: Changes, answers: Sequence[Answer]) -> None:
        """Average over the group, all members having agreed."""
        num_contributors = sum(answer.contributes for answer in answers)
        # The input is scaled, not the mean: the residual keeps one unit.
        if self.divides_by_contributors and num_contributors:
            for flat in chain(*changes.values()):
                flat.mul_(len(answers) / num_contributors)
        # In the warm-up nothing is compressed, so that its end is that of plain data-parallel training.
        is_exact = self._schedule.is_warm_up(self.step)
        engine = self._exact if is_exact else self.engine
        # The clock runs from the first message to the last mean: none of it overlaps the user's steps.
        with engine.clock.inside(engine.traffic):
            PendingAverage(changes, engine).land()
        # Only when all have come: if one fails, no fragment has moved.
        for fragment, means in changes.items():
            fragment.move(means, None if is_exact else self._model.outer)
            fragment.sent_after = self.step
        self.own_pending_steps = 0

    def _advance(self, pending_average: PendingAverage[Fragment], *, is_sent_again: bool) -> None:
        """Send what is due of a flight by now, or land it. Collective, at points that the schedule fixes.

        Whatever may be sent, a question goes before it. So a process that has left the common course, and
        asks before it averages what is left, meets a question of the others, and all learn of it.
        """
        (fragment,) = pending_average.changes  # what is delayed is sent one fragment at a time
        age = self.step - fragment.sent_after
        # A fragment is sent again before it has landed only after resuming with other settings.
        if age >= self._schedule.streaming.delay_steps or is_sent_again:
            self._land(pending_average, None if pending_average.has_landed else self._ask({}))
            return
        num_rounds = self._schedule.rounds_sent(age, fragment.num_rounds)
        if pending_average.num_rounds < num_rounds and not pending_average.has_landed:
            pending_average.send(num_rounds, self._read, self._ask({}))

    def _land(self, pending_average: PendingAverage[Fragment], asked: Consensus | None) -> None:
        """Wait until a flight's changes are their means, and move its fragment by them."""
        pending_average.finish(self._read, asked)
        # Only then: what has raised above is still to be abandoned.
        self.pending_averages.remove(pending_average)
        local_weight = self._schedule.local_weight(self.engine.algorithm)
        for fragment, means in pending_average.changes.items():
            # Without a step since it was sent there is nothing that is ours to keep.
            fragment.move(means, self._model.outer, local_weight if self.step > fragment.sent_after else 0.0)

    def _average_within(self, sent: Sequence[Fragment]) -> None:
        """Average inside of each subgroup, exactly, what is not sent now."""
        if self._within is None or not self._schedule.meets_in_subgroups:
            return
        changes: Changes = {fragment: fragment.changes() for fragment in self._model.fragments}
        self._agree_within(changes)
        # Fragments that the group averages at once need no mean of the subgroup before.
        within = {fragment: flats for fragment, flats in changes.items() if fragment not in sent}
        if within:
            PendingAverage(within, self._within).land()
            for fragment, means in within.items():
                fragment.write(means)

    def _agree_within(self, changes: Changes) -> None:
        """Check consistency inside a subgroup, so that all members raise together. Collective; blocks.

        The subgroup is asked first each time, so that members at different steps meet there, and not in
        different groups. If they disagree, they ask the group at once; the others refuse with them the next
        time that they ask it.
        """
        if self._within is None or not self._schedule.meets_in_subgroups:
            return
        own = self._answer(changes)
        if not do_agree(Consensus(own, self._within.transport).answers()):
            Consensus(own, self.engine.transport).checked()

    def _ask(self, changes: Changes, **changed: bool) -> Consensus:
        """Ask all members of the group at which step they are; do not wait for the answers. Collective."""
        asked = Consensus(self._answer(changes, **changed), self.engine.transport)
        self._asked.append(asked)
        return asked

    def _answer(self, changes: Changes, *, has_changed: bool = False, has_loaded: bool = False) -> Answer:
        # The same on all shards of this replica, and so is what follows from the answers.
        is_finite = not changes or are_finite(changes, self._together)
        contributes = self.own_pending_steps > 0
        outer = settings_digest(self._model.outer)
        return Answer(self.step, is_finite, contributes, has_changed, has_loaded, outer)

    def _read(self, until: Consensus | None) -> list[Answer]:
        """Wait for the answers to what was asked until then; return the last ones, or refuse on all alike."""
        answers: list[Answer] = []
        while until in self._asked:
            # In the order of asking, the same everywhere: so all refuse at the same question.
            answers = self._asked.pop(0).checked()
        return answers
