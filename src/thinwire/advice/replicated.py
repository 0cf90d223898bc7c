"""A model whose steps are timed with each algorithm: a whole replica on this process, in DDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.advice.variants import BASELINE, priced
from thinwire.algorithms.registry import Variant
from thinwire.channel import Transport, own_subgroup
from thinwire.fronts.ddp import BucketFront, front_of, thinwire_hook
from thinwire.fronts.ddp_model import register
from thinwire.sync import Engine


class Subject(Protocol):
    """What is trained while steps are timed.

    Attributes:
        model: What `one_step` is called with.
        module: What averages whole models.
        variants: The algorithms that it can be averaged with, by name.
        baseline: Name of 16-bit averaging.
        shards: Processes that hold a replica together; None where each holds all of it.
    """

    model: nn.Module
    module: nn.Module
    variants: Mapping[str, Variant]
    baseline: str
    shards: int | None

    def turn_of(self, name: str | None) -> AbstractContextManager[Engine | None]:
        """Return within what steps are averaged with an algorithm, or with None not at all.

        Its engine is made for this turn alone: what algorithms remember is as large as the model.
        """


class Replicated:
    """A model, a copy of the user's, in a DDP group of this process only; see `Subject`."""

    shards: int | None = None
    baseline = BASELINE

    def __init__(self, module: nn.Module, transport: Transport, entered: ExitStack) -> None:
        # In a larger one, DDP would broadcast buffers in each step, among processes that each measure alone.
        group = own_subgroup(1, None)
        entered.callback(dist.destroy_process_group, group)
        self.module = module
        self._ddp = DistributedDataParallel(module, process_group=group)
        self.model: nn.Module = self._ddp
        self.variants: Mapping[str, Variant] = priced()
        self._transport = transport
        self._front: BucketFront | None = None
        # DDP takes one hook for good: whose turn it is changes behind it.
        register(self._ddp, self, thinwire_hook)

    def run(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """As `BucketFront.run`, of the front whose turn it is."""
        if self._front is None:
            raise AssertionError("DDP calls no hook outside of a turn")
        return self._front.run(bucket)

    @contextmanager
    def turn_of(self, name: str | None) -> Iterator[Engine | None]:
        """As `Subject.turn_of`."""
        if name is None:
            # DDP calls no hook in there.
            with self._ddp.no_sync():
                yield None
            return
        self._front = front_of(self._ddp, self.variants[name].algorithm, self._transport)
        try:
            yield self._front.engine
        finally:
            self._front = None
