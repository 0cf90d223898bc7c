"""Engine: what adapters drive. It opens lanes, begins steps, keeps count, saves and loads."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from thinwire.algorithms import Algorithm, Memory, Slot
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import Machines, Metered, Traffic, Transport, agree
from thinwire.errors import NonfiniteError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync.checksum import with_checksum
from thinwire.sync.clock import StepClock
from thinwire.sync.lanes import Lane, Lanes, Parts, Remembered
from thinwire.sync.local_state import Position, is_local, own_state
from thinwire.sync.partition import Specs
from thinwire.sync.precision import full_precision
from thinwire.sync.scheduler import CollectiveScheduler
from thinwire.sync.settings import Settings
from thinwire.sync.state import LoadedState, average_local, checked_state, combine, fitting, packed_state
from thinwire.sync.stats import Stats
from thinwire.sync.step import Step
from thinwire.tensors import accelerators

logger = logging.getLogger(__name__)

FlatBuckets: TypeAlias = Iterable[tuple[Specs, torch.Tensor]]
"""The parameters of each bucket, and their gradients, flat."""


class Engine(Lanes):
    """Averages gradients over a group: an algorithm at work on a model, and the transport it uses.

    An adapter opens a lane for each bucket, begins a step and starts the lanes in it. The user's
    `GradientSync` stands before the engine.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        transport: Transport,
        specs: Iterable[ParameterSpec] = (),
        settings: Settings = Settings(),  # noqa: B008 - frozen
        *,
        traffic: Traffic | None = None,
        clock: StepClock | None = None,
        parts: Parts = (),
        machines: Machines | None = None,
    ) -> None:
        if machines is not None:
            # Processes of a machine average different parts, so they ask each other whether all are healthy.
            settings = replace(settings, together=machines.intra_node)
        # Counts the messages of steps. Agreement and checkpoint traffic goes through `transport`, and is
        # neither counted nor fault-injected.
        self.metered = Metered(transport if machines is None else machines.inter_node, traffic)
        super().__init__(algorithm, transport, self.metered.traffic, specs, settings, parts, machines)
        # Steps send through this; `thinwire.testing` puts something else in its place between steps.
        self.wire: Transport = self.metered
        self.clock = StepClock() if clock is None else clock
        # Are called after every step, with whether it was committed; see `thinwire.Watch`.
        self.observers: list[Callable[[bool], None]] = []
        # Open steps, and finished ones until the next step begins: their messages may still be in flight.
        self._steps: list[Step] = []
        self._gradient_bytes = 0
        # Puts the steps in between into the counts, for models that are averaged every few steps.
        self.compared: Callable[[Stats], Stats] = lambda stats: stats
        self._has_warned = False
        self._num_dry = 0  # contexts that are open
        self._kept_errors: tuple[dict[str, float], dict[str, float]] | None = None

    def __str__(self) -> str:
        transport, plan = self.transport, self.plan
        where = "this process alone"
        if transport.size > 1:
            where = f"{transport.size} processes, of which this is {transport.rank}"
        shards = self.settings.together
        if self.partition is None and shards is not None:
            where = f"{transport.size * shards.size} processes, {transport.size} replicas of {shards.size} "
            where += f"shards, of which this is shard {shards.rank} of replica {transport.rank}"
        if self.partition is not None:
            inter_node, intra_node = self.inter_node, self.partition.intra_node
            where = f"{inter_node.size} machines of {intra_node.size} processes, of which this is process "
            where += f"{intra_node.rank} of machine {inter_node.rank}"
        lines = [f"{self.algorithm} over {where}"]
        if plan.routes and transport.size > 1:
            compressed = [name for route in plan.routes if route.is_compressed for name in route.names]
            lines.append(
                f"plan: {len(compressed)} of {len(self.specs)} parameters compressed, "
                f"{plan.gradient_bytes:,} bytes per step become {plan.message_bytes:,}: "
                f"compression ratio {plan.compression_ratio:.1f}, rounds: {plan.rounds}"
            )
        return "\n".join([*lines, f"so far: {self.counts()}"])

    def use(self, algorithm: Algorithm) -> None:
        self.check_between_steps("use()")
        self._take(algorithm)
        self._close_all()
        if self._plans:  # before the first step no one knows what is stale
            self._forget_stale()
            for plan in self._plans:
                plan.on_state_loaded(self.memory)

    # Steps.

    def open(self, specs: Specs, device: torch.device, *, is_agreed: bool = False) -> Lane:
        """Return the lane of a bucket, to be kept while it `is_current`. Collective if it was not open."""
        with self.clock.inside(self.traffic), full_precision(device):
            return self.open_all({specs: device}, is_agreed=is_agreed)[specs]

    def begin(self, *, pipelined: bool = False) -> Step:
        """Return a new step; it blocks while messages of abandoned steps are under way."""
        # Backends match collectives by their order, so what an abandoned step has sent comes to its end on
        # all members before anything new. Until then its messages may be written, to the same memory as the
        # gradients of the next pass.
        self.check_whole("a step")
        for step in self._steps:
            if not step.is_open:
                step.drain()
        self._steps = [step for step in self._steps if step.is_open]
        # Count open steps too, so that errors of steps side by side name different numbers.
        number = self.steps + len(self._steps)
        exchange = CollectiveScheduler(self.wire, f"step {number}")
        self._steps.append(Step(self, exchange, self.clock, number, self._ended, pipelined=pipelined))
        return self._steps[-1]

    def start(self, buckets: FlatBuckets, *, pipelined: bool = False, is_agreed: bool = False) -> Step:
        """Begin a step of buckets whose gradients are all there, and send their first messages."""
        step = self.begin(pipelined=pipelined)
        try:
            with self.clock.inside(self.traffic):  # as one: what is ready waits for lanes to be opened
                ready = list(buckets)
                lanes = self.open_all({specs: flat.device for specs, flat in ready}, is_agreed=is_agreed)
                for specs, flat in ready:
                    step.start(lanes[specs], flat)
        # An interrupt, too: lanes left in flight would refuse every later step.
        except BaseException:
            step.abandon()
            raise
        return step

    def average(self, buckets: FlatBuckets, *, is_agreed: bool = False) -> bool:
        """Make one step of buckets whose gradients are all there; return what `Step.finish` does."""
        committed = self.start(buckets, pipelined=True, is_agreed=is_agreed).finish()
        self.raise_unless(committed)
        return committed

    def abandon(self) -> None:
        """Forget all steps under way. Memory is as it was before them."""
        for step in self._steps:
            step.abandon()

    def _ended(self, step: Step, committed: bool) -> None:
        self._gradient_bytes += step.gradient_bytes
        self._kept_errors = None  # they were of the step before
        for observer in tuple(self.observers):  # a copy: one may leave while it is called
            observer(committed)

    @contextmanager
    def dry(self) -> Iterator[Callable[[], None]]:
        self._check_no_step("dry()")
        before: Remembered | None = self.remembered()
        is_over = False

        def keep() -> None:
            nonlocal before
            if is_over:
                raise StepError("keep() was called after its dry() had ended; call it inside")
            before = None

        self._num_dry += 1
        try:
            yield keep
        finally:
            self._num_dry -= 1
            is_over = True
            if before is not None:
                self.go_back(before)
                self._kept_errors = None

    def check_whole(self, call: str) -> None:
        """Refuse a call after a step that has written memory, and whose means did not come."""
        if self.torn:
            raise StepError(
                f"{call} was called after {self.torn} had failed when its error memory was written already, "
                "and its means had not come to all processes; load_state_dict() of the last checkpoint, on "
                "all processes"
            )

    def check_between_steps(self, call: str) -> None:
        """Refuse a call during a backward pass, or where what it does would be taken back."""
        self._check_no_step(call)
        if self._num_dry:
            raise StepError(
                f"{call} was called inside dry(), at whose end memory is put back; call it outside"
            )

    def _check_no_step(self, call: str) -> None:
        if any(step.is_open and step.num_parameters for step in self._steps):
            raise StepError(
                f"{call} was called during a backward pass; call it between steps. If an exception has ended "
                "the pass on all processes, call abandon() first. If an averaging is in flight "
                "(delay_steps), call average() first"
            )

    # Steps that were not finite.

    def raise_unless(self, committed: bool) -> None:
        """Raise, if the user wants that of a step that was not committed."""
        if not committed and self.settings.on_nonfinite == "raise":
            raise NonfiniteError(
                f"step {self.steps - 1}: the mean gradients are not finite; the error memory is as before, "
                "on all processes alike. Take no optimizer step; go on with the next batch, or end the run"
            )

    def warn_of_nonfinite(self) -> None:
        """Say once what becomes of a step that is not finite; for adapters whose means the user applies."""
        # A scaler tries out how far it can go, and leaves out such steps.
        if self._has_warned or self.settings.is_skipped:
            return
        self._has_warned = True
        became, then = "zeros", "stats().nonfinite_steps counts such steps"
        if self.settings.on_nonfinite != "zero":
            became, then = (
                "NaN",
                "A GradScaler skips such a step; without one the optimizer makes the model NaN. If you use "
                'one, pass it as grad_scaler=; if not, choose on_nonfinite="zero" or "raise"',
            )
        words = (
            "within %d steps, the mean gradients of one were not finite, and became %s on all processes; the "
            "error memory stayed as it was. %s. This is not said again"
        )
        logger.warning(words, self.steps, became, then)

    # Counts.

    def stats(self) -> Stats:
        relative_error, error_norm = self._errors()
        unseen_steps, counts = self.unseen_nonfinite_steps(), self.counts()
        if unseen_steps:
            self.warn_of_nonfinite()
        nonfinite_steps = self.nonfinite_steps + unseen_steps
        return replace(
            counts, nonfinite_steps=nonfinite_steps, relative_error=relative_error, error_norm=error_norm
        )

    def counts(self) -> Stats:
        """Return `stats()` without errors, and without non-finite steps that the host has not seen."""
        traffic = self.traffic
        message_bytes = traffic.message_bytes if self.partition is None else traffic.machine_bytes
        counts = Stats(
            steps=self.steps,
            averagings=self.steps,
            members=traffic.members,
            nonfinite_steps=self.nonfinite_steps,
            messages=traffic.messages,
            rounds=traffic.rounds,
            message_bytes=message_bytes,
            inside_bytes=traffic.inside_bytes,
            gradient_bytes=self._gradient_bytes,
            waiting_seconds=traffic.waiting_seconds,
            arithmetic_seconds=self.clock.arithmetic_seconds,
            exposed_seconds=self.clock.exposed_seconds,
            shortfalls=tuple(self.shortfalls),
        )
        return self.compared(counts)

    def _errors(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return relative errors and error norms by route, as of the last step; read back at once."""
        if self._kept_errors is not None:
            return self._kept_errors
        diagnoses = [
            diagnosis for plan in self.plans if (diagnosis := plan.diagnose(self.memory)) is not None
        ]
        if not diagnoses:
            return {}, {}
        # All in one tensor: each number read by itself would make the host wait for the device.
        device = diagnoses[0].error_norms.device
        numbers = [
            torch.stack([diagnosis.relative_errors, diagnosis.error_norms]).to(device)
            for diagnosis in diagnoses
        ]
        labels = [label for diagnosis in diagnoses for label in diagnosis.labels]
        relative, norms = (dict(zip(labels, row, strict=True)) for row in torch.cat(numbers, dim=1).tolist())
        return relative, norms

    def memory_bytes(self) -> int:
        """Return the bytes of all that the algorithm remembers on this process."""
        slots = self.memory.slots.values()
        return sum(tensor.nbytes for tensors in slots for tensor in tensors.values())

    def residual_bytes(self) -> int:
        """Return the bytes that `state_dict` averages, exactly: of what differs between the processes."""
        return sum(
            tensor.nbytes
            for slot, tensors in self.memory.slots.items()
            if slot.is_local and slot.is_elementwise and slot.is_saved
            for tensor in tensors.values()
        )

    # The residual, for callers that move it from one engine to the next.

    def take_error(self, name: str) -> torch.Tensor | None:
        """Take the residual of a parameter, flat and unscaled, which is the caller's then; None if none.

        If processes of a machine share it, it is zeros for what others hold, and the rest times their number:
        its mean over the machine is the residual.
        """
        self.differing.add(name)
        # Other local memory belongs to this residual, and would be wrong beside a different one.
        for slot in self.memory.slots:
            if slot.is_local and slot != ERROR:
                self.memory[slot].pop(name, None)
        error = self.memory[ERROR].pop(name, None)
        if error is None or self.partition is None:
            return error
        whole = error.new_zeros(self.known_specs[name].numel)
        whole[self.partition.held(name)] = error * self.partition.intra_node.size
        return whole

    def put_error(self, name: str, error: torch.Tensor) -> None:
        """Make a tensor the residual of a parameter; of what `take_error` has returned, or a part of it."""
        self.differing.add(name)
        self.may_remember = True
        if self.partition is not None:
            error = error[self.partition.held(name)] / self.partition.intra_node.size
        self.memory[ERROR][name] = error

    # Members that come and go.

    def regroup(self, error_scale: float = 1.0) -> None:
        """Go on with a group that has other members, or a model that was taken over. Between steps."""
        self.check_between_steps("regroup()")
        for slot, tensors in self.memory.slots.items():
            for tensor in tensors.values() if slot.is_local and slot.is_elementwise else ():
                tensor.mul_(error_scale)
        # Only some members may have loaded a state or averaged their residuals; both must be the same on all
        # members, so reset them.
        self._loaded_checksum, self.differing = None, set(self.known_specs)
        self._close_all()
        self._kept_errors = None

    def common_state(self) -> dict[str, Any]:
        """Return the state without what differs between processes, for one that joins; no message is sent."""
        common = {slot: tensors for slot, tensors in self.memory.slots.items() if not slot.is_local}
        return self._packed(Memory(self.memory.step, common), {})

    def error_norm(self) -> float:
        """Return the norm of this process's residual. Cost: a norm, and a host synchronisation."""
        errors = [
            error.to(accelerators.widest_dtype(error.device)).norm() for error in self.memory[ERROR].values()
        ]
        return float(torch.stack(errors).norm()) if errors else 0.0

    # Saved state.

    def state_dict(self) -> dict[str, Any]:
        self.check_between_steps("state_dict()")
        self.check_whole("state_dict()")
        purpose = f"state_dict() after {self.steps} steps"
        with full_precision(torch.device("cpu")):
            # First of all: if processes differ, none has changed its memory.
            agree(self.transport, self.described("state_dict()", self.device, has_progress=True), purpose)
            # Before the residual is averaged, which changes what they are made of.
            self._kept_errors = self._errors()
            self._drop_unsaved()
            if self.differing:
                # Only those: what has been averaged and is averaged again may change in its last bits, and of
                # parameters whose bucket has not come since a load nothing is in memory.
                specs = [spec for name, spec in self.known_specs.items() if name in self.differing]
                if self.partition is not None:
                    specs = self.partition.held_parts(specs)
                average_local(self.memory, specs, self.device, self.inter_node, purpose)
            if self.unclaimed_of != "all":
                self.add_up_unclaimed()
                combine(self.unclaimed, self.inter_node, "mean", purpose, names=self.differing)
                self.unclaimed_of = "all"
            self.differing.clear()
            if self.partition is None:
                return self._packed(self.memory, self.unclaimed)
            unclaimed = {slot.name: tensors for slot, tensors in self.unclaimed.items()}
            return self.partition.whole_state(self._packed(self.memory, {}), self.known_specs, unclaimed)

    def local_state_dict(self) -> dict[str, Any]:
        self.check_between_steps("local_state_dict()")
        self.check_whole("local_state_dict()")
        partition, common = self.partition, self.common_state()
        with full_precision(torch.device("cpu")):
            self._drop_unsaved()
            if partition is None:
                own = self._packed(self.memory, self.unclaimed)
            else:
                # The processes of a machine are added up: what all of them have loaded is saved by one.
                is_saved_here = self.unclaimed_of == "process" or partition.intra_node.rank == 0
                unclaimed = {slot.name: tensors for slot, tensors in self.unclaimed.items() if is_saved_here}
                own = self._packed(self.memory, {})
                own = partition.whole_state(own, self.known_specs, unclaimed, of_all=False)
                common = self._packed(Memory(self.memory.step), {})  # they remember different parts
        return with_checksum(
            {
                "own": own,
                **self.position._asdict(),
                "differing": tuple(sorted(self.differing)),
                "common": common["checksum"],
            }
        )

    def _drop_unsaved(self) -> None:
        """Drop what a resumed run won't have: both must continue bit for bit alike."""
        for slot, tensors in self.memory.slots.items():
            if slot.is_local and not slot.is_saved:
                tensors.clear()

    def _packed(self, memory: Memory, unclaimed: Mapping[Slot, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        specs = self.known_specs
        if self.partition is not None:
            specs = {part.name: part for part in self.partition.held_parts(specs.values())}
        skipped_steps = self.nonfinite_steps
        return packed_state(
            self.algorithm, memory, specs, self.shapes, unclaimed, skipped_steps=skipped_steps
        )

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        if is_local(state):
            self.load_local(state, self.position, strict=strict)
        else:
            self.load(self.check_state_dict(state, strict=strict))

    @property
    def position(self) -> Position:
        """Which process this is."""
        local_rank, local_size = 0, 1
        if self.partition is not None:
            local_rank, local_size = self.partition.intra_node.rank, self.partition.intra_node.size
        return Position(self.transport.rank, self.transport.size, local_rank, local_size, self.machines)

    def load_local(self, state: Mapping[str, Any], position: Position, *, strict: bool = True) -> None:
        """Go on from what a process has saved for itself, if it is this one."""
        own = own_state(state, position)
        loaded = self.check_state_dict(own, strict=strict)
        # All members compare what is the same in their files.
        self.load(loaded._replace(checksum=state["common"]))
        self.differing, self.unclaimed_of = set(state["differing"]), "process"

    def load(self, loaded: LoadedState) -> None:
        """Go on from what `check_state_dict` has returned, or a part of it.

        If the parameters are not known yet, whether it is of this model shows at the first step.
        """
        loaded = fitting(loaded, self.known_specs if self.all_known else None)
        slots = {slot: dict(tensors) for slot, tensors in loaded.slots.items()}
        self.memory = Memory(
            loaded.step, {s: tensors for s, tensors in slots.items() if not s.is_elementwise}
        )
        # Into memory when lanes are opened: its order there, and the device, are not known before.
        self.unclaimed = {s: tensors for s, tensors in slots.items() if s.is_elementwise}
        self.unclaimed_of = "all"
        if self.partition is not None:
            self.partition.forget()
        self.may_remember, self.torn = True, ""
        self.nonfinite_steps, self._unseen, self._unseen_nonfinite = loaded.skipped_steps, [], 0
        self.differing, self._loaded_checksum = set(), loaded.checksum
        self._kept_errors = None  # they were of a step that this memory has not seen
        self._close_all()
        self._unchecked = None if self.all_known else loaded
        for plan in self.plans if self.all_known else ():
            warning = plan.on_state_loaded(self.memory)
            if warning:
                warnings.warn(warning, stacklevel=4)

    def check_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool = True,
        specs: Mapping[str, ParameterSpec] | None = None,
    ) -> LoadedState:
        """Return the state that `load_state_dict` would load, and change nothing."""
        self.check_between_steps("load_state_dict()")
        if specs is None and self.all_known:
            specs = self.known_specs
        return checked_state(state, specs, slots=self.algorithm.slots, strict=strict)
