"""BucketPlans: the plan of each bucket, made when the bucket is opened and kept from step to step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TypeAlias

import torch

from thinwire.algorithms import Algorithm, AllReduce, BucketPlan
from thinwire.algorithms.registry import no_algorithm
from thinwire.comm import CALL, Traffic, Transport, agree
from thinwire.errors import ConfigError
from thinwire.plan import BUCKET_SEPARATOR, Plan, Route
from thinwire.sync.algorithm_state import AlgorithmState
from thinwire.sync.partition import NOTHING, BucketParts, IntraNodePartition, Specs
from thinwire.sync.settings import Settings
from thinwire.version import __version__

# Buckets that are kept open beside those of the last step.
MAX_IDLE_BUCKETS = 32

EXACT = AllReduce()

Parts: TypeAlias = Sequence[Sequence[Specs]]
"""The buckets of each part of a model whose parts are averaged in separate steps."""


@dataclass(eq=False)
class BucketState:
    """A bucket that is open: its plan, and whether a step is under way with it.

    What is done once for a bucket (processes compared, plan made, memory put in order) is in no later step's
    way: its adapter keeps this as long as it `is_current`. All buckets are closed when the algorithm, the
    members or the memory change.
    """

    specs: Specs  # in the order of their gradients
    plan: BucketPlan  # on a machine of several processes, of the part that this one averages
    parts: BucketParts | None = None  # how processes of a machine divide the bucket
    machine_bytes: int = 0  # that all of them send of it in a step, by the plan
    is_current: bool = True
    is_in_flight: bool = False  # whether a step is under way with it

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
        *,
        inter_node: Transport,
        partition: IntraNodePartition | None,
        parts: Parts,
    ) -> None:
        self.state, self.partition = state, partition
        self.device = torch.device("cpu")  # of the last bucket
        self.settings = self._settings = settings  # with this algorithm, on that device
        self.has_agreed = False
        self.last_used: Sequence[BucketState] = ()  # in the last step
        self._transport, self._traffic = transport, traffic
        self._inter_node = inter_node  # members may come and go: its size is asked for every plan
        self._has_parts = len(parts) > 1
        self._open: dict[Specs, BucketState] = {}
        self._buckets: tuple[Specs, ...] = ()  # of the last step; of parts, all
        self._plans: tuple[BucketPlan, ...] = ()
        self._model_plans: tuple[BucketPlan, ...] = ()  # before it, as if the model were one bucket
        self._printed: tuple[Sequence[BucketPlan], Plan] = ((), Plan(()))
        self._take(algorithm)
        if self._has_parts:
            self._buckets = tuple(bucket for part in parts for bucket in part)
            self._plans = tuple(self._prepared(bucket, partition) for bucket in self._buckets)

    def _take(self, algorithm: Algorithm) -> None:
        if not isinstance(algorithm, Algorithm):
            got = no_algorithm(algorithm)
            raise ConfigError(f"expected an algorithm such as thinwire.PowerSGD(matrix_rank=4), got {got}")
        if self.state.specs:  # else they are checked bucket by bucket, when those are opened
            algorithm.check_model(self.specs)
        # Last: what was refused above has changed nothing.
        self.algorithm: Algorithm = algorithm
        self.settings = self._settings.resolved(algorithm, self.device)
        self.state.may_remember |= algorithm.remembers
        if self.partition is not None:
            self.partition.divide(algorithm, self.specs)

    def use(self, algorithm: Algorithm) -> None:
        """Switch to a different algorithm, with the memory of the one before."""
        self._take(algorithm)
        self.close_all()
        if self._plans:  # before the first step no one knows what is stale
            self._forget_stale()
            for plan in self._plans:
                plan.on_state_loaded(self.state.memory)

    def move_to(self, device: torch.device) -> None:
        """Take note of the device that gradients are on."""
        self.device, self.settings = device, self._settings.resolved(self.algorithm, device)

    @property
    def specs(self) -> Specs:
        """All parameters that are known, in the order of the model."""
        return tuple(self.state.specs.values())

    # The plan.

    @property
    def plans(self) -> Sequence[BucketPlan]:
        """Those of the last step's buckets; before it, of the model as one bucket, and its statistics."""
        if not self._plans and not self._model_plans:
            partition = self.partition and self.partition.preview()
            self._model_plans = tuple(self._prepared(bucket, partition) for bucket in self._model_buckets())
        return self._plans or self._model_plans

    def _model_buckets(self) -> list[Specs]:
        parts = [tuple(spec for spec in self.specs if spec.is_statistic is kind) for kind in (False, True)]
        return [part for part in parts if part]

    @property
    def plan(self) -> Plan:
        """How each parameter travels, in the order of the model."""
        plans, plan = self._printed
        if plans is not self.plans:  # asked in every step, and seldom a new one
            order = {name: position for position, name in enumerate(self.state.specs)}
            routes = sorted(self._routes(), key=lambda route: order[route.names[0]])
            plan = Plan(tuple(routes), 1 if self.partition is None else self.partition.intra_node.size)
            self._printed = self.plans, plan
        return plan

    def _routes(self) -> Iterator[Route]:
        """Yield the routes of this process; on a machine of several, those of all of its processes."""
        if self.partition is None:
            for plan in self.plans:
                yield from plan.routes
            return
        partition = self.partition if self._buckets else self.partition.preview()
        for bucket in self._buckets or self._model_buckets():
            yield from partition.routes(bucket, self._planned)

    def _prepared(self, bucket: Specs, partition: IntraNodePartition | None) -> BucketPlan:
        """Plan a bucket, or what of it this process averages."""
        return self._planned(bucket if partition is None else partition.parts(bucket).own_specs)

    def _planned(self, specs: Specs) -> BucketPlan:
        if not specs:
            return NOTHING
        algorithm = EXACT if all(spec.is_statistic for spec in specs) else self.algorithm
        return algorithm.prepare(specs, num_members=self._inter_node.size)

    # Open buckets.

    def open_now(self) -> Mapping[Specs, BucketState]:
        """Return the buckets that are open."""
        return dict(self._open)

    def opened(self, specs: Specs) -> BucketState | None:
        """Return a bucket that is open; None if it is not."""
        return self._open.get(specs)

    def open_all(
        self, buckets: Mapping[Specs, torch.device], *, is_agreed: bool = False
    ) -> Mapping[Specs, BucketState]:
        """Return buckets, open. Collective where some were not: once, however many."""
        new = {specs: self._prepared(specs, self.partition) for specs in buckets if specs not in self._open}
        for specs in new:
            self.move_to(buckets[specs])
            if any(spec.name not in self.state.specs for spec in specs):
                self.state.specs.update((spec.name, spec) for spec in specs)
                self._model_plans = ()
        # Before the first message of any. If rank 0 had 4 bits and rank 1 low rank, their messages would have
        # other lengths: both would wait forever, or add up what does not belong together. And by a gather,
        # which is never taken for an average: if rank 0 opens a bucket and rank 1 sends one that is open, it
        # ends in a timeout that says what to look for.
        if new and not is_agreed:
            self._compare(list(new))
        if new:
            self.state.add_up_pending()
        for specs, plan in new.items():
            self._open_one(specs, plan, buckets[specs])
        return {specs: self._open[specs] for specs in buckets}

    def _open_one(self, specs: Specs, plan: BucketPlan, device: torch.device) -> None:
        state, parts, machine_bytes = self.state, None, 0
        if self.partition is not None:
            parts = self.partition.parts(specs)
            self.partition.hold(parts, plan.labels, state.memory, device)
            machine_bytes = sum(r.message_bytes for r in self.partition.routes(specs, self._planned))
        # After the comparison: if that refuses, what was loaded is still there to be saved or replaced.
        state.take_pending(specs, plan.labels, device)
        warning = plan.on_state_loaded(state.memory)
        if warning and state.unchecked is not None:
            warnings.warn(warning, stacklevel=6)
        self._open[specs] = BucketState(specs, plan, parts, machine_bytes)

    def note(self, used: Sequence[BucketState]) -> None:
        """Take note of the buckets of a step that has ended, if it had different ones than the last step."""
        self.last_used = used
        buckets = tuple(bucket.specs for bucket in used)
        if buckets != self._buckets and not self._has_parts:  # those of parts are known from the start
            self._buckets, self._plans = buckets, tuple(bucket.plan for bucket in used)
            self._forget_stale()
            self._close_oldest(used)

    def _close_oldest(self, used: Sequence[BucketState]) -> None:
        """Close the buckets not used for longest: some models use other parameters in each step."""
        # All members end the same steps in the same order, so they close the same buckets.
        for bucket in used:
            if self._open.get(bucket.specs) is bucket:  # else a new plan has closed it meanwhile
                self._open[bucket.specs] = self._open.pop(bucket.specs)
        idle = [bucket for bucket in self._open.values() if not bucket.is_in_flight]
        for bucket in idle[: max(0, len(idle) - MAX_IDLE_BUCKETS)]:
            bucket.is_current = False
            del self._open[bucket.specs]

    def close_all(self) -> None:
        """Close all buckets, and plan them again."""
        for bucket in self._open.values():
            bucket.is_current = False  # adapters keep them from step to step, and look at this
        self._open.clear()
        # Whatever has changed may have changed on some processes only, so they are compared again.
        self._model_plans, self.has_agreed = (), False
        self._plans = tuple(self._prepared(bucket, self.partition) for bucket in self._buckets)

    def _forget_stale(self) -> None:
        """Drop memory of routes that no longer exist: of earlier buckets, or of an earlier algorithm."""
        labels = {label for plan in self._plans for label in plan.labels}
        here = {spec.name for plan in self._plans for spec in plan.specs}
        for slot, tensors in self.state.memory.slots.items():
            # Anything elementwise is a parameter's, whatever the algorithm: any one sends the residual.
            for label in () if slot.is_elementwise else tensors.keys() - labels:
                if here.issuperset(label.split(BUCKET_SEPARATOR)):  # else of a parameter not used just now
                    del tensors[label]

    # Agreement.

    def agree(self, device: torch.device) -> None:
        """Refuse to go on where processes differ. Collective, once after each change."""
        if not self.has_agreed:
            self.move_to(device)
            self._compare(())
            self.has_agreed = True

    def agree_on(self, call: str, purpose: str) -> None:
        """Refuse a call where processes differ. Collective."""
        agree(self._transport, self.described(call, self.device, has_progress=True), purpose)

    def _compare(self, buckets: Sequence[Specs]) -> None:
        named = {
            f"bucket {number} with": ", ".join(spec.name for spec in specs)
            for number, specs in enumerate(buckets)
        }
        described = self.described("a step", self.device, has_progress=True) | named
        # It is not counted, for it is no gradient's message; but the host waits as for one.
        with self._traffic.waiting():
            agree(self._transport, described, f"step {self.state.steps}")

    def described(self, call: str, device: torch.device, *, has_progress: bool = False) -> dict[str, str]:
        """Return the facts that must be the same on every process before a call, by subject."""
        # The plan is not among it: it follows from the algorithm and the shapes.
        described = {CALL: call, "thinwire": __version__, "algorithm": type(self.algorithm).__name__}
        if is_dataclass(self.algorithm):
            for name, value in asdict(self.algorithm).items():
                if isinstance(value, tuple):  # of pairs: if some differ, only those are shown
                    described |= {f"{name} of {key}": repr(setting) for key, setting in value}
                else:
                    described[self.settings.typed.get(name, name)] = repr(value)
        described |= self.settings.described()
        kernels = {name for bucket in self._model_buckets() for name in self._planned(bucket).kernels(device)}
        if kernels:
            described["kernels of"] = " and ".join(sorted(kernels))
        if has_progress:
            described |= {
                "committed steps": str(self.state.memory.step),
                "steps that were not finite": str(self.state.nonfinite_steps),
                "loaded state": "none" if self.state.loaded_digest is None else str(self.state.loaded_digest),
                "averaged error": str(not self.state.unsynced_names),
            }
        for spec in self.specs:
            shape = "×".join(map(str, spec.shape)) or "scalar"
            dtype = str(spec.dtype).removeprefix("torch.")
            described[f"parameter {spec.name}"] = f"{shape} {dtype}, strides {spec.stride}"
            if spec.is_statistic:
                described[f"parameter {spec.name}"] += ", a buffer"
        return described
