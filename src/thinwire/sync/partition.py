"""Machines of several processes: which process averages which part of a parameter, and keeps its state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from thinwire.algorithms import Algorithm, Bucket, BucketPlan, Commit, Memory, Requests, Slot, all_finite
from thinwire.comm import Transport, gather_values
from thinwire.plan import ParameterSpec

Specs = tuple[ParameterSpec, ...]

Ranges = tuple[slice, ...]
"""The elements of a parameter that each local rank averages, by local rank."""


@dataclass(frozen=True)
class _NothingPlan(BucketPlan):
    """The plan of a process that averages nothing of a bucket."""

    def run(self, bucket: Bucket, memory: Memory) -> Requests:
        yield Commit(all_finite, writes=False, commits_on_device=True)


NOTHING = _NothingPlan((), ())


class Partitioner:
    """Divides parameters evenly among local ranks, the same way on all processes.

    If the algorithm keeps state, a parameter stays divided as it was. If not, a bucket is cut into contiguous
    parts, so nothing is copied.
    """

    def __init__(self, algorithm: Algorithm, num_local_ranks: int, model: Specs) -> None:
        self._indivisible = algorithm.split_granularity
        self._cuts_buckets = isinstance(self._indivisible, int) and not algorithm.remembers
        self._ranges: dict[str, Ranges] = {}
        self._loads = [0] * num_local_ranks
        self._buckets = set[Specs]()  # those given to one local rank as a whole
        # Divide the whole model at once if possible, largest parameters first. Buckets are not known yet.
        if self._indivisible != "bucket" and not self._cuts_buckets:
            self.of(model)

    def of(self, specs: Specs) -> list[Ranges]:
        """Return the ranges of each parameter of a bucket, or of the model."""
        if self._cuts_buckets:
            return list(self._cut(specs))
        if self._indivisible == "bucket":
            self._keep_together(specs)
        # The largest first: small ones then even out the rest.
        for spec in sorted(specs, key=lambda spec: (-spec.numel, spec.name)):
            if spec.name not in self._ranges:
                unit = spec.numel if isinstance(self._indivisible, str) else self._indivisible
                num_units = -(-spec.numel // unit) if unit else 0
                share, left = divmod(num_units, len(self._loads))
                more = sorted(range(len(self._loads)), key=self._loads.__getitem__)[:left]
                self._give(spec, [unit * (share + (rank in more)) for rank in range(len(self._loads))])
        return [self._ranges[spec.name] for spec in specs]

    def _cut(self, specs: Specs) -> Iterator[Ranges]:
        """Yield consecutive ranges of the bucket, with equally many elements for each local rank."""
        assert isinstance(self._indivisible, int)
        num_local_ranks, total, start = len(self._loads), sum(spec.numel for spec in specs), 0
        for spec in specs:
            ends = [0]
            for local_rank in range(1, num_local_ranks):
                units = round((local_rank * total / num_local_ranks - start) / self._indivisible)
                ends.append(min(max(units * self._indivisible, 0), spec.numel))
            yield tuple(map(slice, ends, [*ends[1:], spec.numel]))
            start += spec.numel

    def _keep_together(self, specs: Specs) -> None:
        known = [self._ranges[spec.name] for spec in specs if spec.numel and spec.name in self._ranges]
        owners = {max(range(len(ranges)), key=lambda rank: _length(ranges[rank])) for ranges in known}
        # DDP has one bucket in its first step, and others later: not all of them may stay with its owner.
        if len(owners) > 1 or specs not in self._buckets:
            self._buckets.add(specs)
            held = [sum(_length(ranges[rank]) for ranges in known) for rank in range(len(self._loads))]
            others = [load - own for load, own in zip(self._loads, held, strict=True)]
            owner = others.index(min(others))
            for spec in specs:
                self._give(spec, [spec.numel * (rank == owner) for rank in range(len(self._loads))])

    def _give(self, spec: ParameterSpec, counts: Sequence[int]) -> None:
        # A parameter's last unit may be shorter.
        ends = [min(end, spec.numel) for end in accumulate(counts, initial=0)]
        old, self._ranges[spec.name] = self._ranges.get(spec.name), tuple(map(slice, ends[:-1], ends[1:]))
        for local_rank, new in enumerate(self._ranges[spec.name]):
            self._loads[local_rank] += _length(new) - (_length(old[local_rank]) if old else 0)


def _length(elements: slice) -> int:
    return int(elements.stop - elements.start)


def part_of(spec: ParameterSpec, elements: slice) -> ParameterSpec:
    """Return the spec of a part of a parameter; of the whole parameter, its own spec."""
    numel = _length(elements)
    return spec if numel == spec.numel else spec._replace(shape=(numel,), stride=(1,), start=elements.start)


class BucketParts:
    """How a bucket is divided among the processes of a machine."""

    def __init__(self, specs: Specs, ranges: Sequence[Ranges], local_rank: int) -> None:
        self.specs, self.ranges, self.local_rank = specs, ranges, local_rank
        offsets = list(accumulate((spec.numel for spec in specs), initial=0))
        local_ranks = range(len(ranges[0]))
        # The number of the bucket's elements for each local rank.
        self.lengths = [sum(_length(of_spec[owner]) for of_spec in ranges) for owner in local_ranks]
        # Slices of the bucket, ordered by local rank.
        self._slices = _joined(
            slice(offset + of_spec[owner].start, offset + of_spec[owner].stop)
            for owner in local_ranks
            for offset, of_spec in zip(offsets, ranges, strict=False)
        )

    def specs_of(self, local_rank: int) -> Specs:
        """Return a local rank's parts, in bucket order."""
        # A parameter without elements goes to the local rank with most elements, so that it has a route.
        busiest = self.lengths.index(max(self.lengths))
        return tuple(
            part_of(spec, ranges[local_rank])
            for spec, ranges in zip(self.specs, self.ranges, strict=True)
            if _length(ranges[local_rank]) or (not spec.numel and local_rank == busiest)
        )

    @property
    def inside_bytes(self) -> int:
        """Bytes that this process sends to others of its machine in a step."""
        own, others = self.lengths[self.local_rank], len(self.lengths) - 1
        return (sum(self.lengths) + (others - 1) * own) * self.specs[0].dtype.itemsize

    def by_rank(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a bucket ordered by local rank: itself, if it has this order."""
        return flat if len(self._slices) < 2 else torch.cat([flat[part] for part in self._slices])

    def own(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Return this process's part: a view."""
        return by_rank.split_with_sizes(self.lengths)[self.local_rank]

    def write(self, flat: torch.Tensor, by_rank: torch.Tensor) -> None:
        """Write the result of `by_rank` back to the bucket."""
        if by_rank is not flat:
            parts = by_rank.split_with_sizes(list(map(_length, self._slices)))
            torch._foreach_copy_([flat[part] for part in self._slices], parts)


def _joined(slices: Iterable[slice]) -> list[slice]:
    """Return the nonempty slices, with adjacent ones joined, for fewer copies."""
    joined: list[slice] = []
    for part in slices:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        elif _length(part):
            joined.append(part)
    return joined


class IntraNodePartition:
    """Which process of this machine averages, and holds the state of, which part of each parameter."""

    def __init__(self, intra_node: Transport) -> None:
        self.intra_node = intra_node  # the processes of this machine, by local rank
        self.forget()

    def divide(self, algorithm: Algorithm, model: Specs) -> None:
        """Divide the work into units that an algorithm must average as a whole."""
        self._partitioner = Partitioner(algorithm, self.intra_node.size, model)

    def preview(self) -> IntraNodePartition:
        """Return a copy for planning: its buckets do not affect the division of later ones."""
        preview = copy.copy(self)
        preview._partitioner = copy.deepcopy(self._partitioner)
        return preview

    def parts(self, bucket: Specs) -> BucketParts:
        """Return how this machine's processes divide a bucket."""
        return BucketParts(bucket, self._partitioner.of(bucket), self.intra_node.rank)

    # This process's memory.

    def forget(self) -> None:
        """Note that memory holds nothing yet."""
        self.held_ranges: dict[str, Ranges] = {}  # of each parameter in memory, on all local ranks

    def held(self, name: str) -> slice:
        """Return which elements of a parameter this process's memory holds."""
        return self.held_ranges[name][self.intra_node.rank]

    def held_parts(self, specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
        """Return the parts of parameters that this process's memory may hold."""
        held = [
            (spec, part_of(spec, self.held(spec.name))) for spec in specs if spec.name in self.held_ranges
        ]
        return [part for spec, part in held if part.numel or not spec.numel]

    def hold(self, parts: BucketParts, memory: Memory, device: torch.device) -> None:
        """Make memory hold this process's part of a bucket. Collective inside, if it held other parts."""
        ranges = {spec.name: of_spec for spec, of_spec in zip(parts.specs, parts.ranges, strict=True)}
        moved = {
            spec.name: spec
            for spec in parts.specs
            if self.held_ranges.get(spec.name, ranges[spec.name]) != ranges[spec.name]
        }
        # All processes of the machine divide the same buckets in the same order, so all get here, or none.
        if moved:
            self._move(moved, ranges, memory, device)
        self.held_ranges |= ranges

    def _move(
        self, moved: dict[str, ParameterSpec], ranges: dict[str, Ranges], memory: Memory, on: torch.device
    ) -> None:
        own = [
            (slot.name, slot.is_local, slot.is_saved, name)
            for slot, tensors in memory.slots.items()
            if slot.is_elementwise
            for name in moved.keys() & tensors.keys()
        ]
        # A process may hold tensors of a slot of which the others have none.
        everyone = gather_values(own, self.intra_node, "who of a machine remembers what")
        for kind, is_local, is_saved, name in sorted(set(map(tuple, chain(*everyone)))):
            tensors = memory[Slot(kind, is_local=is_local, is_elementwise=True, is_saved=is_saved)]
            whole = torch.zeros(moved[name].numel, dtype=moved[name].memory_dtype, device=on)
            if name in tensors:
                whole[self.held(name)] = tensors.pop(name)
            self.intra_node.all_reduce(whole, f"moving the {kind} of {name} inside a machine").wait()
            elements = ranges[name][self.intra_node.rank]
            if _length(elements):
                tensors[name] = whole[elements].clone()
