"""Arithmetic as it is written, whatever the user has switched on around the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["exact_arithmetic"]

FULL_PRECISION = ("ieee", "none")


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast, no products in TF32 or bf16.

    Backward may run under the first two; autocast refuses to mix 16-bit types. What a product in TF32
    rounds off would neither be sent nor stay owed.
    """
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autocast("cpu", enabled=False),
        _full_products(),
    ):
        yield


@contextmanager
def _full_products() -> Iterator[None]:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    with ExitStack() as restored:
        for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
            precision = backend.fp32_precision
            if precision not in FULL_PRECISION:
                restored.callback(setattr, backend, "fp32_precision", precision)
                backend.fp32_precision = "ieee"
        yield
