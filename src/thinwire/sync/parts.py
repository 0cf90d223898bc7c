"""Machines of several processes: which process averages which part of a bucket between the machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from thinwire.algorithms.base import Indivisible
from thinwire.channel import Transport, Work
from thinwire.plan import ParameterSpec

Ranges = tuple[slice, ...]
"""The elements of a parameter that each place of a machine averages, in the order of places."""


class Division:
    """Divides parameters among the places of a machine, evenly; a parameter that was divided stays so.

    All processes ask for the same parameters in the same order, so they find the same.
    """

    def __init__(self, indivisible: Indivisible, num_places: int, model: Sequence[ParameterSpec]) -> None:
        self._indivisible = indivisible
        self._ranges: dict[str, Ranges] = {}
        self._loads = [0] * num_places
        # All at once where that is possible, so that the largest come first. Buckets are not known yet.
        if indivisible != "bucket":
            self.of(model)

    def of(self, specs: Sequence[ParameterSpec]) -> list[Ranges]:
        """Return the ranges of each parameter of a bucket, or of the model."""
        if self._indivisible == "bucket":
            self._keep_together(specs)
        # The largest first: the small ones then fill up what is left.
        for spec in sorted(specs, key=lambda spec: (-spec.numel, spec.name)):
            if spec.name not in self._ranges:
                self._assign(spec)
        return [self._ranges[spec.name] for spec in specs]

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


class Piece(NamedTuple):
    """A part of a parameter.

    Attributes:
        place: Whose it is.
        in_bucket: Where it lies in the bucket's flat gradients.
        in_row: Where it lies in that place's row.
    """

    place: int
    in_bucket: slice
    in_row: slice


class BucketParts:
    """How a bucket is divided among the processes of a machine.

    Attributes:
        specs: The bucket's parameters.
        ranges: Of each parameter, the elements of each place.
    """

    def __init__(self, specs: tuple[ParameterSpec, ...], ranges: Sequence[Ranges], place: int) -> None:
        self.specs, self.ranges, self._place = specs, ranges, place
        self._lengths = [0] * len(ranges[0])
        pieces, offset = [], 0
        for spec, of_spec in zip(specs, ranges, strict=True):
            for each, some in enumerate(of_spec):
                start, numel = self._lengths[each], some.stop - some.start
                if numel:
                    in_bucket = slice(offset + some.start, offset + some.stop)
                    pieces.append(Piece(each, in_bucket, slice(start, start + numel)))
                    self._lengths[each] += numel
            offset += spec.numel
        self._pieces = list(_joined(pieces))
        self._width = max(self._lengths)

    def specs_of(self, place: int) -> tuple[ParameterSpec, ...]:
        """Return a place's parts, in the order of its row."""
        # What has no elements goes to the place with most elements, so that it has a route.
        busiest = self._lengths.index(self._width)
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
        """Bytes that each process sends to others of its machine in a step, and receives."""
        return 2 * (len(self._lengths) - 1) * self._width * self.specs[0].dtype.itemsize

    def reduced(self, flat: torch.Tensor, inside: Transport, purpose: str) -> tuple[Work, torch.Tensor]:
        """Start averaging a bucket inside of the machine; return what to wait for, and this place's part."""
        # Rows are of one length; what fills them up is sent, and must be no leftover that is not finite.
        rows = flat.new_zeros(len(self._lengths), self._width)
        torch._foreach_copy_(self._in_rows(rows), self._in_bucket(flat))
        own = flat.new_empty(self._width)
        return inside.mean_row(own, rows, purpose), own[: self._lengths[self._place]]

    def gathered(self, own: torch.Tensor, inside: Transport, purpose: str) -> tuple[Work, torch.Tensor]:
        """Start collecting the means of all places; return what to wait for, and where they will be."""
        rows = own.new_empty(len(self._lengths), self._width)
        padded = torch.nn.functional.pad(own, (0, self._width - len(own)))
        return inside.all_gather(rows, padded, purpose), rows

    def write(self, flat: torch.Tensor, rows: torch.Tensor) -> None:
        """Write what was gathered to the bucket."""
        torch._foreach_copy_(self._in_bucket(flat), self._in_rows(rows))

    def _in_bucket(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[piece.in_bucket] for piece in self._pieces]

    def _in_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [rows[piece.place, piece.in_row] for piece in self._pieces]


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield pieces with those joined that follow each other in the bucket and in one row: fewer copies."""
    joined: Piece | None = None
    for piece in pieces:
        if joined and (joined.place, joined.in_bucket.stop) == (piece.place, piece.in_bucket.start):
            joined = Piece(
                piece.place,
                slice(joined.in_bucket.start, piece.in_bucket.stop),
                slice(joined.in_row.start, piece.in_row.stop),
            )
            continue
        if joined:
            yield joined
        joined = piece
    if joined:
        yield joined
