"""The compiled passes against PyTorch's products, and when they serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from catalog import spec
from thinwire import PowerSGD
from thinwire.algorithms import compilation, passes
from thinwire.algorithms.compilation import compiled_for
from thinwire.algorithms.matrices import Factors, MatrixGroup
from thinwire.simulation import Simulation

numba = pytest.importorskip("numba", reason="NO NUMBA HERE: nothing compiled was tested")
compiler = pytest.importorskip("thinwire.algorithms.compiled.compiler")
compiled_passes = pytest.importorskip("thinwire.algorithms.compiled.passes")

# Around the widths and numbers of rows at which they take other ways.
SHAPES = [
    (1, 1),
    (3, 5),
    (16, 1),
    (18, 33),
    (37, 1024),
    (64, 64),
    (5, 1025),
    (7, 1030),
    (36, 2049),
    (6, 4097),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_scale = pytest.mark.parametrize("scale", [None, 8.0])


def group_of(shape: tuple[int, int], matrix_rank: int = 3, seed: int = 0, offset: int = 0) -> MatrixGroup:
    """Two matrices with errors; `offset` shifts all of them in memory."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    places = [torch.empty(rows * columns + offset)[offset:].view(shape) for _ in range(4)]
    matrices, errors = (
        [place.copy_(torch.randn(shape, generator=generator)) for place in half]
        for half in (places[:2], places[2:])
    )
    return MatrixGroup(["a", "b"], matrices, errors, matrix_rank)


def factor_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def copied(group: MatrixGroup) -> MatrixGroup:
    errors = [None if error is None else error.clone() for error in group.errors]
    return replace(group, matrices=[matrix.clone() for matrix in group.matrices], errors=errors)


def both(run: Callable[[MatrixGroup], torch.Tensor | None], group: MatrixGroup) -> MatrixGroup:
    """Run by products and compiled; the group afterwards, after comparing all that was made of it."""
    assert compiled_for(group.matrices[0], group.matrix_rank) is not None
    compiled = copied(group)
    got = run(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "_compiled", lambda: None)
        expected = run(group)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    for ours, theirs in zip(
        [*compiled.matrices, *compiled.errors], [*group.matrices, *group.errors], strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    return group


@every_shape
@every_scale
@pytest.mark.parametrize("matrix_rank", [1, 2, 4])
@pytest.mark.parametrize("add_error", [True, False])
def test_products_add_the_error_and_multiply(
    shape: tuple[int, int], scale: float | None, matrix_rank: int, add_error: bool
) -> None:
    group = group_of(shape, matrix_rank)
    before, right = copied(group), factor_of(2, matrix_rank, shape[1])
    loss_scale = None if scale is None else torch.tensor(scale)
    after = both(lambda each: passes.products(each, right, loss_scale, add_error=add_error), group)
    changed = [not torch.equal(a, b) for a, b in zip(after.matrices, before.matrices, strict=True)]
    assert changed == [add_error, add_error]


@every_shape
@pytest.mark.parametrize("matrix_rank", [1, 3, 4])
def test_projections(shape: tuple[int, int], matrix_rank: int) -> None:
    left = factor_of(2, matrix_rank, shape[0])
    both(lambda each: passes.projections(each, left), group_of(shape, matrix_rank))


@every_shape
@every_scale
@pytest.mark.parametrize("basis_is_left", [True, False])
@pytest.mark.parametrize("matrix_rank", [1, 3, 4])
def test_settling(shape: tuple[int, int], scale: float | None, basis_is_left: bool, matrix_rank: int) -> None:
    of_basis, of_rest = shape if basis_is_left else shape[::-1]
    basis, own, mean = (
        factor_of(2, matrix_rank, length, seed=seed)
        for seed, length in enumerate([of_basis, of_rest, of_rest])
    )
    factors = Factors(basis, own, mean, basis_is_left)
    loss_scale = None if scale is None else torch.tensor(scale)

    def settled(group: MatrixGroup) -> None:
        errors = [error for error in group.errors if error is not None]
        passes.settle(group, errors, [factors], loss_scale)

    both(settled, group_of(shape, matrix_rank))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("columns", [40, 1100])
def test_what_is_not_finite_shows_in_every_factor(value: float, columns: int) -> None:
    group = group_of((6, columns))
    group.matrices[1][2, 3] = value
    left = passes.products(group, factor_of(2, 3, columns), None, add_error=True)
    assert left[0].isfinite().all()
    assert not left[1, :, 2].isfinite().any()
    own = passes.projections(group, factor_of(2, 3, 6))
    assert own[0].isfinite().all()
    assert not own[1, :, 3].isfinite().any()


@pytest.mark.parametrize("shape", [(18, 33), (22, 64), (7, 1030), (6, 1040)], ids=str)
@pytest.mark.parametrize("offset", [1, 2, 7])
@pytest.mark.parametrize("matrix_rank", [1, 3])
def test_the_place_in_memory_changes_no_bit(shape: tuple[int, int], offset: int, matrix_rank: int) -> None:
    """So that other buckets, as after a resume, give the same run."""
    right, left = factor_of(2, matrix_rank, shape[1]), factor_of(2, matrix_rank, shape[0])
    here, there = group_of(shape, matrix_rank), group_of(shape, matrix_rank, offset=offset)
    assert not any(place.data_ptr() % 64 for place in [*here.matrices, *here.errors] if place is not None)
    products = [passes.products(group, right, None, add_error=True) for group in (here, there)]
    assert torch.equal(*products)
    assert torch.equal(passes.projections(here, left), passes.projections(there, left))
    for group in (here, there):
        errors = [error for error in group.errors if error is not None]
        passes.settle(group, errors, [Factors(left, right, right)], None)
    of_here, of_there = ([*group.matrices, *group.errors] for group in (here, there))
    torch.testing.assert_close(of_here, of_there, rtol=0, atol=0)


def test_they_serve_fp32_one_thread_and_small_matrix_ranks() -> None:
    assert compiled_for(torch.ones(8, 8), 4) is not None
    assert compiled_for(torch.ones(8, 8), 5) is None
    assert compiled_for(torch.ones(8, 8).double(), 4) is None
    torch.set_num_threads(2)
    try:
        assert compiled_for(torch.ones(8, 8), 3) is None
    finally:
        torch.set_num_threads(1)


def doubled(x: float) -> float:
    return x + x


def test_what_was_compiled_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache_hits() -> int:
        function: Any = compiler.compiled(doubled)
        assert function(1.5) == 3
        return sum(function.stats.cache_hits.values())

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert [cache_hits(), cache_hits()] == [0, 1]
    monkeypatch.setattr(compiler, "SOURCES", "others")
    assert cache_hits() == 0


@pytest.mark.parametrize("error", [ImportError("needs another NumPy"), RuntimeError("no locator available")])
def test_a_numba_that_does_not_work_is_told_and_products_taken(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(name: str) -> None:
        raise error

    monkeypatch.setattr(compilation, "import_module", failing)
    monkeypatch.setattr(compilation, "_compiled", compilation._compiled.__wrapped__)
    with pytest.warns(UserWarning, match=rf"Numba .* can't be used \({error}\).*pip install '\.\[numba\]'"):
        assert compiled_for(torch.ones(8, 8), 3) is None


@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize("power_iterations", [1, 2])
def test_whole_steps_are_the_same_run(alternating: bool, power_iterations: int) -> None:
    algorithm = PowerSGD(matrix_rank=3, alternating=alternating, power_iterations=power_iterations)

    def run() -> torch.Tensor:
        simulation = Simulation(algorithm, [(spec("weight", 48, 40), spec("wide", 30, 1100))], num_workers=2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            flats = [torch.randn(48 * 40 + 30 * 1100, generator=generator) for _ in range(2)]
            assert simulation.step([[flat] for flat in flats])
        assert simulation.syncs[0].stats().compression_ratio > 2
        return flats[0]

    compiled = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "_compiled", lambda: None)
        products = run()
    assert not torch.equal(compiled, products)
    torch.testing.assert_close(compiled, products, rtol=1e-3, atol=1e-3)


def batched_group(shape: tuple[int, int], distance: int) -> MatrixGroup:
    """Three matrices in one flat bucket, errors in one batch."""
    generator = torch.Generator().manual_seed(0)
    numel = shape[0] * shape[1]
    flat = torch.randn(3 * (numel + distance), generator=generator)
    places = range(0, len(flat), numel + distance)
    errors = torch.randn(3, *shape, generator=generator)
    return MatrixGroup(
        ["a", "b", "c"], [flat[place : place + numel].view(shape) for place in places], list(errors), 2
    )


@every_scale
@pytest.mark.parametrize("distance", [0, 7])
@pytest.mark.parametrize("num_terms", [1, 2])
def test_matrices_at_equal_distances_are_one_batch(
    scale: float | None, distance: int, num_terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on accelerators."""
    shape, loss_scale = (18, 33), None if scale is None else torch.tensor(scale)
    right, left = factor_of(3, 2, 33), factor_of(3, 2, 18)
    terms = [
        Factors(left, factor_of(3, 2, 33, seed=2 * each), factor_of(3, 2, 33, seed=2 * each + 1))
        for each in range(num_terms)
    ]

    def run() -> list[torch.Tensor]:
        group = batched_group(shape, distance)
        made = [passes.products(group, right, loss_scale, add_error=True), passes.projections(group, left)]
        errors = [error for error in group.errors if error is not None]
        passes.settle(group, errors, terms, loss_scale)
        return [*made, *group.matrices, *errors]

    monkeypatch.setattr(compilation, "_compiled", lambda: None)
    expected = run()
    batches = []

    def batch_for(group: MatrixGroup) -> torch.Tensor | None:
        batches.append(passes.stacked(group.matrices))
        return batches[-1]

    monkeypatch.setattr(passes, "_batch_for", batch_for)
    got = run()
    assert [each is not None and each.shape == (3, 18, 33) for each in batches] == [True] * 3
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_what_is_no_batch() -> None:
    flat = torch.zeros(100)
    assert passes.stacked([flat[0:6].view(2, 3), flat[10:16].view(2, 3), flat[21:27].view(2, 3)]) is None
    assert passes.stacked([flat[10:16].view(2, 3), flat[0:6].view(2, 3)]) is None
    assert passes.stacked([flat[0:6].view(2, 3), torch.zeros(100)[10:16].view(2, 3)]) is None
    assert passes.stacked([flat[0:6].view(2, 3).t(), flat[6:12].view(2, 3).t()]) is None
    one = passes.stacked([flat[4:10].view(2, 3)])
    assert one is not None
    assert one.shape == (1, 2, 3)
    assert one.data_ptr() == flat[4:].data_ptr()


@pytest.mark.parametrize("tensor", [torch.ones(4, 8).t(), torch.ones(8, 4).double()], ids=["strided", "fp64"])
def test_compiled_code_reads_only_what_it_may(tensor: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="not contiguous or not fp32"):
        compiled_passes.products(MatrixGroup(["a"], [tensor], [None], 2), [], torch.ones(1, 2, 4), 1.0)
