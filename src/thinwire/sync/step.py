"""A step: the buckets of one backward pass, in flight until all of them commit or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from operator import attrgetter

import torch

from thinwire.algorithms import Bucket, Memory
from thinwire.algorithms.error_feedback import ERROR, residuals_restored
from thinwire.comm import Transport, Work, true_for_all
from thinwire.errors import CommunicationError, StepError
from thinwire.sync.bucket_plans import NO_GRADIENTS, BucketPlans, BucketState
from thinwire.sync.clock import StepClock
from thinwire.sync.precision import full_precision
from thinwire.sync.scheduler import CollectiveScheduler, Task, profiler_range
from thinwire.sync.streams import refuse_capture
from thinwire.sync.weights import Share, Weights, multiply
from thinwire.tensors import accelerators

ENDED = "this step has ended; begin a new one"


class Step:
    """A step in flight, made by `Engine.begin`. Several may be open concurrently, over different buckets.

    A bucket is started when its gradients are ready, and its first message is sent immediately. After all
    were started, `finish` takes them through their rounds, and commits all or none. Then it calls `ended`
    with whether the step was committed.
    """

    def __init__(
        self,
        plans: BucketPlans,
        memory: Memory,
        scheduler: CollectiveScheduler,
        clock: StepClock,
        ended: Callable[[Step, bool], None],
        send_used: Callable[[torch.Tensor], tuple[Work, torch.Tensor]],
        weights: Weights | None = None,
    ) -> None:
        self.is_open = True  # neither finished nor abandoned
        self.num_parameters = self.gradient_bytes = 0  # the sum over the buckets started so far
        self._plans, self._state, self._memory, self._scheduler = plans, plans.state, memory, scheduler
        self._clock, self._traffic, self._ended, self._name = clock, clock.traffic, ended, scheduler.name
        self._send_used, self._flags_work = send_used, list[Work]()
        self._buckets: list[BucketState] = []  # in the order in which they were started
        # A new bucket, and all after it, are not sent until all were started and processes are compared.
        self._unsent: list[BucketState] = []
        # Buckets that the machine reduces now, if it has several processes; then this rank's part is sent.
        self._reducing: list[tuple[BucketState, Work]] = []
        self._are_all_sent = False
        self._scales: dict[torch.device, torch.Tensor] = {}  # the loss scale
        self._weights = weights  # None if all processes count the same
        self._share: Share | None = None  # this process's share
        self._intra_node = None if plans.partition is None else plans.partition.intra_node
        self.unused: set[str] = set()  # parameters that no process used, once finished
        # Whether to find them, since their residuals must stay. Decide once for all buckets, and the same on
        # all processes. A loaded state enters memory bucket by bucket: if the first one has no residual, a
        # later one may. The first step after a warm-up has no residual, but leaves one. Processes of a
        # machine have agreed on `may_remember`.
        self.finds_unused = plans.settings.may_be_unused and (
            plans.algorithm.remembers
            or (plans.state.has([ERROR]) if self._intra_node is None else plans.state.may_remember)
        )

    @contextmanager
    def _working(self, *, are_ready: bool) -> Iterator[None]:
        with self._clock.inside(are_ready=are_ready), full_precision(self._plans.device):
            yield

    # Buckets, as they come.

    def start(self, bucket: BucketState, flat: torch.Tensor) -> None:
        """Send the first message of a bucket whose gradients are ready, and return."""
        if not self.is_open:
            raise StepError(ENDED)
        if flat.is_cuda:
            refuse_capture()
        if bucket.is_in_flight:
            self._refuse_twice(bucket)
        if flat.device != self._plans.device:
            self._plans.move_to(flat.device)
        self._clock.device = flat.device
        with self._working(are_ready=True):
            self.num_parameters += len(bucket.specs)
            self.gradient_bytes += flat.nbytes
            bucket.is_in_flight, bucket.flat = True, flat
            self._buckets.append(bucket)
            if bucket.is_open and not self._unsent:
                self._send(bucket)
            else:
                self._unsent.append(bucket)

    def _refuse_twice(self, bucket: BucketState) -> None:
        if bucket in self._buckets:
            # The pass that began this step will never finish it, and an open step would prevent saving.
            self.abandon()
            raise StepError(
                f"the bucket of {bucket.specs[0].name} was started twice: the last backward pass did not "
                "finish on this process; restart all processes from a checkpoint"
            )
        # It would start from memory that the other step is about to write, and one result would be lost.
        raise StepError(
            f"the bucket of {bucket.specs[0].name} is in flight in an earlier step; first finish or abandon "
            "that step"
        )

    def _send(self, bucket: BucketState) -> None:
        # Only now: in the first step, processes have compared their settings before this.
        if self._weights is not None:
            has_samples, scale = self._share = self._share or self._weights.share(self._name)
            # The gradients of no samples may be NaN, which multiplying by 0 does not remove.
            if not has_samples:
                bucket.flat.zero_()
            multiply(bucket.flat, scale)
        if self._intra_node is None or bucket.parts is None:
            self._send_part(bucket, bucket.flat)
            return
        # The machine reduces it first. The bucket before has mostly arrived by now, and is sent: not when it
        # arrives, or rank 0 could send it before this reduction, and rank 1 after it.
        bucket.by_rank = bucket.parts.by_rank(bucket.flat)
        purpose = f"{self._name}, the mean inside the machine of the bucket of {bucket.specs[0].name}"
        work = self._intra_node.scatter_mean(bucket.by_rank, bucket.parts.lengths, purpose)
        self._traffic.inside_bytes += bucket.parts.inside_bytes
        self._reducing.append((bucket, work))
        self._send_reduced(num_left=1)

    def _send_reduced(self, *, num_left: int) -> None:
        """Wait for the machine's means, in order, until this many are left; send this rank's parts."""
        while len(self._reducing) > num_left:
            bucket, work = self._reducing[0]
            with self._traffic.waiting():
                work.wait()
            del self._reducing[0]
            assert bucket.parts is not None
            self._send_part(bucket, bucket.parts.own(bucket.by_rank))

    def _send_part(self, bucket: BucketState, flat: torch.Tensor) -> None:
        """Send the first message of this process's part of a bucket."""
        scale, loss_scale = None, self._plans.settings.loss_scale
        if loss_scale is not None:
            # Read in each step, since a `GradScaler` changes it; as a tensor, since reading its value would
            # wait for the device. One tensor for all buckets: only buckets with the same one share launches.
            if flat.device not in self._scales:
                self._scales[flat.device] = loss_scale(flat.device).reshape(())
            scale = self._scales[flat.device]
        bucket.own_part = Bucket(bucket.plan.specs, flat, scale, self._plans.inter_node.rank)
        requests = bucket.plan.run(bucket.own_part, self._memory)
        self._scheduler.start(requests, bucket.specs[0].name, rounds=bucket.plan.rounds)

    # Round by round.

    def advance(self) -> bool:
        """Wait for the round in flight and send the next one, without waiting for it.

        All buckets must have been started. Call it at the same points of the run on all processes: all
        messages must be sent in the same order everywhere. Returns whether a round is in flight; if not, only
        `finish` is left to do.
        """
        with self._all_sent():
            return self._scheduler.advance()

    @contextmanager
    def _all_sent(self) -> Iterator[None]:
        """Send all buckets first; an error ends the step."""
        if not self.is_open:
            raise StepError(ENDED)
        # The last gradients were ready when their bucket was started; all time since then is exposed.
        with self._working(are_ready=False):
            try:
                if not self._are_all_sent:
                    self._send_rest()
                yield
            except BaseException:
                self.abandon()
                raise

    def _send_rest(self) -> None:
        """Send all buckets that waited until all were started."""
        self._are_all_sent = True
        if not self._buckets:
            raise StepError("finish() was called without start(): there are no gradients to average")
        waiting, self._unsent = self._unsent, []
        if waiting:
            # Compare processes once for all new buckets.
            self._plans.open_all({bucket: bucket.flat.device for bucket in waiting})
        for bucket in waiting:
            self._send(bucket)
        if self._reducing:
            self._send_reduced(num_left=0)

    def finish(self, used: torch.Tensor | None = None) -> bool:
        """Block until every gradient is the mean; return whether the step was committed, as far as known.

        It is not committed if a mean is not finite: memory is as it was, and all gradients are NaN, so that
        a `GradScaler` skips the step, or zeros (`on_nonfinite`).

        `used` says of each parameter, in the order in which they were started, whether this process used it;
        either all processes pass it or none. Parameters that no process used are then in `unused`: the caller
        must not apply their means, since their residuals stay as they were.
        """
        with self._all_sent():
            if used is not None:
                self._find_unused(used)
            on_cpu, is_under_way = self._plans.device.type == "cpu", True
            while is_under_way:
                # Write results while the last messages are in flight, as an accelerator does anyway. Not in
                # `advance`: a caller that drops the step then may need its gradients.
                if on_cpu:
                    self._scheduler.commit_early()
                is_under_way = self._scheduler.advance_next()
            restored = residuals_restored(self._memory, self.unused) if self.unused else nullcontext()
            with profiler_range("thinwire: commit"), restored:
                committed = self._commit()
            if committed and self.unused:
                self._zero_unused()
            if self._intra_node is not None:
                self._gather(self._intra_node)
            # After the commit: plans use the number of steps before this one.
            self._count(committed=committed)
            # Closes the generators of buckets that did not commit: they must not write later.
            self.abandon()
        # Only after the step has ended: an observer may save the state or begin a step.
        self._clock.end_step()
        self._ended(self, committed)
        return committed

    def _find_unused(self, used: torch.Tensor) -> None:
        """Find the parameters that no process used."""
        # After all first messages, since processes may start buckets at different points of their passes.
        work, flags = self._send_used(used)
        self._flags_work.append(work)  # for `drain`
        # Wait after the first round, which was sent before; and before the commit, since no message may fail
        # after memory is written.
        self._scheduler.advance()
        work.wait()
        self._flags_work.clear()
        # A process that has used all need not read the answer, for which the host may wait for a device.
        if used.device.type != "cpu" or not used.all():
            names = [spec.name for bucket in self._buckets for spec in bucket.specs]
            self.unused = {name for name, is_used in zip(names, flags.tolist(), strict=True) if not is_used}

    def _zero_unused(self) -> None:
        """Zero the means of unused parameters: they stay in the residual, and must not be applied as well."""
        for part in [bucket.own_part for bucket in self._buckets]:
            for spec, mean in zip(part.specs, part.gradients, strict=True):
                if spec.name in self.unused:
                    mean.zero_()

    def _gather(self, intra_node: Transport) -> None:
        """All-gather the means of all parts inside the machine, even if the step was not committed."""
        gathers = []
        for bucket in self._buckets:
            assert bucket.parts is not None
            purpose = f"{self._name}, the means of the bucket of {bucket.specs[0].name}"
            work = intra_node.gather_parts(bucket.by_rank, bucket.parts.lengths, purpose)
            gathers.append((bucket, bucket.parts, work))
        for bucket, parts, work in gathers:
            with self._traffic.waiting():
                work.wait()
            parts.write(bucket.flat, bucket.by_rank)
        # Count bytes as planned: no process knows what the others of the machine have sent.
        is_warm = self._memory.step >= self._plans.algorithm.warmup_steps
        planned_bytes = sum(bucket.machine_bytes for bucket in self._buckets)
        self._traffic.machine_bytes += planned_bytes if is_warm else self.gradient_bytes

    # `overlap_forward` commits bucket by bucket, without a joint decision: its plans write no memory.

    def send_mean(self, index: int) -> None:
        """Wait for a bucket's first message, and send its second, while the backward pass continues."""
        # In the first step, buckets wait until all were started.
        if index < len(self._scheduler.tasks):
            task = self._scheduler.tasks[index]
            with self._working(are_ready=True):
                self._scheduler.collect([task])
                self._scheduler.send_means([task])

    def collect(self) -> list[Task]:
        """Wait for all first messages; return the buckets' tasks, suspended at their second one."""
        with self._all_sent(), self._clock.exposed():
            self._scheduler.collect(self._scheduler.tasks)
        return self._scheduler.tasks

    def send_means(self) -> None:
        """Send the other second messages, without waiting; the last bucket's first: it is read first."""
        with self._working(are_ready=False):
            self._scheduler.send_means(self._scheduler.tasks[::-1])

    def take(self, task: Task) -> None:
        """Wait for the mean of one bucket, and write it over its gradients."""
        with self._working(are_ready=False), self._clock.exposed():
            self._scheduler.take(task)

    def end(self) -> None:
        """End the step, after `take` of all buckets."""
        self._count(committed=True)
        self.abandon()  # nothing is in flight
        self._ended(self, True)

    def _count(self, *, committed: bool) -> None:
        state = self._state
        if committed:
            state.memory.step += 1
            for bucket in self._buckets:
                state.unsynced_names |= bucket.names
        else:
            state.nonfinite_steps += 1
        if tuple(map(attrgetter("specs"), self._buckets)) != self._plans.specs_of_last:  # rare
            self._plans.note(self._buckets)
        if state.torn == self._name:
            state.torn = ""

    # The commit, of all buckets or none. If early buckets wrote their memory, and a late one made a
    # `GradScaler` skip the step, it would drop gradients that their residuals count as sent.

    def _commit(self) -> bool:
        """Commit all buckets, or none; return whether they committed, as far as the host knows."""
        state, settings = self._state, self._plans.settings
        # Whether the step must be checked; the same on all processes.
        must_ask = settings.on_nonfinite != "nan"
        if self._intra_node is not None:
            must_ask |= state.may_remember
        else:
            must_ask |= settings.health_group is not None or self._scheduler.writes
        if not must_ask:
            # There is nothing to undo, and gradients that are not finite already show it.
            self._write()
            return True
        is_healthy, remembers = self._is_healthy()
        parts = [bucket.own_part for bucket in self._buckets]
        fill = 0.0 if settings.on_nonfinite == "zero" else torch.nan
        if not settings.host_check:
            unseen = state.unseen_nonfinite_steps.to(is_healthy.device)
            state.unseen_nonfinite_steps = unseen + ~is_healthy
            device, commits = is_healthy.device, [task.commit for task in self._scheduler.tasks]
            is_on_device = all(commit is not None and commit.commits_on_device for commit in commits)
            is_on_device &= all(part.flat.device == device for part in parts)
            # On the CPU, reading the answer costs no wait.
            if is_on_device and accelerators.is_accelerator(device):
                self._write(is_healthy)
                if fill == 0:  # otherwise the plans have written NaN
                    for part in parts:
                        part.flat.masked_fill_(~is_healthy, fill)
                return True
        with self._traffic.waiting():  # for an accelerator
            committed = bool(is_healthy)
            if remembers is not None and settings.host_check and not self._plans.algorithm.remembers:
                state.may_remember = bool(remembers)
        if committed:
            self._write()
        else:
            for part in parts:
                part.flat.fill_(fill)
        return committed or not settings.host_check

    def _write(self, is_healthy: torch.Tensor | None = None) -> None:
        """Resume all tasks after their commits: they write memory, and the means that depend on it."""
        if self._state.may_remember:
            # Until all means have arrived: memory has this step, but the gradients do not yet.
            self._state.torn = self._state.torn or self._name
        self._scheduler.commit(self._scheduler.tasks, is_healthy)

    def _is_healthy(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return whether the step is healthy, not read back; with machines, also whether any has memory."""
        # Computed from values that all members have received, so they need not agree on it.
        is_healthy, purpose = self._scheduler.is_healthy(), f"{self._name}, whether it is healthy"
        if (group := self._intra_node) is None:
            # Shards have received different messages, so they must agree.
            shards = self._plans.settings.health_group
            if shards is None:
                return is_healthy, None
            with self._traffic.waiting():
                return true_for_all(is_healthy, shards, purpose), None
        # So must local ranks, which have averaged different parts.
        remembers, device = self._state.has(self._plans.algorithm.slots), group.data_device
        counts = accelerators.to_device_async(
            device, torch.tensor([0.0, remembers], dtype=torch.float64, device="cpu")
        )
        counts[0] = ~is_healthy.to(device)
        with self._traffic.waiting():
            group.all_reduce(counts, purpose).wait()
        return counts[0] == 0, counts[1] > 0

    # Its end.

    def abandon(self) -> None:
        """End a step that can't be finished. Memory is as it was before it."""
        # Do not wait for messages in flight: if a member has died, that would delay the error until the
        # group's timeout. The next step waits (`drain`).
        self._scheduler.close()
        for bucket in self._buckets:
            bucket.is_in_flight, bucket.own_part = False, NO_GRADIENTS
            bucket.flat = bucket.by_rank = NO_GRADIENTS.flat
        self._buckets, self.is_open = [], False

    def drain(self) -> None:
        """Wait for the messages that were in flight when the step was abandoned."""
        for work in [*self._flags_work, *(work for _, work in self._reducing)]:
            with suppress(CommunicationError):
                work.wait()
        self._scheduler.drain()
