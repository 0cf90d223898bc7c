"""Engine: the object that adapters drive. It opens buckets and begins steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from thinwire.algorithms import Algorithm, Memory
from thinwire.comm import Machines, Metered, Transport, Work, agree
from thinwire.errors import NonfiniteError, StepError
from thinwire.plan import ParameterSpec
from thinwire.sync.algorithm_state import AlgorithmState
from thinwire.sync.bucket_plans import BucketPlans, BucketState, Fragments
from thinwire.sync.clock import StepClock
from thinwire.sync.partition import IntraNodePartition, Specs
from thinwire.sync.precision import full_precision
from thinwire.sync.reporter import Reporter
from thinwire.sync.scheduler import CollectiveScheduler
from thinwire.sync.settings import Settings
from thinwire.sync.state import Position, SavedState, check_model, check_position, pack, read_state
from thinwire.sync.step import Step
from thinwire.sync.weights import Weights
from thinwire.tensors.accelerators import to_device_async

FlatBuckets: TypeAlias = Iterable[tuple[Specs, torch.Tensor]]
"""The parameters of each bucket, and their gradients, flat."""


class Engine:
    """Averages gradients over a group: it runs an algorithm on a model, over a transport.

    An adapter opens each bucket, begins a step and starts the buckets in it. The user's `GradientSync`
    wraps the engine.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        transport: Transport,
        specs: Iterable[ParameterSpec],
        settings: Settings = Settings(),  # noqa: B008 - frozen
        *,
        clock: StepClock | None = None,
        fragments: Fragments = (),
        machines: Machines | None = None,
    ) -> None:
        # `transport` connects all processes, for agreement and saving, uncounted. `inter_node` connects the
        # processes that this one averages with: all, or those of its local rank on other machines.
        self.transport = self.inter_node = transport
        # Which process of this machine averages which part; None if each averages whole buckets with all.
        self.partition: IntraNodePartition | None = None
        self.machines = machines
        if machines is not None:
            # Processes of a machine average different parts, so they must agree whether all are healthy.
            settings = replace(settings, health_group=machines.intra_node)
            self.inter_node = machines.inter_node
            self.partition = IntraNodePartition(machines.intra_node)
        self.clock = StepClock() if clock is None else clock
        self.traffic = self.clock.traffic
        self.metered = Metered(self.inter_node, self.traffic)
        self.wire: Transport = self.metered  # `thinwire.testing` may replace it between steps
        self.state = AlgorithmState(specs, self.inter_node, self.partition)
        self.buckets = BucketPlans(algorithm, self.state, settings, transport, self.traffic, fragments)
        self._weights: Weights | None = None
        if settings.weight is not None:
            intra_node = None if machines is None else machines.intra_node
            self._weights = Weights(settings.weight, self.metered, intra_node)
        self.reporter = Reporter(self.buckets, self.clock)
        self.num_dry = 0  # open `dry` contexts
        self.settle: Callable[[], object] = lambda: None  # ends a step whose means are still to be applied
        self._num_fragments = max(1, len(fragments))
        # Open steps, and abandoned ones until the next step begins: their messages may still be in flight.
        self._steps: list[Step] = []

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use."""
        return self.buckets.algorithm

    @property
    def settings(self) -> Settings:
        """The settings of steps, resolved for this algorithm and the last bucket's device."""
        return self.buckets.settings

    @property
    def specs(self) -> Specs:
        """All known parameters, in model order."""
        return self.buckets.specs

    @property
    def steps(self) -> int:
        """Steps so far, including those that were not finite."""
        return self.state.steps

    # Steps.

    def open(self, specs: Specs, device: torch.device) -> BucketState:
        """Return an open bucket; keep it while it `is_current`. Collective if it was not open."""
        bucket = self.buckets.bucket(specs)
        with self.clock.inside(), full_precision(device):
            self.buckets.open_all({bucket: device})
        return bucket

    def begin(self, *, pipelined: bool = False, in_turn: bool = False) -> Step:
        """Return a new step. Blocks while messages of abandoned steps are in flight.

        If `in_turn`, requests that a bucket makes together are sent one after the other.
        """
        # Backends match collectives by their order. If rank 0 began step 8 while a message of its abandoned
        # step 7 was in flight, rank 1's first message of step 8 would be added to that one. So an abandoned
        # step must end on all ranks before a new one begins. Until then the backend may also write its
        # messages, to the same memory as the gradients of the next pass.
        if self.state.torn:
            self.check_whole("a step")
        for step in tuple(self._steps):
            if not step.is_open:
                step.drain()
                self._steps.remove(step)
        # Count open steps too, so that errors of concurrent steps name different numbers.
        memory = self.state.memory
        committed = memory.step + len(self._steps)
        number = committed + self.state.nonfinite_steps
        if self._num_fragments > 1:
            # An algorithm counts turns over all fragments, which share the slots.
            memory = Memory(committed // self._num_fragments, memory.slots)
        pipelined = pipelined and self.buckets.algorithm.pipelines_buckets
        scheduler = CollectiveScheduler(self.wire, f"step {number}", pipelined=pipelined, in_turn=in_turn)
        step = Step(self.buckets, memory, scheduler, self.clock, self._ended, self.send_used, self._weights)
        self._steps.append(step)
        return step

    def _ended(self, step: Step, committed: bool) -> None:
        self._steps.remove(step)
        self.reporter.gradient_bytes += step.gradient_bytes
        for observer in tuple(self.reporter.observers):  # a copy: an observer may remove itself when called
            observer(committed)

    def start(self, buckets: FlatBuckets, *, pipelined: bool = False) -> Step:
        """Begin a step of buckets whose gradients are all ready, and send their first messages."""
        step = self.begin(pipelined=pipelined)
        try:
            with self.clock.inside():  # all at once: ready gradients wait for opening buckets
                ready = [(self.buckets.bucket(specs), flat) for specs, flat in buckets]
                self.buckets.open_all({bucket: flat.device for bucket, flat in ready})
                for bucket, flat in ready:
                    step.start(bucket, flat)
        # Also on an interrupt: buckets left in flight would make every later step raise.
        except BaseException:
            step.abandon()
            raise
        return step

    def average(self, buckets: FlatBuckets) -> bool:
        """Make one step of buckets whose gradients are all ready; return the result of `Step.finish`."""
        committed = self.start(buckets, pipelined=True).finish()
        self.raise_unless(committed)
        return committed

    def raise_unless(self, committed: bool) -> None:
        """Raise if the step was not committed and the user wants an error then."""
        if not committed and self.settings.on_nonfinite == "raise":
            raise NonfiniteError(
                f"step {self.steps - 1}: the mean gradients are not finite; the residual is unchanged, on "
                "all processes. Take no optimizer step; continue with the next batch, or end the run"
            )

    def abandon(self) -> None:
        """Drop all steps in progress. Memory is as it was before them."""
        for step in self._steps:
            step.abandon()

    def send_used(self, used: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Send which parameters this process used; the tensor will say which of them any process used."""
        # With only NCCL the flags are on the GPU, and to read them the host must wait for it.
        device, flags = self.metered.control_device, used.to(torch.uint8)
        flags = to_device_async(device, flags) if flags.device.type == "cpu" else flags.to(device)
        purpose = f"step {self.steps}, which parameters were used"
        if self.partition is not None:
            self.partition.intra_node.all_reduce(flags, purpose, operation="max").wait()
        # Not over `wire`: injected faults count the messages of buckets.
        return self.metered.all_reduce(flags, purpose, operation="max"), flags

    # Between steps.

    def check_whole(self, call: str) -> None:
        """Raise after a step that has written memory, but whose means did not arrive."""
        if self.state.torn:
            raise StepError(
                f"{call} was called after {self.state.torn} had written the residual, but failed before its "
                "means reached all processes; call load_state_dict() with the last checkpoint, on all "
                "processes"
            )

    def check_between_steps(self, call: str, *, also_dry: bool = True) -> None:
        """Raise during a backward pass, or inside `dry`, which would undo the call."""
        self.settle()
        if any(step.is_open and step.num_parameters for step in self._steps):
            raise StepError(
                f"{call} was called during a backward pass; call it between steps. If an exception has ended "
                "the pass on all processes, call abandon() first. If an averaging is in flight "
                "(delay_steps), call average() first"
            )
        if also_dry and self.num_dry:
            raise StepError(
                f"{call} was called inside dry(), which restores the algorithm's state at its end; call it "
                "outside dry()"
            )

    def regroup(self, error_scale: float = 1.0) -> None:
        """Adapt to a group with other members, or a model that was replaced. Between steps."""
        self.check_between_steps("regroup()")
        self.state.regroup(error_scale)
        self.buckets.close_all()
        self.reporter.forget_errors()

    # Saved state; `GradientSync` has more of it.

    def save(self) -> SavedState:
        """Return the state, the same on every process; see `GradientSync.state_dict`."""
        self.check_between_steps("state_dict()")
        self.check_whole("state_dict()")
        purpose, device = f"state_dict() after {self.steps} steps", self.buckets.device
        with full_precision(torch.device("cpu")):
            # First: if processes differ, none has changed its memory.
            described = self.buckets.described("state_dict()", device, has_progress=True)
            agree(self.transport, described, purpose)
            # Before residuals are averaged: the errors are computed from them.
            self.reporter.keep_errors()
            return self.state.save(self.algorithm, device, purpose)

    def state_dict(self) -> dict[str, Any]:
        """Return the result of `save`, packed."""
        return pack(self.save())

    def check_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool = True,
        position: Position | None = None,
        whole: Mapping[str, ParameterSpec] | None = None,
    ) -> SavedState:
        """Return the state that `load` would load, and change nothing.

        With a `position` the state may be one that this process has saved for itself. `whole` are the whole
        parameters, if this process has shards.
        """
        self.check_between_steps("load_state_dict()")
        loaded = read_state(state, self.algorithm.slots)
        if loaded.position is not None:
            check_position(loaded.position, position)
        specs = self.state.specs if whole is None or loaded.position is not None else whole
        check_model(loaded, specs, strict=strict)
        return loaded

    def load(self, loaded: SavedState) -> None:
        """Load the result of `check_state_dict`, or a part of it."""
        self.state.load(loaded)
        self.reporter.forget_errors()  # they belong to a step that this memory has not seen
        self.buckets.close_all()
        for plan in self.buckets.plans:
            warning = plan.on_state_loaded(self.state.memory)
            if warning:
                warnings.warn(warning, stacklevel=3)
