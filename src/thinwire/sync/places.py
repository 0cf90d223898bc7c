"""The processes of a machine: who of them averages and remembers what, and what they send together."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.algorithms import Algorithm, Bucket, BucketPlan, Commit, Memory, Requests, Slot, all_finite
from thinwire.algorithms.registry import SLOTS
from thinwire.channel import Transport, gather_bytes
from thinwire.plan import ParameterSpec, Route
from thinwire.sync.checksum import with_checksum
from thinwire.sync.parts import BucketParts, Division, Ranges, part_of
from thinwire.sync.state import names_in, tensors_of_all
from thinwire.tensors.accelerators import sent_to

Specs = tuple[ParameterSpec, ...]


@dataclass(frozen=True)
class _NothingPlan(BucketPlan):
    """The plan of a process that averages nothing of a bucket."""

    def exchange(self, bucket: Bucket, memory: Memory) -> Requests:
        """As `BucketPlan.exchange`: without a message."""
        yield Commit(all_finite, writes=False)


NOTHING = _NothingPlan((), ())


class Places:
    """Which process of this machine averages and remembers which part of each parameter.

    Attributes:
        inside: The processes of this machine, by place.
    """

    def __init__(self, inside: Transport) -> None:
        self.inside = inside
        self.forget()

    def divide(self, algorithm: Algorithm, model: Iterable[ParameterSpec]) -> None:
        """Divide the work by what an algorithm must average as one."""
        self._division = Division(
            algorithm.indivisible, self.inside.size, tuple(model), remembers=algorithm.remembers
        )

    def preview(self) -> Places:
        """Return a copy to plan with: a bucket that is asked for only here is not divided for the run."""
        preview = copy.copy(self)
        preview._division = copy.deepcopy(self._division)
        return preview

    def parts(self, bucket: Specs) -> BucketParts:
        """Return who averages what of a bucket."""
        return BucketParts(bucket, self._division.of(bucket), self.inside.rank)

    def routes(self, bucket: Specs, planned: Callable[[Specs], BucketPlan]) -> Iterator[Route]:
        """Yield how the parameters of a bucket travel, with what all places send of them."""
        found = defaultdict(list)
        for place in range(self.inside.size):
            for route in planned(self.parts(bucket).specs_of(place)).routes:
                found[route.label].append((place, route))
        whole = {route.label: route for route in planned(bucket).routes}
        for label, routes in found.items():
            place, route = routes[0]
            if len(routes) == 1:
                yield replace(route, detail=f"{route.detail}, by process {place}")
                continue
            sent_bytes = sum(route.message_bytes for _, route in routes)
            detail = f"{whole[label].detail}, by {len(routes)} processes"
            yield replace(whole[label], message_bytes=sent_bytes, detail=detail)

    def sum_of(self, flag: torch.Tensor, numbers: Sequence[float], purpose: str) -> torch.Tensor:
        """Return the sums over the machine of a flag and of numbers. Collective inside; not read back."""
        device = self.inside.control_device
        said = sent_to(device, torch.tensor([0.0, *numbers], dtype=torch.float64))
        said[0] = flag.to(device)
        self.inside.all_reduce(said, purpose).wait()
        return said

    # What this process remembers.

    def forget(self) -> None:
        """Remember that memory holds nothing yet."""
        self._held: dict[str, Ranges] = {}

    def held(self, name: str) -> slice:
        """Return which elements of a parameter memory holds here."""
        return self._held[name][self.inside.rank]

    def held_parts(self, specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
        """Return those parts of parameters of which memory may hold something here."""
        held = [(spec, part_of(spec, self.held(spec.name))) for spec in specs if spec.name in self._held]
        return [part for spec, part in held if part.numel or not spec.numel]

    def hold(self, parts: BucketParts, labels: Collection[str], memory: Memory, device: torch.device) -> None:
        """Let memory hold this process's part of a bucket. Collective inside, if it held different parts.

        So it is where the algorithm was switched, or buckets are cut differently and it averages whole ones.
        """
        ranges = dict(zip((spec.name for spec in parts.specs), parts.ranges, strict=True))
        moved = {
            spec.name: spec
            for spec in parts.specs
            if self._held.get(spec.name, ranges[spec.name]) != ranges[spec.name]
        }
        if moved:
            self._move(moved, ranges, memory, device)
        self._held |= ranges
        names = ranges.keys()
        for slot, tensors in memory.slots.items():
            # What was loaded for the other processes of the machine.
            for label in () if slot.is_elementwise else tensors.keys() - labels:
                if names >= names_in(label):
                    del tensors[label]

    def _move(
        self,
        moved: Mapping[str, ParameterSpec],
        ranges: Mapping[str, Ranges],
        memory: Memory,
        device: torch.device,
    ) -> None:
        own = [
            (slot.name, slot.is_local, name)
            for slot, tensors in memory.slots.items()
            for name in (moved.keys() & tensors.keys() if slot.is_elementwise else ())
        ]
        # Another process may remember something of what this one does not.
        everyone = gather_bytes(json.dumps(own).encode(), self.inside, "who of a machine remembers what")
        slots = {**SLOTS, **{slot.name: slot for slot in memory.slots}}
        for kind, is_local, name in sorted({tuple(each) for said in everyone for each in json.loads(said)}):
            slot = slots.get(kind, Slot(kind, is_local=is_local, is_elementwise=True))
            spec, tensors = moved[name], memory[slot]
            whole = torch.zeros(spec.numel, dtype=spec.memory_dtype, device=device)
            if name in tensors:
                whole[self.held(name)] = tensors.pop(name)
            self.inside.all_reduce(whole, f"moving the {kind} of {name} inside of a machine").wait()
            some = ranges[name][self.inside.rank]
            if some.stop > some.start:
                tensors[name] = whole[some].clone()

    def whole_state(
        self,
        own: Mapping[str, Any],
        specs: Mapping[str, ParameterSpec],
        unclaimed: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> dict[str, Any]:
        """Return the state of the whole model from those of all processes of the machine. Collective inside.

        Args:
            own: What this process remembers, packed.
            specs: All parameters.
            unclaimed: By slot, what was loaded and is not in memory yet, in the shape of the parameters.
        """
        is_elementwise = {name: kind[1] for name, kind in own["slots"]}
        whole: dict[str, dict[str, torch.Tensor]] = {slot: {} for slot in is_elementwise}
        for place, (slot, label, tensor) in tensors_of_all(own, is_elementwise, self.inside):
            if not is_elementwise[slot]:
                whole[slot].setdefault(label, tensor)
                continue
            spec = specs[label]
            if tensor.numel() == spec.numel:  # of one process alone, packed in the parameter's shape
                whole[slot][label] = tensor
                continue
            if label not in whole[slot]:
                whole[slot][label] = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype).zero_()
            whole[slot][label].as_strided((spec.numel,), (1,))[self._held[label][place]] = tensor
        for slot in whole:
            whole[slot] |= unclaimed.get(slot, {})
        tensors = {
            slot: tuple((label, each.contiguous()) for label, each in sorted(of_slot.items()))
            for slot, of_slot in whole.items()
        }
        return with_checksum({**own, **tensors})
