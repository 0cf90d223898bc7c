"""A step: buckets that were started together, in flight until all of them commit or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from thinwire.algorithms import Bucket, Commit, Mean, Requests
from thinwire.algorithms.error_feedback import ERROR, put_back_residuals, residuals_of
from thinwire.comm import Traffic, Work, true_for_all
from thinwire.errors import CommunicationError, StepError
from thinwire.sync.bucket_plans import BucketPlans, BucketState
from thinwire.sync.clock import StepClock
from thinwire.sync.partition import BucketParts, IntraNodePartition, Specs
from thinwire.sync.precision import full_precision
from thinwire.sync.scheduler import CollectiveScheduler, Task, shown
from thinwire.sync.streams import Streams, refuse_capture
from thinwire.tensors import accelerators


class _Divided(NamedTuple):
    """A bucket whose mean inside of the machine is on its way; `by_place` is it in the order of partition."""

    lane: BucketState
    parts: BucketParts
    flat: torch.Tensor
    by_place: torch.Tensor
    work: Work


class Step:
    """A step in flight. `Engine.begin` makes one; several may be open side by side, over different lanes."""

    def __init__(
        self,
        plans: BucketPlans,
        scheduler: CollectiveScheduler,
        clock: StepClock,
        traffic: Traffic,
        number: int,
        count_step: Callable[..., None],
        *,
        rank: int,
        is_pipelined: bool = False,
    ) -> None:
        self.is_open = True  # neither finished nor abandoned
        self.num_parameters = self.gradient_bytes = 0  # of the buckets that were started so far
        self._plans, self._state, self._partition = plans, plans.state, plans.partition
        self._scheduler, self._clock, self._traffic, self._count_step = scheduler, clock, traffic, count_step
        self._number, self._name, self._rank = number, f"step {number}", rank
        self._is_pipelined = is_pipelined
        self._streams = Streams()
        self._lanes: list[BucketState] = []  # which are in flight
        self._buckets: list[Bucket] = []
        self._divided: list[_Divided] = []  # on a machine of several processes, all buckets
        self._num_reduced = 0  # of these
        # New buckets, and those that came after one, wait for the comparison of the processes.
        self._held: list[Bucket] = []
        settings, remembers = plans.settings, plans.algorithm.remembers
        self._loss_scale = settings.loss_scale
        self._scales: dict[torch.device, torch.Tensor] = {}  # what the loss is multiplied by
        # Flags of each bucket, in the order of messages: 1 for each parameter that this process used, else 0.
        self._used: dict[Specs, torch.Tensor] = {}
        self.unused: set[str] = set()  # parameters that no process used, once finished
        # Once for all buckets of the step. What was loaded becomes memory bucket by bucket: if the first one
        # has no residual, a later one may.
        has_residual = self._state.has([ERROR])
        if self._partition is not None:  # the same on all processes of the machine, who ask each other
            has_residual = self._state.may_remember
        # The first step after a warm-up has none, and leaves one.
        self._finds_unused = settings.may_be_unused and (has_residual or remembers)
        self._has_all = False

    @contextmanager
    def _at_work(self, *, are_ready: bool) -> Iterator[None]:
        with (
            self._clock.inside(self._traffic, are_ready=are_ready),
            full_precision(self._plans.device),
        ):
            yield

    # Buckets, as they come.

    def start(
        self, lane: BucketState | Specs, flat: torch.Tensor, used: Sequence[bool] | None = None
    ) -> None:
        """Send the first message of a bucket whose gradients are ready, and return.

        Which of its parameters were `used` on this process counts if the settings have `may_be_unused`; None
        for those whose gradient is not zero.
        """
        self._check_open()
        refuse_capture(flat.device)
        specs = lane.specs if isinstance(lane, BucketState) else lane
        if specs in [*(started.specs for started in self._lanes), *(held.specs for held in self._held)]:
            # The pass that began this step will never end it: left open, it would stand in the way of saving.
            self.abandon()
            raise StepError(
                f"the bucket of {specs[0].name} was started twice: the last backward pass did not "
                "finish on this process; restart all processes from a checkpoint"
            )
        if isinstance(lane, BucketState) and lane.is_in_flight:
            # It would begin with the memory that the other step is about to write, and one of both be lost.
            raise StepError(
                f"the bucket of {specs[0].name} is in flight in an earlier step; finish or abandon that first"
            )
        self._clock.device = self._plans.device = flat.device
        with self._at_work(are_ready=True):
            self._streams.note(flat.device)  # before anything is launched for the bucket
            self.num_parameters += len(specs)
            self.gradient_bytes += flat.nbytes
            if self._finds_unused:
                # Before the exchange starts, which may write to the gradients.
                self._used[specs] = (
                    used_flags(Bucket(specs, flat))
                    if used is None
                    else accelerators.sent_to(flat.device, torch.tensor(used, dtype=torch.float32))
                )
            # Buckets are sent in the order in which they came: after one that waits, all wait.
            if isinstance(lane, BucketState) and not self._held:
                self._send(lane, flat)
            else:
                self._held.append(Bucket(specs, flat))

    def _send(self, lane: BucketState, flat: torch.Tensor) -> None:
        partition = self._partition
        if lane.parts is None or partition is None:
            self._send_part(lane, flat)
            # Only now: if the message could not be sent, the lane stays free for a later step.
            self._take(lane)
            return
        # First inside of the machine. The bucket before has mostly come by now, and goes on its way.
        purpose = f"{self._name}, the mean inside of the machine of the bucket of {lane.specs[0].name}"
        by_place = lane.parts.by_place(flat)
        work = partition.intra_node.scatter_mean(by_place, lane.parts.lengths, purpose)
        self._traffic.inside_bytes += lane.parts.inside_bytes
        self._take(lane)
        self._divided.append(_Divided(lane, lane.parts, flat, by_place, work))
        self._send_reduced(len(self._divided) - 1)

    def _take(self, lane: BucketState) -> None:
        lane.is_in_flight = True
        self._lanes.append(lane)

    def _send_reduced(self, end: int) -> None:
        """Send what this process averages of the first buckets, once it is the mean of the machine."""
        for divided in self._divided[self._num_reduced : end]:
            with self._traffic.waiting():
                divided.work.wait()
            self._num_reduced += 1
            self._send_part(divided.lane, divided.parts.own(divided.by_place))

    def _send_part(self, lane: BucketState, flat: torch.Tensor) -> None:
        """Send the first message of what this process averages of a bucket."""
        bucket = Bucket(lane.plan.specs, flat, self.loss_scale_on(flat.device), self._rank)
        memory = self._state.memory_at(self._number)
        self._scheduler.start(lane.plan.exchange(bucket, memory), lane.specs[0].name, bucket)
        self._buckets.append(bucket)
        if self._is_pipelined:
            self._scheduler.advance_earlier()

    def loss_scale_on(self, device: torch.device) -> torch.Tensor | None:
        """Return the number that the loss is multiplied by in this step, shape (); None if it is not.

        One tensor for all buckets on a device: only what has the same scale shares launches.
        """
        if self._loss_scale is None:
            return None
        # Asked in each step, since a `GradScaler` changes it; a tensor: reading it would wait for the device.
        if device not in self._scales:
            self._scales[device] = self._loss_scale(device).reshape(())
        return self._scales[device]

    # Parameters that no process used in a step, such as those of a layer that all have left out: DDP ignores
    # their means (`find_unused_parameters=True`), and what they hold may be a gradient of an earlier pass.

    def _keep_unapplied(self) -> Requests:
        """Find the parameters that no one used, in one round; their residuals stay as they were."""
        names = [spec.name for specs in self._used for spec in specs]
        flags = list(self._used.values())
        used = torch.cat([flag.to(flags[0].device) for flag in flags])
        partition, memory = self._partition, self._state.memory
        if partition is not None:
            partition.intra_node.all_reduce(used, f"{self._name}, which parameters the machine used").wait()
        # Take the mean of the flags, not the maximum: the mean travels in a message that is sent anyway.
        used = yield Mean(used)
        self.unused = {name for name, share in zip(names, used.tolist(), strict=True) if share == 0}
        before = residuals_of(memory, self.unused)
        yield Commit(lambda: torch.tensor(True))
        put_back_residuals(memory, self.unused, before)
        for bucket in self._buckets:
            for spec, gradient in zip(bucket.specs, bucket.gradients, strict=True):
                if spec.name in self.unused:
                    gradient.zero_()  # what is kept for later must not be applied now as well

    # Round by round.

    def advance(self) -> bool:
        """Wait for the round under way and send the next one, without waiting for that.

        All buckets must have been started. To be called at the same points of the run on all processes: what
        is sent in between must be in the same order everywhere. Returns whether there is a round under way;
        if not, only `finish` is left to do.
        """
        self._check_open()
        # The last gradients were ready when their bucket was started, and all since then is exposed.
        with self._at_work(are_ready=False):
            try:
                return self._advance()
            except BaseException:
                self.abandon()
                raise

    def _advance(self) -> bool:
        if not self._has_all:
            self._send_held()
            self._has_all = True
        return self._scheduler.advance()

    def _send_held(self) -> None:
        """Send all that waited until all buckets are there."""
        if not self._lanes and not self._held:
            raise StepError("finish() was called without start(): there are no gradients to average")
        # Buckets may have been started on several streams; from here on all are worked on from one.
        self._streams.gather()
        # One comparison of the processes for all that are new.
        opened = self._plans.open_all({bucket.specs: bucket.flat.device for bucket in self._held})
        # If parameters become known bucket by bucket, the state of a different model can't be refused sooner.
        # Nothing has been written yet.
        self._state.check_loaded()
        for bucket in self._held:
            self._send(opened[bucket.specs], bucket.flat)
        self._held = []
        self._send_reduced(len(self._divided))
        if self._used:
            # One message for all buckets, which travels with their second.
            self._scheduler.close_with(self._keep_unapplied())

    def finish(self) -> bool:
        """Block until every gradient is the mean; return whether the step was committed, as far as is known.

        If a mean was not finite, it was not: memory is as it was, and all gradients are NaN, so that a
        `GradScaler` skips the step, or zeros (`on_nonfinite`).
        """
        self._check_open()
        on_cpu, is_under_way = self._plans.device.type == "cpu", True
        with self._at_work(are_ready=False):
            try:
                while is_under_way:
                    # Answers are written while the last messages travel: an accelerator does that
                    # anyway. `advance` does not: a caller that drops a step there may need its gradients.
                    if on_cpu:
                        self._scheduler.commit_early()
                    is_under_way = self._advance()
                with shown("thinwire: commit"):
                    committed = self._commit()
                if self._partition is not None:
                    self._gather_inside(self._partition)
                # After the commit: exchanges go by the count of the steps before theirs.
                self._state.count_step([bucket.names for bucket in self._lanes], committed=committed)
                self._plans.note(self._lanes)
                if self._state.torn == self._name:
                    self._state.torn = ""
            finally:
                # Closes the generators of buckets that did not commit: they must not write later.
                self.abandon()
        # Only now: an observer may save the state or begin a step, and this one is no longer in the way.
        self._clock.end_step()
        self._count_step(self.gradient_bytes, committed=committed)
        # The engine keeps the step until the next one: a way back would keep its memory past its own end.
        del self._count_step, self._plans, self._state
        return committed

    # The commit, of all buckets or none: had those that came early written their memory, a `GradScaler` that
    # skips the step because of a late one would drop gradients that their residuals take for sent.

    def _commit(self) -> bool:
        """Let all buckets commit, or none; return whether they did, as far as the host knows."""
        state, settings, traffic = self._state, self._plans.settings, self._traffic
        if not self._must_ask():
            # There is nothing to take back, and what is not finite is so in the gradients already.
            self._write(self._scheduler.tasks)
            traffic.count_machine(sum(lane.machine_bytes for lane in self._lanes))
            return True
        # Computed from what all members have received alike: all find the same, and need not ask each other.
        is_healthy, told = self._scheduler.is_healthy(), None
        purpose = f"{self._name}, whether it is healthy"
        if self._partition is not None:
            told = self._ask_machine(self._partition, is_healthy, purpose)
            is_healthy = told[0] == 0
        elif settings.health_group is not None:
            # Other shards have received other messages, so they do ask.
            is_healthy = true_for_all(is_healthy, settings.health_group, purpose)
        fill = 0.0 if settings.on_nonfinite == "zero" else torch.nan
        if not settings.host_check:
            state.count_unseen(is_healthy)
            # On the CPU it makes no one wait to ask.
            if accelerators.pays_per_launch(is_healthy.device):
                traffic.count_machine(sum(lane.machine_bytes for lane in self._lanes))
                self._commit_unseen(is_healthy, fill)
                return True
        with traffic.waiting():  # for an accelerator
            if told is None:
                committed = bool(is_healthy)
            else:
                num_unhealthy, sent_bytes, num_remembering = told.tolist()
                committed = num_unhealthy == 0
                traffic.count_machine(int(sent_bytes))
                if settings.host_check and not self._plans.algorithm.remembers:
                    state.may_remember = num_remembering > 0
        if committed:
            self._write(self._scheduler.tasks)
        for bucket in () if committed else self._buckets:
            bucket.flat.fill_(fill)
        return committed or not settings.host_check

    def _write(self, tasks: Sequence[Task], is_healthy: torch.Tensor | None = None) -> None:
        """Let tasks pass their commits, behind which they write memory, and the means that depend on it."""
        if self._state.may_remember:
            # Until all means are there: memory holds this step then, and the gradients do not.
            self._state.torn = self._state.torn or self._name
        self._scheduler.commit(tasks, is_healthy)

    def _must_ask(self) -> bool:
        """Return whether anybody wants to know if the step is healthy; the same on all processes."""
        settings = self._plans.settings
        if settings.on_nonfinite != "nan":
            return True
        if self._partition is not None:
            return self._state.may_remember
        return settings.health_group is not None or any(commit.writes for commit in self._scheduler.commits)

    def _ask_machine(
        self, partition: IntraNodePartition, is_healthy: torch.Tensor, purpose: str
    ) -> torch.Tensor:
        """Return how many processes of the machine are not healthy, what they sent, how many remember."""
        traffic = self._traffic
        uncounted = traffic.message_bytes - traffic.counted_bytes
        remembers = self._state.has(self._plans.algorithm.slots)
        device = partition.intra_node.data_device
        told = accelerators.sent_to(device, torch.tensor([0.0, uncounted, remembers], dtype=torch.float64))
        told[0] = ~is_healthy.to(device)
        partition.intra_node.all_reduce(told, purpose).wait()
        return told

    def _commit_unseen(self, is_healthy: torch.Tensor, fill: float) -> None:
        """Let the device decide."""
        by_themselves, memory = [], self._state.memory
        # A task for each bucket: the one for unused parameters needs the host, so it goes with `host_check`.
        for task, lane, bucket in zip(self._scheduler.tasks, self._lanes, self._buckets, strict=True):
            keeps_to_it = isinstance(task.request, Commit) and task.request.writes_where
            if keeps_to_it and bucket.flat.device == is_healthy.device:
                by_themselves.append(task)
            else:
                # One by one: so there is a copy of one bucket's memory at a time, and not of all.
                before = memory.copied(lane.plan.labels)
                self._write([task])
                memory.restore_where(is_healthy, before, lane.plan.labels)
        self._write(by_themselves, is_healthy)
        for task, bucket in zip(self._scheduler.tasks, self._buckets, strict=True):
            if task not in by_themselves or fill == 0:  # else it has made them NaN
                bucket.flat.masked_fill_(~is_healthy.to(bucket.flat.device), fill)

    def _gather_inside(self, partition: IntraNodePartition) -> None:
        """Bring the means of all parts to all processes of the machine; what was not committed, as well."""
        gathers = []
        for divided in self._divided:
            purpose = f"{self._name}, the means of the bucket of {divided.lane.specs[0].name}"
            gathers.append(
                partition.intra_node.gather_parts(divided.by_place, divided.parts.lengths, purpose)
            )
        for divided, work in zip(self._divided, gathers, strict=True):
            with self._traffic.waiting():
                work.wait()
            divided.parts.write(divided.flat, divided.by_place)

    def abandon(self) -> None:
        """End a step that can't be finished. Memory is as it was before it."""
        # It does not wait for what is under way: if a member has died, that would hold back the error
        # until the group's timeout. What comes next does (`drain`).
        self._scheduler.close()
        if self.is_open:
            for lane in self._lanes:
                lane.is_in_flight = False
            self._streams.release()
        # They are as large as the gradients, and the engine keeps the step until the next one.
        del self._divided[: self._num_reduced], self._buckets[:]
        self.is_open, self._num_reduced = False, 0

    def drain(self) -> None:
        """Wait for the messages that were under way when the step was abandoned."""
        for divided in self._divided:
            with suppress(CommunicationError):
                divided.work.wait()
        self._scheduler.drain()

    def _check_open(self) -> None:
        if not self.is_open:
            raise StepError("this step has ended; begin a new one")


GLANCE = 64


def used_flags(bucket: Bucket) -> torch.Tensor:
    """Return 1 for each parameter whose gradient on this process is not zero, else 0: fp32.

    Cost: on the CPU, a glance at each gradient that is used; on an accelerator, one read of the bucket in a
    few launches.
    """
    if accelerators.pays_per_launch(bucket.flat.device):
        # Sum of magnitudes: a maximum is not defined for tensors without elements.
        return (torch.stack(list(torch._foreach_norm(list(bucket.gradients), 1))) != 0).float()
    # A used gradient mostly shows at once.
    used = [bool(gradient[:GLANCE].any() or gradient.any()) for gradient in bucket.gradients]
    return torch.tensor(used, dtype=torch.float32)
