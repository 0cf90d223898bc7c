"""Few bits in the eigenbasis: what it gains, which basis it is, and what is refused."""

from __future__ import annotations

import pytest
import torch

from catalog import spec
from thinwire import ConfigError, Quantize, StateError
from thinwire.algorithms.eigenbasis import COVARIANCE, EIGENVECTORS
from thinwire.simulation import Simulation

SIDE, LENGTH = 32, 96
# Directions of a gradient: each of the first eight is half of the one before.
DIRECTIONS = torch.linalg.qr(torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)))[0]
SIZES = 2.0 ** -torch.arange(SIDE).clamp(max=7)


def trained(algorithm: Quantize, shape: tuple[int, int]) -> tuple[Simulation, torch.Tensor, torch.Tensor]:
    """Return a simulation after 60 steps; the last step's true mean and its result, (directions, length)."""
    simulation = Simulation(algorithm, [(spec("weight", *shape),)], num_workers=2)
    for step in range(60):
        drawn = torch.randn(2, SIDE, LENGTH, generator=torch.Generator().manual_seed(step))
        matrices = DIRECTIONS @ (SIZES[:, None] * drawn)
        turned = matrices if shape == (SIDE, LENGTH) else matrices.mT
        flats = [[matrix.reshape(-1).clone()] for matrix in turned]
        assert simulation.step(flats)
        assert torch.equal(flats[0][0], flats[1][0])
    result = flats[0][0].view(shape)
    return (
        simulation,
        DIRECTIONS.T @ matrices.mean(0),
        DIRECTIONS.T @ (result if shape[0] == SIDE else result.T),
    )


@pytest.mark.parametrize("shape", [(SIDE, LENGTH), (LENGTH, SIDE)], ids=str)
def test_small_directions_arrive(shape: tuple[int, int]) -> None:
    errors = {}
    for algorithm in (Quantize(bits=4), Quantize(bits=4, eigenbasis="*")):
        simulation, mean, result = trained(algorithm, shape)
        errors[bool(algorithm.eigenbasis)] = (result - mean).norm(dim=1) / mean.norm(dim=1)
        assert 7 < simulation.syncs[0].stats().compression_ratio < 8  # no bytes more
    assert (errors[False][7:] > 1).all(), "codes of one size should hide small directions"
    assert (errors[True] < 0.3).all()


def test_the_basis_is_that_of_mean_gradients() -> None:
    simulation, *_ = trained(Quantize(bits=4, eigenbasis="*"), (SIDE, LENGTH))
    memory = simulation.engines[0].state.memory
    basis, covariance = memory[EIGENVECTORS]["weight"], memory[COVARIANCE]["weight"]
    torch.testing.assert_close(basis.T @ basis, torch.eye(SIDE), atol=1e-5, rtol=0)
    expected = torch.linalg.eigh(covariance)[1].flip(1)
    assert ((basis.T @ expected).diagonal()[:4].abs() > 0.99).all()
    assert ((basis.T @ DIRECTIONS).diagonal()[:4].abs() > 0.9).all()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="error_feedback"):
        Quantize(bits=4, eigenbasis="*", error_feedback=True)
    with pytest.raises(ConfigError, match=r"eigenbasis must be a pattern of names, .*got True"):
        Quantize(bits=4, eigenbasis=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="matches no matrix of the model"):
        Quantize(bits=4, eigenbasis="block.*").check_model(
            [spec("blocks.0", SIDE, LENGTH), spec("block.b", 4)]
        )
    simulation, *_ = trained(Quantize(bits=4, eigenbasis="*"), (SIDE, LENGTH))
    state = simulation.state_dicts()[0]
    for wrong in (torch.eye(LENGTH), torch.ones(SIDE, SIDE, SIDE)):
        with pytest.raises(StateError, match="weight"):
            simulation.syncs[0].load_state_dict({**state, "eigenvectors": (("weight", wrong),)})
