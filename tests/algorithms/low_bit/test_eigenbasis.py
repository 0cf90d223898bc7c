"""Few bits in eigenbases: what they gain, which bases they are, and what is refused."""

from __future__ import annotations

import pytest
import torch

from catalog import spec
from thinwire import ConfigError, Quantize, StateError
from thinwire.algorithms import eigenbasis
from thinwire.algorithms.eigenbasis import EIGENVECTORS, Pair
from thinwire.simulation import Simulation
from thinwire.sync import engine_of
from thinwire.sync.state import read_state

ROWS, COLUMNS = 32, 96


def directions(side: int) -> torch.Tensor:
    drawn = torch.randn(side, side, generator=torch.Generator().manual_seed(side))
    orthogonal: torch.Tensor = torch.linalg.qr(drawn).Q
    return orthogonal


U, V = directions(ROWS), directions(COLUMNS)
# Directions of a gradient: each of the first eight is half of the one before; every fourth column is large.
SIZES = 2.0 ** -torch.arange(ROWS).clamp(max=7)
COLUMN_SIZES = torch.tensor([4.0, 0.1, 0.1, 0.1]).repeat(COLUMNS // 4)


def trained(
    algorithm: Quantize, *, is_tall: bool = False, steps: int = 60
) -> tuple[Simulation, torch.Tensor, torch.Tensor]:
    """Return a simulation after some steps; the last step's true mean and its result, both in directions."""
    shape = (COLUMNS, ROWS) if is_tall else (ROWS, COLUMNS)
    simulation = Simulation(algorithm, [(spec("weight", *shape),)], num_workers=2)
    for step in range(steps):
        drawn = torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))
        matrices = U @ (SIZES[:, None] * drawn * COLUMN_SIZES) @ V.T
        flats = [[matrix.reshape(-1).clone()] for matrix in (matrices.mT if is_tall else matrices)]
        assert simulation.step(flats)
        assert torch.equal(flats[0][0], flats[1][0])
    result = flats[0][0].view(shape)
    return simulation, U.T @ matrices.mean(0) @ V, U.T @ (result.T if is_tall else result) @ V


@pytest.mark.parametrize("is_tall", [False, True])
def test_small_directions_arrive(is_tall: bool) -> None:
    errors = {}
    for algorithm, steps in ((Quantize(bits=4), 1), (Quantize(bits=4, eigenbasis="*"), 60)):
        simulation, mean, result = trained(algorithm, is_tall=is_tall, steps=steps)
        assert simulation.syncs[0].stats().compression_ratio > 7  # no bytes more
        errors[bool(algorithm.eigenbasis)] = (result - mean).norm(dim=1) / mean.norm(dim=1)
        small = COLUMN_SIZES < 1
        is_near = (result - mean)[:, small].norm() < 0.7 * mean[:, small].norm()
        assert is_near == bool(algorithm.eigenbasis)
    assert (errors[False][7:] > 1).all(), "codes of one size should hide small directions"
    assert (errors[True] < 0.3).all()


def test_long_sides_have_a_basis_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenbasis, "MAX_PIECE", ROWS)
    simulation, mean, result = trained(Quantize(bits=4, eigenbasis="*"))
    bases = Pair.of(simulation.engines[0].state.memory[EIGENVECTORS]["weight"], (ROWS, COLUMNS))
    assert (bases.rows.shape, bases.columns.shape) == ((1, ROWS, ROWS), (3, ROWS, ROWS))
    assert ((result - mean).norm(dim=1) < 0.3 * mean.norm(dim=1)).all()


def test_matrices_without_gradients_at_first_are_averaged_later() -> None:
    simulation = Simulation(Quantize(bits=4, eigenbasis="*"), [(spec("weight", 8, 16),)], num_workers=2)
    for step in range(4):
        gradient = torch.full((128,), float(step // 2))
        flats = [[gradient.clone()], [gradient.clone()]]
        assert simulation.step(flats)
        torch.testing.assert_close(flats[0][0], gradient, rtol=0.05, atol=0)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="error_feedback"):
        Quantize(bits=4, eigenbasis="*", error_feedback=True)
    with pytest.raises(ConfigError, match=r"eigenbasis must be a pattern of names, .*got True"):
        Quantize(bits=4, eigenbasis=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="matches no matrix of the model"):
        Quantize(bits=4, eigenbasis="block.*").check_model(
            [spec("blocks.0", ROWS, COLUMNS), spec("block.b", 4)]
        )
    simulation, *_ = trained(Quantize(bits=4, eigenbasis="*"), steps=2)
    state = simulation.state_dicts()[0]
    for slot in ("covariance", "eigenvectors", "variances"):
        for wrong in (torch.eye(COLUMNS), torch.ones(7)):
            with pytest.raises(StateError, match="weight"):
                simulation.syncs[0].load_state_dict({**state, slot: (("weight", wrong),)})
    for other in (spec("weight", ROWS // 2, COLUMNS), spec("weight", ROWS, COLUMNS, dtype=torch.float64)):
        resumed = Simulation(Quantize(bits=4, eigenbasis="*"), [(other,)], num_workers=2)
        for sync in resumed.syncs:
            engine_of(sync).load(read_state(state))  # as a shard's part: bases of whole matrices start again
        assert resumed.step([[torch.ones(other.numel, dtype=other.dtype)] for _ in resumed.syncs])
    loaded = engine_of(simulation.syncs[0]).state
    loaded.take_pending((), ["weight"], torch.device("meta"))  # as of gradients on an accelerator
    assert [one["weight"].is_meta for one in loaded.memory.slots.values() if one] == [True] * 3
