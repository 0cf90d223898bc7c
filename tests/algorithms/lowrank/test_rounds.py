"""What a low-rank step draws."""

from __future__ import annotations

import torch

from catalog import spec
from thinwire import PowerSGD
from thinwire.simulation import Simulation


def test_without_a_warm_start_each_step_begins_with_other_bases() -> None:
    """The same ones would never see what lies across them."""
    algorithm = PowerSGD(matrix_rank=1, warm_start=False, error_feedback=False)
    simulation = Simulation(algorithm, [(spec("weight", 32, 24),)], num_workers=2)
    gradient, results = torch.randn(32 * 24, generator=torch.Generator().manual_seed(0)), []
    for _ in range(2):
        flats = [[gradient.clone()] for _ in range(2)]
        assert simulation.step(flats)
        results.append(flats[0][0])
    assert simulation.syncs[0].stats().compression_ratio > 10
    assert (results[0] - results[1]).norm() > 0.05 * gradient.norm()
