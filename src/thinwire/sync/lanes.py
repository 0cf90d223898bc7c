"""Plans and memory of an engine, bucket by bucket."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch

from thinwire.algorithms import Algorithm, AllReduce, BucketPlan, Memory, Slot
from thinwire.algorithms.registry import no_algorithm
from thinwire.comm import CALL, Machines, Traffic, Transport, agree
from thinwire.errors import ConfigError
from thinwire.plan import BUCKET_SEPARATOR, ParameterSpec, Plan, Route
from thinwire.sync.partition import NOTHING, BucketParts, IntraNodePartition, Ranges, Specs
from thinwire.sync.settings import Settings
from thinwire.sync.state import LoadedState, check_model, combine, in_memory_order
from thinwire.version import __version__


@dataclass(eq=False)
class Lane:
    """The route of one bucket's gradients, step by step.

    What is done once for a bucket (processes compared, plan made, memory put in order) is in no later step's
    way: its adapter keeps the lane as long as it `is_current`. The engine closes its lanes when its
    algorithm, its members or its memory change.
    """

    specs: Specs  # in the order of their gradients
    plan: BucketPlan  # on a machine of several processes, of the part that this one averages
    parts: BucketParts | None = None  # how processes of a machine divide the bucket
    machine_bytes: int = 0  # that all of them send of it in a step, by the plan
    is_current: bool = True
    is_in_flight: bool = False  # whether a step is under way in it


# Steps of which the host does not learn whether they were finite.
COUNTED_TOGETHER = 256

# Lanes that are kept open beside those of the last step.
MAX_IDLE_LANES = 32

EXACT = AllReduce()

Parts: TypeAlias = Sequence[Sequence[Specs]]
"""The buckets of each part of a model whose parts are averaged in separate steps."""


class Remembered(NamedTuple):
    """All that steps change, as it was at one time."""

    memory: Memory
    unclaimed: dict[Slot, dict[str, torch.Tensor]]
    held: dict[str, Ranges]  # parts of parameters, if processes of a machine share the work
    lanes: dict[Specs, Lane]
    differing: set[str]
    nonfinite: tuple[int, list[torch.Tensor], torch.Tensor | int]


class Lanes:
    """Plans and memory of an `Engine`: a lane for each bucket, closed if what it is made of changes."""

    def __init__(
        self,
        algorithm: Algorithm,
        transport: Transport,
        traffic: Traffic,
        specs: Iterable[ParameterSpec],
        settings: Settings,
        parts: Parts,
        machines: Machines | None,
    ) -> None:
        self.transport, self.traffic, self._settings = transport, traffic, settings
        # Which process of this machine averages what; None if each averages whole buckets with all.
        self.partition = None if machines is None else IntraNodePartition(machines.intra_node)
        # With whom this process averages: all, or those of its place on the other machines.
        self.inter_node = transport if machines is None else machines.inter_node
        self.machines = None if machines is None else machines.rows
        self.known_specs = {spec.name: spec for spec in specs}  # in the order of the model
        self.all_known = bool(self.known_specs)
        self.memory = Memory()
        self.nonfinite_steps = 0  # as far as the host knows
        self.torn = ""  # the step that has written memory, and whose means did not come
        self.differing: set[str] = set()  # parameters whose local slots have changed since they were averaged
        self.device = torch.device("cpu")  # of the last bucket
        self.shortfalls: dict[str, None] = {}  # why slower kernels than the device's have served steps
        self.may_remember = False  # whether some process of this machine may have something in memory
        self.has_agreed = False
        self.num_parts = max(1, len(parts))  # that are averaged in separate steps
        # Loaded and not in memory yet, by slot and parameter, in the parameter's shape.
        self.unclaimed: dict[Slot, dict[str, torch.Tensor]] = {}
        # They belong to all as a mean, to each machine, or to each process, of which a machine has a sum.
        self.unclaimed_of: Literal["all", "machine", "process"] = "all"
        self._unseen: list[torch.Tensor] = []  # which steps were healthy
        self._unseen_nonfinite: torch.Tensor | int = 0  # of those no longer there
        self._open: dict[Specs, Lane] = {}
        self._buckets: tuple[Specs, ...] = ()  # of the last step; of parts, all
        self._plans: tuple[BucketPlan, ...] = ()
        self._model_plans: tuple[BucketPlan, ...] = ()  # before it, as if the model were one bucket
        self._shown: tuple[Sequence[BucketPlan], Plan] = ((), Plan(()))
        self._unchecked: LoadedState | None = None
        self._loaded_checksum: str | None = None
        self._take(algorithm)
        if self.num_parts > 1:
            self._buckets = tuple(bucket for part in parts for bucket in part)
            self._plans = tuple(self._prepared(bucket, self.partition) for bucket in self._buckets)

    def _take(self, algorithm: Algorithm) -> None:
        if not isinstance(algorithm, Algorithm):
            got = no_algorithm(algorithm)
            raise ConfigError(f"expected an algorithm such as thinwire.PowerSGD(matrix_rank=4), got {got}")
        if self.known_specs:  # else they are checked bucket by bucket, when lanes are opened
            algorithm.check_model(self.specs)
        # Last: what was refused above has changed nothing.
        self.algorithm: Algorithm = algorithm
        self.may_remember |= algorithm.remembers
        if self.partition is not None:
            self.partition.divide(algorithm, self.specs)

    @property
    def settings(self) -> Settings:
        """How steps are treated, with this algorithm, on the device of the last bucket."""
        return self._settings.decided(self.algorithm, self.device)

    @property
    def specs(self) -> Specs:
        """All parameters that are known, in the order of the model."""
        return tuple(self.known_specs.values())

    @property
    def steps(self) -> int:
        """Steps so far, those that were not finite included."""
        return self.memory.step + self.nonfinite_steps

    def memory_at(self, step: int) -> Memory:
        """Return the memory for a step, with the count that the algorithm goes by: of turns of all parts."""
        if self.num_parts == 1:
            return self.memory
        # The same slots: what is written behind the commit is written for all parts.
        return Memory((step - self.nonfinite_steps) // self.num_parts, self.memory.slots)

    def count_unseen(self, is_healthy: torch.Tensor) -> None:
        """Count a step of which the host does not learn whether it was finite."""
        # Added up where they are, since to read one makes the host wait; and seldom, since each sum is a
        # launch.
        self._unseen.append(is_healthy)
        if len(self._unseen) == COUNTED_TOGETHER:
            self._unseen_nonfinite = self._recent_nonfinite() + self._unseen_nonfinite
            self._unseen = []

    def unseen_nonfinite_steps(self) -> int:
        """Return how many of those were not. Cost: a host synchronisation, if there were any."""
        recent = self._recent_nonfinite() if self._unseen else 0
        return int(recent + self._unseen_nonfinite)

    def _recent_nonfinite(self) -> torch.Tensor:
        device = self._unseen[-1].device
        return (~torch.stack([is_healthy.to(device) for is_healthy in self._unseen])).sum()

    # Going back, as if the steps since then had not been made.

    def remembered(self) -> Remembered:
        """Return copies of all that steps change."""
        labels = {label for tensors in self.memory.slots.values() for label in tensors}
        return Remembered(
            self.memory.copied(labels),
            {
                slot: {label: tensor.clone() for label, tensor in tensors.items()}
                for slot, tensors in self.unclaimed.items()
            },
            {} if self.partition is None else self.partition.held_of_all(),
            dict(self._open),
            set(self.differing),
            (self.nonfinite_steps, list(self._unseen), self._unseen_nonfinite),
        )

    def go_back(self, before: Remembered) -> None:
        """Remember again what `remembered` has returned."""
        self.memory.restore(before.memory)
        self.differing = before.differing
        self.nonfinite_steps, self._unseen, self._unseen_nonfinite = before.nonfinite
        # Lanes that were opened since then have made memory fit their plans.
        if self._open != before.lanes:
            self.unclaimed = before.unclaimed
            if self.partition is not None:
                self.partition.hold_again(before.held)
            self._close_all()

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
        plans, plan = self._shown
        if plans is not self.plans:  # asked in every step, and seldom a new one
            order = {name: position for position, name in enumerate(self.known_specs)}
            routes = sorted(self._routes(), key=lambda route: order[route.names[0]])
            plan = Plan(tuple(routes), 1 if self.partition is None else self.partition.intra_node.size)
            self._shown = self.plans, plan
        return plan

    def _routes(self) -> list[Route]:
        """Return the routes of this process; on a machine of several, those of all of its processes."""
        if self.partition is None:
            return [route for plan in self.plans for route in plan.routes]
        partition = self.partition if self._buckets else self.partition.preview()
        buckets = self._buckets or self._model_buckets()
        return [route for bucket in buckets for route in partition.routes(bucket, self._planned)]

    def _close_all(self) -> None:
        """Close all lanes, and plan their buckets again."""
        for lane in self._open.values():
            lane.is_current = False  # adapters keep their lanes from step to step, and look at this
        self._open.clear()
        # Whatever has changed may have changed on some processes only, so they are compared again.
        self._model_plans, self.has_agreed = (), False
        self._plans = tuple(self._prepared(bucket, self.partition) for bucket in self._buckets)

    def _prepared(self, bucket: Specs, partition: IntraNodePartition | None) -> BucketPlan:
        """Plan a bucket, or what of it this process averages."""
        return self._planned(bucket if partition is None else partition.parts(bucket).own_specs)

    def _planned(self, specs: Specs) -> BucketPlan:
        if not specs:
            return NOTHING
        algorithm = EXACT if all(spec.is_statistic for spec in specs) else self.algorithm
        return algorithm.prepare(specs, num_members=self.inter_node.size)

    def note(self, lanes: Sequence[Lane], *, committed: bool) -> None:
        """Take note of a step that has ended, and of its buckets."""
        if committed:
            self.memory.step += 1
            self.differing.update(spec.name for lane in lanes for spec in lane.specs)
        else:
            self.nonfinite_steps += 1
        buckets = tuple(lane.specs for lane in lanes)
        if buckets != self._buckets and self.num_parts == 1:  # those of parts are known from the start
            self._buckets, self._plans = buckets, tuple(lane.plan for lane in lanes)
            self._forget_stale()
            self._close_oldest(lanes)

    def _close_oldest(self, used: Sequence[Lane]) -> None:
        """Close the lanes that were not used for longest: some models use other parameters in each step."""
        # All members end the same steps in the same order, so they close the same lanes.
        for lane in used:
            if self._open.get(lane.specs) is lane:  # else a new plan has closed it meanwhile
                self._open[lane.specs] = self._open.pop(lane.specs)
        idle = [lane for lane in self._open.values() if not lane.is_in_flight]
        for lane in idle[: max(0, len(idle) - MAX_IDLE_LANES)]:
            lane.is_current = False
            del self._open[lane.specs]

    def _forget_stale(self) -> None:
        """Drop memory of routes that no longer exist: of earlier buckets, or of an earlier algorithm."""
        labels = {label for plan in self._plans for label in plan.labels}
        here = {spec.name for plan in self._plans for spec in plan.specs}
        for slot, tensors in self.memory.slots.items():
            # Anything elementwise is a parameter's, whatever the algorithm: any one sends the residual.
            for label in () if slot.is_elementwise else tensors.keys() - labels:
                if here.issuperset(label.split(BUCKET_SEPARATOR)):  # else of a parameter not used just now
                    del tensors[label]

    # Lanes.

    def opened(self, specs: Specs) -> Lane | None:
        """Return the lane of a bucket; None if it is not open."""
        return self._open.get(specs)

    def open_all(
        self, buckets: Mapping[Specs, torch.device], *, is_agreed: bool = False
    ) -> Mapping[Specs, Lane]:
        """Return the lanes of buckets. Collective where some were not open: once, however many."""
        new = {specs: self._prepared(specs, self.partition) for specs in buckets if specs not in self._open}
        for specs in new:
            self.device = buckets[specs]
            if any(spec.name not in self.known_specs for spec in specs):
                self.known_specs.update((spec.name, spec) for spec in specs)
                self._model_plans = ()
        # Before the first message of any: members whose messages have other lengths would wait forever, or
        # add up what does not belong together. And by a gather, which is never taken for an average: where
        # only some come here, it ends in a timeout that says what to look for.
        if new and not is_agreed:
            self._compare(list(new))
        if new:
            self.add_up_unclaimed()
        for specs, plan in new.items():
            self._open_one(specs, plan, buckets[specs])
        return {specs: self._open[specs] for specs in buckets}

    def _open_one(self, specs: Specs, plan: BucketPlan, device: torch.device) -> None:
        parts, machine_bytes = None if self.partition is None else self.partition.parts(specs), 0
        if self.partition is not None and parts is not None:
            self.partition.hold(parts, plan.labels, self.memory, device)
            machine_bytes = sum(r.message_bytes for r in self.partition.routes(specs, self._planned))
        # After the comparison: if that refuses, what was loaded is still there to be saved or replaced.
        for slot, tensors in self.unclaimed.items():
            for spec in specs:
                if spec.name in tensors:
                    loaded = in_memory_order(slot, tensors.pop(spec.name), spec, device)
                    if self.partition is not None:
                        loaded = loaded[self.partition.held(spec.name)].clone()
                    if spec.name in plan.labels:  # else all of it is of other processes of the machine
                        self.memory[slot][spec.name] = loaded
        warning = plan.on_state_loaded(self.memory)
        if warning and self._unchecked is not None:
            warnings.warn(warning, stacklevel=6)
        self._open[specs] = Lane(specs, plan, parts, machine_bytes)

    def add_up_unclaimed(self) -> None:
        """Add up what processes of this machine have loaded, each its part. Collective inside, once."""
        if self.partition is not None and self.unclaimed_of == "process":
            combine(self.unclaimed, self.partition.intra_node, "sum", "adding up what a machine has loaded")
            self.unclaimed_of = "machine"

    def agree(self, device: torch.device) -> None:
        """Refuse to go on where processes differ. Collective, once after each change."""
        if not self.has_agreed:
            self.device = device
            self._compare(())
            self.has_agreed = True

    def _compare(self, buckets: Sequence[Specs]) -> None:
        named = {
            f"bucket {number} with": ", ".join(spec.name for spec in specs)
            for number, specs in enumerate(buckets)
        }
        described = self.described("a step", self.device, has_progress=True) | named
        # It is not counted, for it is no gradient's message; but the host waits as for one.
        with self.traffic.waiting():
            agree(self.transport, described, f"step {self.steps}")

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
                "committed steps": str(self.memory.step),
                "steps that were not finite": str(self.nonfinite_steps),
                "loaded state": self._loaded_checksum or "none",
                "averaged error": str(not self.differing),
            }
        for spec in self.specs:
            shape = "×".join(map(str, spec.shape)) or "scalar"
            dtype = str(spec.dtype).removeprefix("torch.")
            described[f"parameter {spec.name}"] = f"{shape} {dtype}, strides {spec.stride}"
            if spec.is_statistic:
                described[f"parameter {spec.name}"] += ", a buffer"
        return described

    # A loaded state.

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all parameters, as far as the model or the loaded state has them."""
        loaded = {} if self._unchecked is None else self._unchecked.shapes
        return {**loaded, **{name: spec.shape for name, spec in self.known_specs.items()}}

    def check_loaded(self) -> None:
        """Refuse a loaded state, at the first step after it, if it turns out to be of a different model."""
        if self._unchecked is not None:
            check_model(self._unchecked, self.known_specs, by_position=True)
            self._unchecked = None
