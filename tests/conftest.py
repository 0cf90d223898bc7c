"""Fixtures: process pools that live as long as the test session."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest
import torch

import catalog
import forked
from pool import Pool, Pools
from thinwire.algorithms.kernels import dispatch
from thinwire.algorithms.lowrank import alternating, bases, batched, two_rounds

# Simulated workers make many small tensors: a second thread costs more than it brings.
torch.set_num_threads(1)

# They have no doctests, and to import them costs seconds.
collect_ignore = ["preloaded.py", "frozen_heap.py", "accelerate_own_script.py"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let processes start with what the tests of this run need; CUDA must not start before a fork."""
    functions = [item for item in session.items if isinstance(item, pytest.Function)]
    forked.modules += sorted({each.module.__name__ for each in functions} - {"test_gpu"})
    gc.freeze()  # all that is imported: collections need not look at it again and again


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

    def remembered(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        bases = catalog.bases_of(catalog.Bits(batches), dispatch.backends)
        return [basis.clone() for basis in bases]

    for module in (alternating, bases, batched, two_rounds):
        monkeypatch.setattr(module, "orthonormal_rows", remembered)
