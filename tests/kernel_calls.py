"""Calls of kernels with a list for each argument, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.kernels.matrices import MatmulBatch, MatrixGroup, Reconstruction, Terms


def asked(
    groups: Sequence[MatrixGroup],
    factors: Sequence[torch.Tensor],
    loss_scale: torch.Tensor | None,
    *,
    add_error: bool,
) -> list[MatmulBatch]:
    return [MatmulBatch(*each, loss_scale, add_error) for each in zip(groups, factors, strict=True)]


def wanted(
    groups: Sequence[MatrixGroup],
    errors: Sequence[Sequence[torch.Tensor] | None],
    terms: Sequence[Terms],
    loss_scale: torch.Tensor | None,
    is_healthy: torch.Tensor | None = None,
) -> list[Reconstruction]:
    return [Reconstruction(*each, loss_scale, is_healthy) for each in zip(groups, errors, terms, strict=True)]
