"""Arithmetic in full precision, whatever the user has switched on around the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from thinwire import torch_private

FULL_PRECISION = ("ieee", "none")


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch off autograd, inference mode, autocast and products in TF32 or bf16, while this is open.

    Afterwards every setting of the user's is as it was.
    """
    # A backward pass may run under the first two, and autocast refuses to mix 16-bit types. What a product in
    # TF32 rounds off would neither be sent nor stay in the residual.
    inside: frozenset[str] = getattr(_threads, "inside", frozenset())
    if device.type in inside:  # calls of a step are often nested
        yield
        return
    _threads.inside = inside | {device.type}
    try:
        with _outside_inference(), torch.no_grad(), _products, ExitStack() as restored:
            for kind in (device.type, "cpu"):
                if torch.is_autocast_enabled(kind):  # to enter it costs more than to ask
                    restored.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _threads.inside = inside


def _outside_inference() -> AbstractContextManager[Any]:
    # Tensors made in inference mode could not be written to outside of it any more: residuals, say.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


_threads = threading.local()  # on which devices' types each thread is inside


class _FullProducts:
    """Products in full precision while anybody is inside."""

    # The setting is the whole process's, and backward passes of several devices run on separate threads:
    # the first to come sets it, and the last to go restores it.
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._restored = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._set()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._restored.close()

    def _set(self) -> None:
        if _precision is None:  # before torch 2.9
            self._restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
            return
        for backend in ("cuda", "mkldnn"):
            if _precision(backend, "matmul") not in FULL_PRECISION:
                self._restored.callback(_set_precision, backend, "matmul", _own_precision(backend))
                _set_precision(backend, "matmul", "ieee")


_products = _FullProducts()

_precision: Any = torch_private.fp32_precision
_set_precision: Any = torch_private.set_fp32_precision


def _own_precision(backend: str) -> str:
    """Return the setting of a backend's products themselves, "none" if they follow a wider setting."""
    # Torch tells only what is in effect, so the wider settings are put out of effect while it is asked.
    # Written back as the products' own, the setting in effect would stay when the user changes the wider one.
    with ExitStack() as restored:
        for wider in ("generic", backend):
            restored.callback(_set_precision, wider, "all", _precision(wider, "all"))
            _set_precision(wider, "all", "none")
        return str(_precision(backend, "matmul"))
