"""Arithmetic in full precision, whatever the user has enabled around the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from thinwire import torch_private

_precision: Any = torch_private.fp32_precision
_set_precision: Any = torch_private.set_fp32_precision

# The setting for matrix products is process-wide, and backward passes of several devices run on separate
# threads: the first one inside sets it, and the last one restores it.
_lock, _num_inside, _restored = threading.Lock(), 0, ExitStack()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable autograd, inference mode, autocast and TF32 or bf16 matrix products inside this context."""
    global _num_inside  # noqa: PLW0603
    with _lock:
        for backend in ("cuda", "mkldnn") if _num_inside == 0 else ():
            # TF32 products round: what they lose would neither be sent nor stay in the residual.
            if _precision is None or _precision(backend, "matmul") not in ("ieee", "none"):
                _set_full(backend)
        _num_inside += 1
    try:
        with ExitStack() as inside:
            # Tensors made in inference mode, such as residuals, could not be written to outside of it.
            if torch.is_inference_mode_enabled():
                inside.enter_context(torch.inference_mode(False))
            inside.enter_context(torch.no_grad())
            for kind in (device.type, "cpu"):  # autocast refuses to mix 16-bit types
                if torch.is_autocast_enabled(kind):  # checking is cheaper than entering
                    inside.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                _restored.close()


def _set_full(backend: str) -> None:
    if _precision is None:  # before torch 2.9
        _restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        return
    # Torch shows only the effective setting. Unset the wider settings to see the one of matrix products
    # itself: the effective one, restored as their own, would outlive the wider one.
    with ExitStack() as wider_restored:
        for wider in ("generic", backend):
            wider_restored.callback(_set_precision, wider, "all", _precision(wider, "all"))
            _set_precision(wider, "all", "none")
        _restored.callback(_set_precision, backend, "matmul", _precision(backend, "matmul"))
    _set_precision(backend, "matmul", "ieee")
