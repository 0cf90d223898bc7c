"""Arithmetic as it is written, whatever the user has switched on around the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["exact_arithmetic"]

FULL_PRECISION = ("ieee", "none")

# Backward passes of several devices run on threads of their own.
_asking = threading.Lock()


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast, no products in TF32 or bf16.

    Backward may run under the first two; autocast refuses to mix 16-bit types. What a product in TF32
    rounds off would neither be sent nor stay owed. Afterwards every setting of the user's is as it was.
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
    if not hasattr(torch._C, "_get_fp32_precision_getter"):  # before torch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    with ExitStack() as restored:
        for backend in ("cuda", "mkldnn"):
            if _precision(backend, "matmul") not in FULL_PRECISION:
                restored.callback(_set_precision, backend, "matmul", _own_precision(backend))
                _set_precision(backend, "matmul", "ieee")
        yield


def _own_precision(backend: str) -> str:
    """What the user has set for a backend's products themselves, "none" if they follow a wider setting.

    Torch tells only what is in effect, so the wider settings are put out of effect while it is asked.
    Written back as the own one, the setting in effect would stay when the user changes the wider one.
    """
    with _asking, ExitStack() as restored:
        for wider in ("generic", backend):
            restored.callback(_set_precision, wider, "all", _precision(wider, "all"))
            _set_precision(wider, "all", "none")
        return _precision(backend, "matmul")


def _precision(backend: str, operation: str) -> str:
    return torch._C._get_fp32_precision_getter(backend, operation)


def _set_precision(backend: str, operation: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, precision)
