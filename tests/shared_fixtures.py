"""Fixtures: process pools that live as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import catalog
from pool import Pool, Pools
from thinwire.algorithms.lowrank import bases, batched, powersgd_plan
from thinwire.kernels import dispatch
from thinwire.kernels.matrices import replaced

# Simulated workers make many small tensors: a second thread costs more than it brings.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def pool2(pools: Pools) -> Pool:
    return pools.of(2)


@pytest.fixture
def pool4(pools: Pools) -> Pool:
    return pools.of(4)


@pytest.fixture
def one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all workers orthonormalize is the same, and half of the time: the first one's result serves."""

    def remembered(
        batches: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        if drawn is not None:
            batches = [replaced(*each) for each in zip(batches, drawn, strict=True)]
        bases = catalog.bases_of(catalog.Bits(batches), dispatch.backends)
        return [basis.clone() for basis in bases]

    for module in (bases, batched, powersgd_plan):
        monkeypatch.setattr(module, "orthonormal_rows", remembered)
