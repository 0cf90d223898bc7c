"""BucketPlans: the plan of each bucket, made when the bucket is opened and kept from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TypeAlias

import torch

from thinwire.algorithms import Algorithm, AllReduce, Bucket, BucketPlan
from thinwire.algorithms.registry import no_algorithm
from thinwire.comm import CALL, Traffic, Transport, agree
from thinwire.errors import ConfigError
from thinwire.sync.algorithm_state import AlgorithmState
from thinwire.sync.partition import NOTHING, BucketParts, IntraNodePartition, Specs
from thinwire.sync.precision import full_precision
from thinwire.sync.settings import Settings
from thinwire.version import __version__

# How many buckets are kept open in addition to those of the last step.
MAX_IDLE_BUCKETS = 32

EXACT, NO_GRADIENTS = AllReduce(), Bucket((), torch.empty(0, device="cpu"))

Fragments: TypeAlias = Sequence[Sequence[Specs]]
"""The buckets of each fragment of a model, if fragments are averaged in separate steps."""


@dataclass(eq=False)
class BucketState:
    """A bucket, kept from step to step: its plan once it is open, and its gradients during a step.

    Opening compares processes, makes the plan and adapts memory, once for all steps: the adapter keeps this
    object while it `is_current`. All buckets are closed when the algorithm, the members or the memory change.
    """

    specs: Specs  # in the order of their gradients
    is_current: bool = True
    is_open: bool = False
    is_in_flight: bool = False  # whether a step in progress has it
    # Once it is open.
    plan: BucketPlan = NOTHING  # on a machine of several processes, for the part that this one averages
    parts: BucketParts | None = None  # how processes of a machine divide the bucket
    machine_bytes: int = 0  # the plan's bytes that all of them send for it in a step
    # While it is in flight.
    flat: torch.Tensor = NO_GRADIENTS.flat
    by_rank: torch.Tensor = NO_GRADIENTS.flat  # on a machine of several processes, ordered by local rank
    own_part: Bucket = NO_GRADIENTS  # the part of `flat` that this process averages, once it is sent

    def __post_init__(self) -> None:
        self.names = frozenset(spec.name for spec in self.specs)


class BucketPlans:
    """Opens buckets, after all processes have agreed on them, and plans them with the algorithm in use."""

    def __init__(
        self,
        algorithm: Algorithm,
        state: AlgorithmState,
        settings: Settings,
        transport: Transport,
        traffic: Traffic,
        fragments: Fragments = (),
    ) -> None:
        self.state, self.partition, self.inter_node = state, state.partition, state.inter_node
        self.device = torch.device("cpu")  # of the last bucket
        self.settings = self._settings = settings  # resolved for this algorithm and device
        self.has_agreed = False
        self.specs_of_last: tuple[Specs, ...] = ()  # the last step's buckets; with fragments, all buckets
        self.transport, self._traffic, self._has_fragments = transport, traffic, len(fragments) > 1
        self._buckets: dict[Specs, BucketState] = {}  # the current ones
        self._plans: tuple[BucketPlan, ...] = ()  # see `plans`; () if they must be made again
        self._set_algorithm(algorithm)
        if self._has_fragments:
            self.specs_of_last = tuple(specs for fragment in fragments for specs in fragment)
            self._plans = tuple(self._plan_part(specs, self.partition) for specs in self.specs_of_last)

    def _set_algorithm(self, algorithm: Algorithm) -> None:
        if not isinstance(algorithm, Algorithm):
            got = no_algorithm(algorithm)
            raise ConfigError(f"expected an algorithm such as thinwire.PowerSGD(matrix_rank=4), got {got}")
        algorithm.check_model(self.specs)
        # Last, so that nothing has changed if anything above raises.
        self.algorithm: Algorithm = algorithm
        self.settings = self._settings.resolved(algorithm, self.device)
        self.state.may_remember |= algorithm.remembers
        if self.partition is not None:
            self.partition.divide(algorithm, self.specs)

    def use(self, algorithm: Algorithm) -> None:
        """Switch to a different algorithm, and keep the memory."""
        self._set_algorithm(algorithm)
        self.close_all()
        if self.specs_of_last:  # before the first step it is unknown what is stale
            self._forget_stale()
            for plan in self._plans:
                plan.on_state_loaded(self.state.memory)

    def move_to(self, device: torch.device) -> None:
        """Set the gradients' device."""
        self.device, self.settings = device, self._settings.resolved(self.algorithm, device)

    # Plans.

    @property
    def specs(self) -> Specs:
        """All known parameters, in model order."""
        return tuple(self.state.specs.values())

    @property
    def plans(self) -> Sequence[BucketPlan]:
        """Plans of the last step's buckets; before the first step, of the model as in `model_buckets`."""
        if not self._plans:
            partition = self.partition and self.partition.preview()
            self._plans = tuple(self._plan_part(specs, partition) for specs in self.model_buckets())
        return self._plans

    def model_buckets(self) -> list[Specs]:
        """Return the model as one bucket, and its statistics as another."""
        parts = [tuple(spec for spec in self.specs if spec.is_statistic is kind) for kind in (False, True)]
        return [part for part in parts if part]

    def plan(self, specs: Specs) -> BucketPlan:
        """Plan a bucket, or a part of it."""
        if not specs:
            return NOTHING
        algorithm = EXACT if all(spec.is_statistic for spec in specs) else self.algorithm
        return algorithm.prepare(specs, num_members=self.inter_node.size)  # the size may change

    def _plan_part(self, specs: Specs, partition: IntraNodePartition | None) -> BucketPlan:
        """Plan the part of a bucket that this process averages."""
        if partition is not None:
            parts = partition.parts(specs)
            specs = parts.specs_of(parts.local_rank)
        return self.plan(specs)

    # Open buckets.

    def bucket(self, specs: Specs) -> BucketState:
        """Return the bucket of some parameters, open or not."""
        if specs not in self._buckets:
            self._buckets[specs] = BucketState(specs)
        return self._buckets[specs]

    def open_buckets(self) -> Mapping[Specs, BucketState]:
        return {specs: bucket for specs, bucket in self._buckets.items() if bucket.is_open}

    def open_all(self, devices: Mapping[BucketState, torch.device]) -> None:
        """Open buckets. Collective, once for all, if some were not open and `agree` was not called."""
        new = [bucket for bucket in devices if not bucket.is_open]
        if not new:
            return
        state, plans = self.state, [self._plan_part(bucket.specs, self.partition) for bucket in new]
        for bucket in new:
            self.move_to(devices[bucket])
            # A parameter frozen between the construction of DDP and `attach` is still in its bucket.
            if not bucket.names <= state.specs.keys():
                state.specs.update((spec.name, spec) for spec in bucket.specs)
                if not self.specs_of_last:
                    self._plans = ()
        # Compare before the first message. If rank 0 had 4 bits and rank 1 low rank, their messages would
        # differ in length: both would wait forever, or sum unrelated data. Compare with a gather, which never
        # matches an all-reduce: if rank 0 opens a bucket and rank 1 sends an open one, both time out, with an
        # error that says what to look for.
        if not self.has_agreed:
            self._compare(new)
        state.add_up_pending()
        for bucket, plan in zip(new, plans, strict=True):
            if self.partition is not None:
                parts = bucket.parts = self.partition.parts(bucket.specs)
                self.partition.hold(parts, state.memory, devices[bucket])
                # Drop what was loaded for the other processes of the machine.
                state.forget_routes(bucket.names, plan.labels)
                planned = [self.plan(parts.specs_of(rank)) for rank in range(len(parts.lengths))]
                bucket.machine_bytes = sum(r.message_bytes for whole in planned for r in whole.routes)
            # After the comparison: if it raises, the loaded state can still be saved or replaced.
            state.take_pending(bucket.specs, plan.labels, devices[bucket])
            plan.on_state_loaded(state.memory)
            bucket.plan, bucket.is_open = plan, True
            # At the end of the order, independent of when this process has first seen the bucket.
            self._buckets[bucket.specs] = self._buckets.pop(bucket.specs, bucket)

    def note(self, used: Sequence[BucketState]) -> None:
        """Record the buckets of a step that has ended, which differ from those of the step before."""
        if self._has_fragments:  # whose buckets are known from the start
            return
        self.specs_of_last = tuple(bucket.specs for bucket in used)
        self._plans = tuple(bucket.plan for bucket in used)
        self._forget_stale()
        # Close the least recently used: some models use other parameters in each step. All members end the
        # same steps in the same order, so they close the same buckets.
        for bucket in used:
            if self._buckets.get(bucket.specs) is bucket:  # otherwise a new plan has closed it
                self._buckets[bucket.specs] = self._buckets.pop(bucket.specs)
        idle = [bucket for bucket in self.open_buckets().values() if not bucket.is_in_flight]
        for bucket in idle[: max(0, len(idle) - MAX_IDLE_BUCKETS)]:
            bucket.is_current = False
            del self._buckets[bucket.specs]

    def close_all(self) -> None:
        """Close all buckets, and plan them again."""
        for bucket in self._buckets.values():
            bucket.is_current = False  # adapters keep buckets from step to step, and check this
        self._buckets.clear()
        self.has_agreed = False  # the change may have happened on some processes only, so compare again
        self._plans = tuple(self._plan_part(specs, self.partition) for specs in self.specs_of_last)

    def _forget_stale(self) -> None:
        """Drop memory of routes that no longer exist, from earlier buckets or an earlier algorithm."""
        # Not those of parameters that are just unused now.
        names = {spec.name for plan in self._plans for spec in plan.specs}
        self.state.forget_routes(names, {label for plan in self._plans for label in plan.labels})

    # Agreement.

    def agree(self, device: torch.device) -> None:
        """Raise on all processes if they differ. Collective, once after each change."""
        if not self.has_agreed:
            self.move_to(device)
            self._compare(())
            self.has_agreed = True

    def _compare(self, buckets: Sequence[BucketState]) -> None:
        described = self.described("a step", self.device, has_progress=True)
        for number, bucket in enumerate(buckets):
            described[f"bucket {number}"] = "with " + ", ".join(spec.name for spec in bucket.specs)
        # Count the wait, but not the message: it carries no gradients.
        with self._traffic.waiting():
            agree(self.transport, described, f"step {self.state.steps}")

    def described(self, call: str, device: torch.device, *, has_progress: bool = False) -> dict[str, str]:
        """Return the facts that must be the same on every process before a call, by subject."""
        # The plan is left out: it follows from the algorithm and the shapes.
        described = {CALL: call, "thinwire": __version__, "algorithm": type(self.algorithm).__name__}
        if is_dataclass(self.algorithm):
            for name, value in asdict(self.algorithm).items():
                if isinstance(value, tuple):  # pairs: an error then shows only those that differ
                    described |= {f"{name} of {key}": repr(setting) for key, setting in value}
                else:
                    described[self.settings.names_given.get(name, name)] = repr(value)
        described |= self.settings.described()
        with full_precision(device):  # as in a step: names may depend on the bits of products
            kernels = {name for bucket in self.model_buckets() for name in self.plan(bucket).kernels(device)}
        if kernels:
            described["kernels"] = "of " + " and ".join(sorted(kernels))
        if has_progress:
            loaded = self.state.loaded_digest
            described |= {
                "committed": f"{self.state.memory.step} steps",
                "skipped": f"{self.state.nonfinite_steps} steps that were not finite",
                "loaded": "no state" if loaded is None else f"a state with checksum {loaded}",
                "averaged": "not every residual" if self.state.unsynced_names else "every residual",
            }
        for spec in self.specs:
            shape = "×".join(map(str, spec.shape)) or "scalar"
            dtype = str(spec.dtype).removeprefix("torch.")
            statistic = ", a buffer" if spec.is_statistic else ""
            described[f"parameter {spec.name}"] = f"{shape} {dtype}, strides {spec.stride}{statistic}"
        return described
