"""States that the version before saved: they load, and the run goes on as it would have.

Each fixture holds a state of version 2 after 7 steps of 3 workers, and worker 0's results of the 3 steps
after it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from catalog import buckets, random_gradients
from thinwire import BatchedPowerSGD, PowerSGD
from thinwire.algorithms import Algorithm
from thinwire.algorithms.kernels import dispatch
from thinwire.checkpoint import load, save
from thinwire.simulation import Simulation

FIXTURES = Path(__file__).parents[1] / "fixtures"
SAVED_AFTER = 7

ALGORITHMS: dict[str, Algorithm] = {
    "powersgd": PowerSGD(matrix_rank=2),
    "alternating": PowerSGD(matrix_rank=2, alternating=True),
    "budget": PowerSGD(matrix_rank=4, bytes_per_step=4000, replan_every_steps=5),
    "batched": BatchedPowerSGD(matrix_rank=2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_run_goes_on_from_a_state_of_version_2(
    name: str, suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dispatch, "backends", (dispatch.TORCH,))
    kept = torch.load(FIXTURES / f"{name}_v2.pt", weights_only=True)
    assert kept["state"]["version"] == 2
    save(kept["state"], tmp_path / f"state.{suffix}")
    simulation = Simulation(ALGORITHMS[name], buckets(), num_workers=3)
    for sync in simulation.syncs:
        sync.load_state_dict(load(tmp_path / f"state.{suffix}"))
    for step, expected in enumerate(kept["results"], SAVED_AFTER):
        gradients = random_gradients(buckets(), num_workers=3, seed=step)
        assert simulation.step(gradients)
        # Not to the bit: it was saved on another processor.
        torch.testing.assert_close(torch.cat(gradients[0]), expected, rtol=1e-3, atol=1e-4)
    assert simulation.syncs[0].stats().compression_ratio > 2
    assert simulation.state_dicts()[0]["version"] == 3
