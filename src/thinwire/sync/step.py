"""A step: buckets that were started together, in flight until all of them commit or none does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from thinwire.algorithms import Bucket, Commit
from thinwire.algorithms.error_feedback import ERROR
from thinwire.channel import Traffic, Transport, Work, true_for_all
from thinwire.errors import CommunicationError, StepError
from thinwire.sync.clock import StepClock
from thinwire.sync.exchange import Exchange, shown
from thinwire.sync.lanes import Lane, Lanes, Specs
from thinwire.sync.parts import BucketParts
from thinwire.sync.places import Places
from thinwire.sync.precision import full_precision
from thinwire.sync.settings import Settings
from thinwire.sync.streams import Streams, refuse_capture
from thinwire.sync.unused import keep_unapplied, used_flags
from thinwire.tensors import accelerators


class Step:
    """What is in flight. `Engine.begin` makes one; several may be open side by side, over lanes of their own.

    Attributes:
        is_open: Whether it is neither finished nor abandoned.
        num_parameters: In the buckets that were started so far.
        gradient_bytes: Of the gradients that were started so far.
    """

    def __init__(
        self,
        lanes: Lanes,
        wire: Transport,
        traffic: Traffic,
        clock: StepClock,
        number: int,
        ended: Callable[[Step, bool], None],
        *,
        pipelined: bool = False,
    ) -> None:
        self.is_open = True
        self.num_parameters = self.gradient_bytes = 0
        self.lanes: list[Lane] = []
        self._all_lanes = lanes
        self._wire, self._traffic, self._clock = wire, traffic, clock
        self._number = number
        self._ended = ended
        self._pipelined = pipelined and lanes.algorithm.pipelines_buckets
        self._name = f"step {number}"
        self._exchange = Exchange(wire, self._name)
        self._streams = Streams()
        self._buckets: list[Bucket] = []
        # On a machine of several processes: what is averaged inside of it; and all buckets, as they lie and
        # in the order of places.
        self._inside: deque[tuple[Lane, torch.Tensor, Work]] = deque()
        self._divided: list[tuple[BucketParts, torch.Tensor, torch.Tensor]] = []
        # New buckets, and those that came after one, wait for the comparison of the processes.
        self._held: list[Bucket] = []
        self._loss_scale = lanes.settings.loss_scale
        self._scales: dict[torch.device, torch.Tensor] = {}  # what the loss is multiplied by
        self._used: list[torch.Tensor] = []
        self._finds_unused = False
        self._has_all = False

    def start(self, lane: Lane | Specs, flat: torch.Tensor) -> None:
        """Send the first message of a bucket whose gradients are ready, and return."""
        self._check_open()
        refuse_capture(flat.device)
        specs = lane.specs if isinstance(lane, Lane) else lane
        if specs in [*(each.specs for each in self.lanes), *(bucket.specs for bucket in self._held)]:
            # The pass that began this step will never end it: left open, it would stand in the way of saving.
            self.abandon()
            raise StepError(
                f"the bucket of {specs[0].name} was started twice: the last backward pass did not "
                "finish on this process; restart all processes from a checkpoint"
            )
        if isinstance(lane, Lane) and lane.is_in_flight:
            # It would begin with the memory that the other step is about to write, and one of both be lost.
            raise StepError(
                f"the bucket of {specs[0].name} is in flight in another step; finish or abandon that first"
            )
        self._clock.device = self._all_lanes.device = flat.device
        with (
            self._clock.inside(self._traffic),
            full_precision(flat.device),
            accelerators.shortfalls_kept_in(self._all_lanes.shortfalls),
        ):
            self._streams.note(flat.device)  # before anything is launched for the bucket
            self.num_parameters += len(specs)
            self.gradient_bytes += flat.nbytes
            # Buckets are sent in the order in which they came: after one that waits, all wait.
            if isinstance(lane, Lane) and not self._held:
                self._send(lane, flat)
            else:
                self._held.append(Bucket(specs, flat))

    def _send(self, lane: Lane, flat: torch.Tensor) -> None:
        places = self._all_lanes.places
        if lane.parts is None or places is None:
            self._send_part(lane, flat)
            return
        # First inside of the machine. The bucket before has mostly come by now, and goes on its way.
        purpose = f"{self._name}, the mean inside of the machine of the bucket of {lane.specs[0].name}"
        by_place = lane.parts.by_place(flat)
        work = places.inside.scatter_mean(by_place, lane.parts.lengths, purpose)
        self._traffic.inside_bytes += lane.parts.inside_bytes
        self._take_lane(lane)
        self._divided.append((lane.parts, flat, by_place))
        self._inside.append((lane, lane.parts.own(by_place), work))
        if len(self._inside) > 1:
            self._send_reduced()

    def _send_reduced(self) -> None:
        lane, own, work = self._inside[0]
        self._wait_for(work)
        self._inside.popleft()
        self._send_part(lane, own)

    def _wait_for(self, work: Work) -> None:
        start = time.perf_counter()
        work.wait()
        self._traffic.waiting_seconds += time.perf_counter() - start

    def _take_lane(self, lane: Lane) -> None:
        lane.is_in_flight = True
        self.lanes.append(lane)

    def _send_part(self, lane: Lane, flat: torch.Tensor) -> None:
        """Send the first message of what this process averages of a bucket."""
        lanes = self._all_lanes
        bucket = Bucket(lane.plan.specs, flat, self.loss_scale_on(flat.device), self._wire.rank)
        if not self._buckets:
            # Once for all buckets of the step. What was loaded becomes memory bucket by bucket: where the
            # first one has no residual, a later one may.
            has_residual = bool(lanes.memory[ERROR] or lanes.unclaimed.get(ERROR))
            means_unused = has_residual or lanes.algorithm.mixes_parameters
            self._finds_unused = lanes.settings.may_be_unused and means_unused
        if self._finds_unused and bucket.specs:
            # Before the exchange starts, which may write to the gradients.
            self._used.append(used_flags(bucket))
        memory = lanes.memory_at(self._number)
        self._exchange.start(lane.plan.exchange(bucket, memory), lane.specs[0].name)
        # Only now: where the message could not be sent, the lane stays free for another step.
        if lane.parts is None:
            self._take_lane(lane)
        self._buckets.append(bucket)
        # Not on an accelerator: there its stream would wait, and with it the backward pass that is on it.
        if self._pipelined and flat.device.type == "cpu":
            self._exchange.advance_earlier()

    def loss_scale_on(self, device: torch.device) -> torch.Tensor | None:
        """Return what the loss is multiplied by in this step, shape (); None if it is not.

        One tensor for all buckets on a device: only what has the same scale shares launches.
        """
        if self._loss_scale is None:
            return None
        # Asked in each step, since a `GradScaler` changes it. Kept as a tensor: reading it would wait for the
        # device.
        if device not in self._scales:
            self._scales[device] = self._loss_scale(device).reshape(())
        return self._scales[device]

    def advance(self) -> bool:
        """Wait for the round under way and send the next one, without waiting for that.

        All buckets must have been started. To be called at the same points of the run on all processes: what
        is sent in between must be in the same order everywhere.

        Returns:
            Whether there is a round under way. If not, only `finish` is left to do.
        """
        self._check_open()
        # Not ready anew: the last gradients were when their bucket was started, and all since then is
        # exposed.
        with (
            self._clock.inside(self._traffic, are_ready=False),
            full_precision(self._all_lanes.device),
            accelerators.shortfalls_kept_in(self._all_lanes.shortfalls),
        ):
            try:
                if not self._has_all:
                    self._complete()
                return self._exchange.advance()
            except BaseException:
                self.abandon()
                raise

    def _complete(self) -> None:
        """Take no more buckets, and send what waited until all are there."""
        if not self.lanes and not self._held:
            raise StepError("finish() was called without start(): there are no gradients to average")
        # Buckets may have been started on several streams; from here on all are worked on from one.
        self._streams.gather()
        self._send_held()
        while self._inside:
            self._send_reduced()
        if self._used:
            # One message for all buckets, which travels with their second.
            self._exchange.close_with(keep_unapplied(self._buckets, self._used, self._all_lanes.memory))
        self._has_all = True

    def _send_held(self) -> None:
        """Send the buckets that waited, after one comparison of the processes for all of them."""
        lanes = self._all_lanes
        opened = lanes.open_all({bucket.specs: bucket.flat.device for bucket in self._held})
        # If parameters become known bucket by bucket, the state of a different model can't be refused sooner.
        # Nothing has been written yet.
        lanes.check_loaded()
        for bucket in self._held:
            self._send(opened[bucket.specs], bucket.flat)
        self._held = []

    def finish(self) -> bool:
        """Block until every gradient is the mean.

        Returns:
            Whether the step was committed. False if it was not healthy (a mean was not finite): memory is as
            it was, and all gradients are NaN, so that a `GradScaler` skips the step, or zeros
            (`on_nonfinite`). Without `host_check` it is not known: True.
        """
        self._check_open()
        with (
            self._clock.inside(self._traffic, are_ready=False),
            full_precision(self._all_lanes.device),
            accelerators.shortfalls_kept_in(self._all_lanes.shortfalls),
        ):
            try:
                # What comes back is written while the last messages travel: an accelerator does that anyway.
                # Not in `advance`: a caller that drops a step there may need its gradients as they were.
                writes_early = self._all_lanes.device.type == "cpu"
                while True:
                    if writes_early:
                        self._exchange.commit_early()
                    if not self.advance():
                        break
                with shown("thinwire: commit"):
                    committed = self._commit()
                lanes = self._all_lanes
                if lanes.places is not None:
                    self._gather_inside(lanes.places)
                # Behind the commit: exchanges go by the count of the steps before theirs.
                if committed:
                    lanes.memory.step += 1
                    lanes.differing.update(spec.name for lane in self.lanes for spec in lane.specs)
                else:
                    lanes.nonfinite_steps += 1
                lanes.note(self.lanes)
            finally:
                # Closes the generators of buckets that did not commit: they must not write later.
                self.abandon()
        # Only now: an observer may save the state or begin a step, and this one is no longer in the way.
        self._clock.end_step()
        self._ended(self, committed)
        # The engine keeps the step until the next one: a way back would keep its memory past its own end.
        del self._ended, self._all_lanes
        return committed

    def _commit(self) -> bool:
        """Let all buckets commit, or none; return whether they did, as far as the host knows."""
        settings = self._all_lanes.settings
        # All buckets or none: had those that came early written their memory, a `GradScaler` that skips the
        # step because of a late one would drop gradients that their residuals take for sent.
        if not self._must_ask(settings):
            # There is nothing to take back, and what is not finite is so in the gradients already.
            self._exchange.commit(self._exchange.tasks)
            self._traffic.planned_machine_bytes += sum(lane.machine_bytes for lane in self.lanes)
            self._traffic.counted_bytes = self._traffic.message_bytes
            return True
        # Of what all members have received alike: all find the same, and need not ask each other.
        is_healthy = self._exchange.is_healthy()
        if settings.together is not None:
            # Other shards have received other messages, so they do ask.
            purpose = f"{self._name}, whether it is healthy"
            if self._all_lanes.places is None:
                is_healthy = true_for_all(is_healthy, settings.together, purpose)
            else:
                is_healthy, remembering = self._ask_machine(self._all_lanes.places, is_healthy, purpose)
        fill = 0.0 if settings.on_nonfinite == "zero" else torch.nan
        if not settings.host_check:
            self._commit_unseen(is_healthy, fill)
            self._all_lanes.count_unseen(is_healthy)
            return True
        start = time.perf_counter()
        committed = bool(is_healthy)  # waits for an accelerator
        if self._all_lanes.places is not None and not self._all_lanes.algorithm.remembers:
            self._all_lanes.may_remember = bool(remembering)
        self._traffic.waiting_seconds += time.perf_counter() - start
        self._commit_if(committed, fill)
        return committed

    def _ask_machine(
        self, places: Places, is_healthy: torch.Tensor, purpose: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether the step is healthy everywhere, and how many processes remember something."""
        traffic, lanes = self._traffic, self._all_lanes
        uncounted = traffic.message_bytes - traffic.counted_bytes
        remembers = any(lanes.memory[slot] or lanes.unclaimed.get(slot) for slot in lanes.algorithm.slots)
        said = places.sum_of(~is_healthy, [uncounted, remembers], purpose)
        traffic.machine_bytes = traffic.machine_bytes.to(said.device) + said[1]
        traffic.counted_bytes += uncounted
        return said[0] == 0, said[2]

    def _must_ask(self, settings: Settings) -> bool:
        """Return whether anybody wants to know if the step is healthy; the same on all processes."""
        if settings.on_nonfinite != "nan":
            return True
        if self._all_lanes.places is not None:
            return self._all_lanes.may_remember
        return settings.together is not None or any(commit.writes for commit in self._exchange.commits)

    def _gather_inside(self, places: Places) -> None:
        """Bring the means of all parts to all processes of the machine; what was not committed, as well."""
        gathers = [
            places.inside.gather_parts(
                by_place, parts.lengths, f"{self._name}, the means of the bucket of {parts.specs[0].name}"
            )
            for parts, _, by_place in self._divided
        ]
        for (parts, flat, by_place), work in zip(self._divided, gathers, strict=True):
            self._wait_for(work)
            parts.write(flat, by_place)

    def _commit_if(self, is_healthy: bool, fill: float) -> None:
        if is_healthy:
            self._exchange.commit(self._exchange.tasks)
            return
        for bucket in self._buckets:
            bucket.flat.fill_(fill)

    def _commit_unseen(self, is_healthy: torch.Tensor, fill: float) -> None:
        """Let the device decide; on the CPU it makes nobody wait to ask it."""
        if not accelerators.pays_per_launch(is_healthy.device):
            self._commit_if(bool(is_healthy), fill)
            return
        by_themselves, memory = [], self._all_lanes.memory
        # A task for each bucket: the one for unused parameters needs the host, so it goes with `host_check`.
        for task, lane, bucket in zip(self._exchange.tasks, self.lanes, self._buckets, strict=True):
            keeps_to_it = isinstance(task.request, Commit) and task.request.writes_where
            if keeps_to_it and bucket.flat.device == is_healthy.device:
                by_themselves.append(task)
            else:
                # By itself: so there is a copy of one bucket's memory at a time, and not of all.
                before = memory.copied(lane.plan.labels)
                self._exchange.commit([task])
                memory.restore_where(is_healthy, before, lane.plan.labels)
        self._exchange.commit(by_themselves, is_healthy)
        for task, bucket in zip(self._exchange.tasks, self._buckets, strict=True):
            if task not in by_themselves or fill == 0:  # else it has made them NaN
                bucket.flat.masked_fill_(~is_healthy.to(bucket.flat.device), fill)

    def abandon(self) -> None:
        """End a step that can't be finished. Memory is as it was before it."""
        # It does not wait for what is under way: where a member has died, that would hold back the error
        # until the group's timeout. What comes next does (`drain`).
        self._exchange.close()
        if self.is_open:
            for lane in self.lanes:
                lane.is_in_flight = False
            self._streams.release()
        # They are as large as the gradients, and the engine keeps the step until the next one.
        self._divided, self._buckets = [], []
        self.is_open = False

    def drain(self) -> None:
        """Wait for the messages that were under way when the step was abandoned."""
        for _, _, work in self._inside:
            with suppress(CommunicationError):
                work.wait()
        self._exchange.drain()

    def _check_open(self) -> None:
        if not self.is_open:
            raise StepError("this step has ended; begin another one")
