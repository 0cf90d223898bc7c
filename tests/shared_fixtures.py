"""Fixtures: process pools that live as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

import catalog
from pool import Pool, Pools
from thinwire.algorithms.lowrank import powersgd_plan
from thinwire.kernels import dispatch
from thinwire.kernels.base import Kernels
from thinwire.kernels.matrices import Rows

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

    @cache
    def remembering(kernels: Kernels) -> Kernels:
        def remembered(items: Sequence[Rows]) -> list[torch.Tensor]:
            rows = catalog.Bits([item.rows for item in items])
            drawn = catalog.Bits([torch.zeros(0) if item.drawn is None else item.drawn for item in items])
            return [basis.clone() for basis in catalog.bases_of(rows, drawn, kernels)]

        return replace(kernels, orthonormal_rows=remembered)

    monkeypatch.setattr(
        powersgd_plan, "kernels_for", lambda like, rank: remembering(dispatch.kernels_for(like, rank))
    )
