"""Fixtures: process pools that live as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import catalog
from pool import Pool, Pools
from thinwire.algorithms.lowrank import batched, factors, powersgd
from thinwire.kernels import dispatch
from thinwire.kernels.matrices import Rows, replaced

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

    def remembered(items: Sequence[Rows]) -> list[torch.Tensor]:
        batches = [each.rows if each.drawn is None else replaced(each.rows, each.drawn) for each in items]
        return [basis.clone() for basis in catalog.bases_of(catalog.Bits(batches), dispatch.backends)]

    for module in (factors, batched, powersgd):
        monkeypatch.setattr(module, "orthonormal_bases", remembered)
