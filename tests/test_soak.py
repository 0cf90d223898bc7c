"""Short versions of `make soak`: faults of every kind, and resident memory with every adapter."""

from __future__ import annotations

import pytest

from processes import Spawn
from resident import CASES, MOST_MB, grown_mb
from soak import Soak


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_after_faults_of_every_kind_all_processes_have_the_same_and_nothing_is_lost() -> None:
    # Of a seed by which every process has faults, and each loss comes some steps after a save.
    ended, struck, restarts = Soak(2947, steps=20, num_faults=12, num_losses=3, save_every=5).run()
    assert len(ended) == 4
    assert restarts == 3
    assert set(struck) == {"non-finite", "slow", "stall", "kill", "raise"}
    assert len({process.checksum for process in ended}) == 1
    for process in ended:
        assert process.step == 20
        assert process.skipped == 5  # lost and repeated ones once
        assert process.gap < 1e-5
        assert process.owed > 1e-3  # a loss of this residual would show
        assert process.ratio > 5


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["4 bits", "machines", "FSDP2"])
def test_resident_memory_stays_where_it_is(spawn: Spawn, case: str) -> None:
    """A few; `resident.py` tries all, for longer."""
    grown = spawn(CASES[case][0], grown_mb, case, 150, 512, timeout_seconds=300.0)
    assert max(grown) < MOST_MB
