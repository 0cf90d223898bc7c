"""The part of a step inside of a machine of several processes: buckets are reduced, and later gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch

from thinwire.comm import Traffic, Transport, Work
from thinwire.errors import CommunicationError
from thinwire.sync.bucket_plans import BucketState
from thinwire.sync.partition import BucketParts


class IntraNodeReduce(NamedTuple):
    """A bucket whose mean inside of the machine is on its way."""

    bucket: BucketState
    parts: BucketParts
    by_rank: torch.Tensor  # the bucket in the order of local ranks
    work: Work


class IntraNodeReduces:
    """The buckets of a step: each local rank gets the machine's mean of the part that it averages."""

    def __init__(self, intra_node: Transport, traffic: Traffic, step: str) -> None:
        self._intra_node, self._traffic, self._step = intra_node, traffic, step
        self._reduces: list[IntraNodeReduce] = []
        self._num_taken = 0  # of these

    def start(self, bucket: BucketState) -> None:
        parts = bucket.parts
        assert parts is not None
        by_rank = parts.by_rank(bucket.flat)
        purpose = f"{self._step}, the mean inside of the machine of the bucket of {bucket.specs[0].name}"
        work = self._intra_node.scatter_mean(by_rank, parts.lengths, purpose)
        self._traffic.inside_bytes += parts.inside_bytes
        self._reduces.append(IntraNodeReduce(bucket, parts, by_rank, work))

    def take(self, *, but_last: bool) -> Iterator[tuple[BucketState, torch.Tensor]]:
        """Wait for buckets, in order, and yield each with this rank's part of the mean."""
        for reduce in self._reduces[self._num_taken : len(self._reduces) - but_last]:
            with self._traffic.waiting():
                reduce.work.wait()
            self._num_taken += 1
            yield reduce.bucket, reduce.parts.own(reduce.by_rank)

    def gather(self) -> None:
        """Bring the means of all parts to all local ranks; what was not committed, as well."""
        works = []
        for bucket, parts, by_rank, _ in self._reduces:
            purpose = f"{self._step}, the means of the bucket of {bucket.specs[0].name}"
            works.append(self._intra_node.gather_parts(by_rank, parts.lengths, purpose))
        for (bucket, parts, by_rank, _), work in zip(self._reduces, works, strict=True):
            with self._traffic.waiting():
                work.wait()
            parts.write(bucket.flat, by_rank)

    def forget_taken(self) -> None:
        """Forget those that were waited for: they are as large as the gradients."""
        del self._reduces[: self._num_taken]
        self._num_taken = 0

    def drain(self) -> None:
        """Wait for those that no one will take, whether they fail or not."""
        for reduce in self._reduces:
            with suppress(CommunicationError):
                reduce.work.wait()
