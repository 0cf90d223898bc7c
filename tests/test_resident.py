"""Resident memory stays where it is, with every adapter, in processes."""

from __future__ import annotations

import pytest

from pool import Pools
from resident import CASES, MOST_MB, grown_mb

STEPS, WIDTH = 150, 512


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["4 bits", "machines", "FSDP2"])
def test_a_run_grows_no_further(pools: Pools, case: str) -> None:
    """A few; `resident.py` tries all, for longer."""
    pool = pools.of(CASES[case][0])
    assert max(pool.run(grown_mb, case, STEPS, WIDTH, timeout_seconds=300.0)) < MOST_MB
