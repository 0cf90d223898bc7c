"""PyTorch's kernels: batches, and what they do of a step, against plain products."""

from __future__ import annotations

import pytest
import torch

from kernel_calls import asked, iteration, wanted
from thinwire.kernels import torch_kernels
from thinwire.kernels.matrices import MatrixGroup, Rows, round_all_into, round_into
from thinwire.kernels.torch_kernels import LOW_RANK as KERNELS
from thinwire.tensors import accelerators
from thinwire.tensors.layout import stack_view


def factor_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


@pytest.fixture
def as_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators, and of no matrix alone."""
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    for name in ("PRODUCT", "SUM"):
        monkeypatch.delitem(getattr(torch_kernels, name), 2)


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("distance", [0, 7])
@pytest.mark.parametrize("num_terms", [1, 2])
@pytest.mark.parametrize("projects", [False, True])
def test_matrices_at_equal_distances_are_one_batch(
    scale: float | None, distance: int, num_terms: int, projects: bool, request: pytest.FixtureRequest
) -> None:
    loss_scale = None if scale is None else torch.tensor(scale)
    right, left = factor_of(3, 2, 33), factor_of(3, 2, 18)
    terms = [
        iteration(left, factor_of(3, 2, 33, seed=2 * each), factor_of(3, 2, 33, seed=2 * each + 1))
        for each in range(num_terms)
    ]

    def run() -> list[torch.Tensor]:
        group = batched_group((18, 33), distance)
        made = [
            *KERNELS.products(asked([group], [right], loss_scale, add_error=not projects)),
            *KERNELS.projections(asked([group], [left], loss_scale, add_error=projects)),
        ]
        errors = [error for error in group.errors if error is not None]
        KERNELS.reconstruct(wanted([group], [errors], [terms], loss_scale))
        return [*made, *group.matrices, *errors]

    expected = run()
    request.getfixturevalue("as_batches")
    for a, b in zip(run(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("as_batches")
@pytest.mark.parametrize("healthy", [True, False])
def test_of_a_batch_that_is_not_healthy_residuals_stay(healthy: bool) -> None:
    """To the bit, whatever the gradients have become."""
    terms = [iteration(factor_of(3, 2, 18), factor_of(3, 2, 33), factor_of(3, 2, 33, seed=2))]
    before, plain, group = (batched_group((18, 33), distance=7) for _ in range(3))
    if not healthy:
        group.matrices[1][2, 3] = torch.inf
    for each, flag in ((plain, None), (group, torch.tensor(healthy))):
        errors = [error for error in each.errors if error is not None]
        KERNELS.reconstruct(wanted([each], [errors], [terms], None, flag))
    assert [matrix.isnan().all() for matrix in group.matrices] == [not healthy] * 3
    for error, expected in zip(group.errors, (plain if healthy else before).errors, strict=True):
        torch.testing.assert_close(error, expected, rtol=0, atol=0)


def test_what_is_no_batch() -> None:
    flat = torch.zeros(100)
    assert stack_view([flat[0:6].view(2, 3), flat[10:16].view(2, 3), flat[21:27].view(2, 3)]) is None
    assert stack_view([flat[10:16].view(2, 3), flat[0:6].view(2, 3)]) is None
    assert stack_view([flat[0:6].view(2, 3), torch.zeros(100)[10:16].view(2, 3)]) is None
    assert stack_view([flat[0:6].view(2, 3).t(), flat[6:12].view(2, 3).t()]) is None
    one = stack_view([flat[4:10].view(2, 3)])
    assert one is not None
    assert one.shape == (1, 2, 3)
    assert one.data_ptr() == flat[4:].data_ptr()


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (400, 700)], ids=["one block", "several blocks"])
def test_a_step_is_the_mathematics_of_the_paper(
    shape: tuple[int, int], dtype: torch.dtype, scale: float | None
) -> None:
    """Groups of several shapes in one call; residuals of some matrices only."""
    loss_scale = None if scale is None else torch.tensor(scale)
    groups = [
        MatrixGroup(
            ["a", "b"],
            [factor_of(*each, seed=seed).to(dtype) for seed in (0, 1)],
            [factor_of(*each, seed=2).to(dtype), None],
            matrix_rank,
        )
        for each, matrix_rank in ((shape, 2), (shape[::-1], 3))
    ]
    whole = [
        torch.stack(
            [m if e is None else m + e * (scale or 1) for m, e in zip(g.matrices, g.errors, strict=True)]
        )
        for g in groups
    ]
    rights = [factor_of(2, g.matrix_rank, g.matrices[0].shape[1]).to(dtype) for g in groups]
    lefts = KERNELS.products(asked(groups, rights, loss_scale, add_error=True))
    own = KERNELS.projections(asked(groups, lefts, loss_scale, add_error=False))
    for left, right, projection, m in zip(lefts, rights, own, whole, strict=True):
        torch.testing.assert_close(left, right @ m.mT, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(projection, left @ m, rtol=1e-4, atol=1e-1)
    bases = KERNELS.orthonormal_rows([Rows(left) for left in lefts])
    own = KERNELS.projections(asked(groups, bases, loss_scale, add_error=False))
    found = [
        iteration(basis, projection, projection / 2) for basis, projection in zip(bases, own, strict=True)
    ]
    errors = [[torch.empty_like(m) for m in groups[0].matrices], None]
    KERNELS.reconstruct(wanted(groups, errors, [[each] for each in found], loss_scale))
    for group, each in zip(groups, found, strict=True):
        torch.testing.assert_close(torch.stack([*group.matrices]), each.mean[0].mT @ each.mean[1])
    rest = (whole[0] - bases[0].mT @ own[0]) / (scale or 1)
    assert errors[0] is not None
    torch.testing.assert_close(torch.stack(errors[0]), rest, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("healthy", [None, True, False])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_what_a_gradient_cannot_hold_goes_to_its_residual(
    scale: float | None, healthy: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once as one by one, beyond the range of fp16 too; of a step that is not healthy nothing goes."""
    loss_scale = None if scale is None else torch.tensor(scale)
    means = [factor_of(40, seed=seed) for seed in (1, 2)]
    means[0][3], means[1][4] = 1e6, -3e38
    expected = [(torch.empty(40).half(), factor_of(40, seed=seed)) for seed in (3, 4)]
    before = [error.clone() for _, error in expected]
    found = [(torch.empty(40).half(), error.clone()) for _, error in expected]
    for mean, (gradient, error) in zip(means, expected, strict=True):
        round_into(gradient, mean.clone(), error, loss_scale)
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    flag = None if healthy is None else torch.tensor(healthy)
    items = [(gradient, mean.clone(), error) for (gradient, error), mean in zip(found, means, strict=True)]
    round_all_into(items, loss_scale, flag)
    for (gradient, error), (mean, rest), was in zip(found, expected, before, strict=True):
        assert torch.equal(gradient, mean)
        assert torch.equal(error, was if healthy is False else rest)
    assert found[0][1][3] > 1e5 or healthy is False


@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_what_a_type_cannot_hold_stays_in_the_residual(dtype: torch.dtype, scale: float | None) -> None:
    """Without one it is cut to the range."""
    mean = torch.tensor([1e6, -1e6, 3e38, 1.0009765, 1e-9, 0.0])
    gradient, forgotten, error = (
        torch.zeros(6, dtype=dtype),
        torch.zeros(6, dtype=dtype),
        torch.full((6,), 0.5),
    )
    loss_scale = None if scale is None else torch.tensor(scale)
    round_into(gradient, mean, error, loss_scale)
    round_into(forgotten, mean, None, loss_scale)
    assert torch.equal(gradient, forgotten)
    assert gradient.isfinite().all()
    assert error.isfinite().all()
    assert dtype != torch.float16 or gradient[:3].tolist() == [65504.0, -65504.0, 65504.0]
    torch.testing.assert_close(gradient.double() + (error.double() - 0.5) * (scale or 1.0), mean.double())
