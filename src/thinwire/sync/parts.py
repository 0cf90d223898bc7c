"""Machines of several processes: which process averages which part of a bucket between the machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from thinwire.algorithms.base import Indivisible
from thinwire.plan import ParameterSpec

Ranges = tuple[slice, ...]
"""The elements of a parameter that each place of a machine averages, in the order of places."""


class Division:
    """Divides parameters among the places of a machine, evenly.

    For an algorithm that remembers, a parameter that was divided stays so. Any other one divides a bucket as
    it lies, so that nothing is copied. All processes ask for the same parameters in the same order, so they
    find the same.
    """

    def __init__(
        self,
        indivisible: Indivisible,
        num_places: int,
        model: Sequence[ParameterSpec],
        *,
        remembers: bool = True,
    ) -> None:
        self._as_it_lies = not remembers and isinstance(indivisible, int)
        self._indivisible = indivisible
        self._ranges: dict[str, Ranges] = {}
        self._loads = [0] * num_places
        # All at once if that is possible, so that the largest come first. Buckets are not known yet.
        if indivisible != "bucket" and not self._as_it_lies:
            self.of(model)

    def of(self, specs: Sequence[ParameterSpec]) -> list[Ranges]:
        """Return the ranges of each parameter of a bucket, or of the model."""
        if self._as_it_lies:
            return list(self._cut(specs))
        if self._indivisible == "bucket":
            self._keep_together(specs)
        # The largest first: the small ones then fill up what is left.
        for spec in sorted(specs, key=lambda spec: (-spec.numel, spec.name)):
            if spec.name not in self._ranges:
                self._assign(spec)
        return [self._ranges[spec.name] for spec in specs]

    def _cut(self, specs: Sequence[ParameterSpec]) -> Iterator[Ranges]:
        """Yield ranges that follow each other in the bucket, of as many elements for each place."""
        assert isinstance(self._indivisible, int)
        num_places, total, start = len(self._loads), sum(spec.numel for spec in specs), 0
        for spec in specs:
            ends = [0]
            for place in range(1, num_places):
                units = round((place * total / num_places - start) / self._indivisible)
                ends.append(min(max(units * self._indivisible, 0), spec.numel))
            yield tuple(map(slice, ends, [*ends[1:], spec.numel]))
            start += spec.numel

    def _keep_together(self, specs: Sequence[ParameterSpec]) -> None:
        known = {
            _owner(self._ranges[spec.name]) for spec in specs if spec.numel and spec.name in self._ranges
        }
        if len(known) > 1 or any(spec.name not in self._ranges for spec in specs):
            owner = self._least_loaded()[0]
            for spec in specs:
                self._give(spec, [spec.numel * (place == owner) for place in range(len(self._loads))])

    def _assign(self, spec: ParameterSpec) -> None:
        unit = spec.numel if isinstance(self._indivisible, str) else self._indivisible
        num_units = -(-spec.numel // unit) if unit else 0
        each, left = divmod(num_units, len(self._loads))
        more = set(self._least_loaded()[:left])
        self._give(spec, [unit * (each + (place in more)) for place in range(len(self._loads))])

    def _least_loaded(self) -> list[int]:
        return sorted(range(len(self._loads)), key=lambda place: (self._loads[place], place))

    def _give(self, spec: ParameterSpec, counts: Sequence[int]) -> None:
        # The last unit of a parameter may be shorter.
        ends = [min(end, spec.numel) for end in accumulate(counts, initial=0)]
        for place, old in enumerate(self._ranges.get(spec.name, ())):
            self._loads[place] -= old.stop - old.start
        self._ranges[spec.name] = tuple(map(slice, ends[:-1], ends[1:]))
        for place, new in enumerate(self._ranges[spec.name]):
            self._loads[place] += new.stop - new.start


def _owner(ranges: Ranges) -> int:
    """Return the place that has most of a parameter: all, if it is not divided."""
    return max(range(len(ranges)), key=lambda place: ranges[place].stop - ranges[place].start)


def part_of(spec: ParameterSpec, some: slice) -> ParameterSpec:
    """Return what an algorithm needs to know of a part of a parameter; of all of it, its own spec."""
    numel = some.stop - some.start
    if numel == spec.numel:
        return spec
    return spec._replace(shape=(numel,), stride=(1,), start=some.start)


class BucketParts:
    """How a bucket is divided among the processes of a machine.

    Attributes:
        specs: The bucket's parameters.
        ranges: Of each parameter, the elements of each place.
        lengths: Elements of the bucket of each place.
    """

    def __init__(self, specs: tuple[ParameterSpec, ...], ranges: Sequence[Ranges], place: int) -> None:
        self.specs, self.ranges, self._place = specs, ranges, place
        offsets = list(accumulate((spec.numel for spec in specs), initial=0))
        of_places = [
            [
                slice(offset + of_spec[each].start, offset + of_spec[each].stop)
                for offset, of_spec in zip(offsets, ranges, strict=False)
            ]
            for each in range(len(ranges[0]))
        ]
        self.lengths: list[int] = [sum(some.stop - some.start for some in slices) for slices in of_places]
        # Of the bucket, in the order of places.
        self._slices = list(_joined([some for slices in of_places for some in slices]))

    def specs_of(self, place: int) -> tuple[ParameterSpec, ...]:
        """Return a place's parts, in the order of the bucket."""
        # What has no elements goes to the place with most elements, so that it has a route.
        busiest = self.lengths.index(max(self.lengths))
        return tuple(
            part_of(spec, ranges[place])
            for spec, ranges in zip(self.specs, self.ranges, strict=True)
            if ranges[place].stop > ranges[place].start or (not spec.numel and place == busiest)
        )

    @property
    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """This process's parts."""
        return self.specs_of(self._place)

    @property
    def inside_bytes(self) -> int:
        """Bytes that this process sends to others of its machine in a step."""
        own, others = self.lengths[self._place], len(self.lengths) - 1
        return (sum(self.lengths) - own + others * own) * self.specs[0].dtype.itemsize

    def by_place(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a bucket in the order of places: itself, if it has that order."""
        return flat if len(self._slices) < 2 else torch.cat([flat[some] for some in self._slices])

    def own(self, by_place: torch.Tensor) -> torch.Tensor:
        """Return this process's part, a view."""
        return by_place.split_with_sizes(self.lengths)[self._place]

    def write(self, flat: torch.Tensor, by_place: torch.Tensor) -> None:
        """Write what `by_place` has returned back to the bucket."""
        if by_place is not flat:
            sizes = [some.stop - some.start for some in self._slices]
            torch._foreach_copy_([flat[some] for some in self._slices], by_place.split_with_sizes(sizes))


def _joined(slices: Sequence[slice]) -> Iterator[slice]:
    """Yield slices that are not empty, with those joined that follow each other: fewer copies."""
    joined = slice(0, 0)
    for some in slices:
        if some.start == joined.stop:
            joined = slice(joined.start, some.stop)
        elif some.start < some.stop:
            if joined.start < joined.stop:
                yield joined
            joined = some
    if joined.start < joined.stop:
        yield joined
