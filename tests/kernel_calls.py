"""Calls of kernels with a list for each argument, as tests write them, and a step checked by float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.kernels import dispatch
from thinwire.kernels.backend import Kernels
from thinwire.kernels.matrices import Factors, MatmulBatch, MatrixGroup, Reconstruction, Rows, Terms


def asked(
    groups: Sequence[MatrixGroup],
    factors: Sequence[torch.Tensor],
    loss_scale: torch.Tensor | None,
    *,
    add_error: bool,
) -> list[MatmulBatch]:
    return [MatmulBatch(*item, loss_scale, add_error) for item in zip(groups, factors, strict=True)]


def wanted(
    groups: Sequence[MatrixGroup],
    errors: Sequence[Sequence[torch.Tensor] | None],
    terms: Sequence[Terms],
    loss_scale: torch.Tensor | None,
    is_healthy: torch.Tensor | None = None,
) -> list[Reconstruction]:
    return [Reconstruction(*item, loss_scale, is_healthy) for item in zip(groups, errors, terms, strict=True)]


def orthonormal_rows(batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    kernels = dispatch.kernels_for(batches[0], max(batch.shape[1] for batch in batches))
    return kernels.orthonormal_rows([Rows(batch) for batch in batches])


def factor_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def iteration(
    basis: torch.Tensor, own: torch.Tensor, mean: torch.Tensor, *, basis_is_left: bool = True
) -> Factors:
    """The factors of an iteration that has projected on a basis."""
    if basis_is_left:
        return Factors((basis, own), (basis, mean))
    return Factors((own, basis), (mean, basis), projection=0)


class Drawing:
    """Normal numbers from one seed, the same on all devices."""

    def __init__(self, device: str = "cpu") -> None:
        self._device, self._generator = device, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device)


def assert_near(found: torch.Tensor, exact: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (found.double() - exact).norm() <= tolerance * (exact.norm() + 1)


def check_a_step(
    kernels: Kernels,
    shapes: Sequence[tuple[int, int]],
    matrix_rank: int,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,  # of the loss
    healthy: bool | None = None,  # None: the host decides, not the device
    all_owe: bool = True,  # or the second matrix of each shape has no residual
    projects_first: bool = False,  # what is computed first adds the residuals
    basis_is_left: bool = True,  # the means are of projections, not of products
    distance: int = 0,  # elements between two matrices
    device: str = "cpu",
) -> None:
    """Compare a step of two matrices of each shape with float64, and the residuals that it leaves."""
    draw, wide = Drawing(device), torch.promote_types(dtype, torch.float32)
    loss_scale, factor = (None, 1.0) if scale is None else (torch.tensor(scale, device=device), scale)
    flag = None if healthy is None else torch.tensor(healthy, device=device)
    groups, wholes = list[MatrixGroup](), list[torch.Tensor]()
    for rows, columns in shapes:
        flat, errors = draw(2, rows * columns + distance).to(dtype), [*draw(2, rows, columns).to(wide)]
        matrices = [part[: rows * columns].view(rows, columns) for part in flat]
        owed = [error.double() * all_owe**place for place, error in enumerate(errors)]
        wholes.append(torch.stack([m.double() + factor * e for m, e in zip(matrices, owed, strict=True)]))
        group_rank = min(matrix_rank, rows, columns)
        groups.append(MatrixGroup(["a", "b"], matrices, errors if all_owe else [errors[0], None], group_rank))
    rights, lefts = (
        [draw(2, group.matrix_rank, group.matrices[0].shape[side]).to(wide) / 4 for group in groups]
        for side in (1, 0)
    )
    if projects_first:
        owns = kernels.projections(asked(groups, lefts, loss_scale, add_error=True))
    found = kernels.products(asked(groups, rights, loss_scale, add_error=not projects_first))
    if not projects_first:
        owns = kernels.projections(asked(groups, lefts, loss_scale, add_error=False))
    for group, whole, right, left, product, own in zip(
        groups, wholes, rights, lefts, found, owns, strict=True
    ):
        assert_near(product, right.double() @ whole.mT)
        assert_near(own, left.double() @ whole)
        if dtype.itemsize > 2:  # the sum stays where the gradient was; 16 bits can't hold it
            assert_near(torch.stack([*group.matrices]), whole)
    bases, sent = (lefts, owns) if basis_is_left else (rights, found)
    means = [draw(*own.shape).to(wide) / 4 for own in sent]
    terms = [
        [iteration(*factors, basis_is_left=basis_is_left)] for factors in zip(bases, sent, means, strict=True)
    ]
    errors_of = [[*torch.zeros(whole.shape, dtype=wide, device=device)] for whole in wholes]
    kernels.reconstruct(wanted(groups, errors_of, terms, loss_scale, flag))
    for group, whole, written, (term,) in zip(groups, wholes, errors_of, terms, strict=True):
        ours, mean = (left.double().mT @ right.double() for left, right in (term.sent, term.mean))
        results, rest = torch.stack([*group.matrices]).double(), torch.stack(written).double()
        if healthy is False:
            assert results.isnan().all()
            assert not rest.any()
            continue
        # Triton's interpreter does not round to bf16 as GPUs do.
        assert_near(results, mean, {torch.bfloat16: 8e-3, torch.float16: 5e-4}.get(dtype, 1e-5))
        assert_near(rest * factor, whole - ours + mean - results)
