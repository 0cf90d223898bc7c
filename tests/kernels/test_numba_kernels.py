"""The compiled passes against PyTorch's products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_calls import asked, check_a_step, factor_of, iteration, wanted
from thinwire.kernels.matrices import MatrixGroup

numba = pytest.importorskip("numba", reason="NO NUMBA HERE: nothing compiled was tested")
compiler = pytest.importorskip("thinwire.kernels.numba.compiler")
NUMBA = pytest.importorskip("thinwire.kernels.numba.tables").TABLES.low_rank

# Around the widths and numbers of rows at which they take other ways.
SHAPES = [(1, 1), (3, 5), (16, 1), (18, 33), (37, 1024), (64, 64), (5, 1025), (36, 2049), (6, 4097)]


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


# Each setting with every shape, but not with every other setting.
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("scale", "basis_is_left", "matrix_rank"),
    [(8.0, True, 1), (None, False, 1), (None, True, 3), (8.0, False, 3), (8.0, True, 4), (None, False, 4)],
)
def test_a_step_is_that_of_float64(
    shape: tuple[int, int], scale: float | None, basis_is_left: bool, matrix_rank: int
) -> None:
    left, all_owe = basis_is_left, matrix_rank != 3  # else products serve
    check_a_step(
        NUMBA, [shape], matrix_rank, scale=scale, projects_first=left, basis_is_left=left, all_owe=all_owe
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("columns", [40, 1100])
def test_what_is_not_finite_shows_in_every_factor(value: float, columns: int) -> None:
    group = group_of((6, columns))
    group.matrices[1][2, 3] = value
    (left,) = NUMBA.products(asked([group], [factor_of(2, 3, columns)], None, add_error=True))
    assert left[0].isfinite().all()
    assert not left[1, :, 2].isfinite().any()
    (own,) = NUMBA.projections(asked([group], [factor_of(2, 3, 6)], None, add_error=False))
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
    groups = [here, there]
    assert torch.equal(*NUMBA.products(asked(groups, [right] * 2, None, add_error=True)))
    assert torch.equal(*NUMBA.projections(asked(groups, [left] * 2, None, add_error=False)))
    errors = [[error for error in group.errors if error is not None] for group in groups]
    NUMBA.reconstruct(wanted(groups, errors, [[iteration(left, right, right)]] * 2, None))
    of_here, of_there = ([*group.matrices, *group.errors] for group in (here, there))
    torch.testing.assert_close(of_here, of_there, rtol=0, atol=0)


def doubled(x: float) -> float:
    return x + x


def test_code_compiled_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cache_hits() -> int:
        function: Any = compiler.compiled(doubled)
        assert function(1.5) == 3
        return sum(function.stats.cache_hits.values())

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert [cache_hits(), cache_hits()] == [0, 1]
    monkeypatch.setattr(compiler, "SOURCES", "others")
    assert cache_hits() == 0
    monkeypatch.setattr("numba.core.codegen.CPUCodegen.magic_tuple", lambda _: ("another", "", ""))
    assert [cache_hits(), len([*tmp_path.rglob("*.nbi")])] == [0, 3]
    for index in tmp_path.rglob("*.nbi"):
        index.write_bytes(bytes(64))  # as after a power cut
    assert [cache_hits(), cache_hits()] == [0, 1]
    for index in tmp_path.rglob("*.nbi"):  # that can be neither read nor written
        index.unlink()
        index.mkdir()
    assert cache_hits() == 0


@pytest.mark.parametrize("tensor", [torch.ones(4, 8).t(), torch.ones(8, 4).double()], ids=["strided", "fp64"])
def test_compiled_code_reads_only_what_it_may(tensor: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="not contiguous or not fp32"):
        compiler.addresses([tensor])
