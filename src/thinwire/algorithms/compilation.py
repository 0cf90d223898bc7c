"""Where compiled arithmetic serves: fp32 and matrix ranks up to 4, on one thread of the CPU, with Numba."""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

__all__ = ["compiled_for"]


def compiled_for(tensor: torch.Tensor, matrix_rank: int) -> ModuleType | None:
    """`thinwire.algorithms.compiled`, if it serves a tensor like this one."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or torch.get_num_threads() > 1:
        return None
    compiled = _compiled()
    return compiled if compiled is not None and matrix_rank <= compiled.FACTOR_ROWS else None


@lru_cache(maxsize=1)
def _compiled() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    try:
        return import_module("thinwire.algorithms.compiled")
    # Numba's own, that it finds no place for its cache, and that it keeps it otherwise than is known.
    except (ImportError, RuntimeError, AttributeError) as error:
        warnings.warn(
            f"Numba is installed but can't be used ({error}): low-rank arithmetic takes PyTorch's products, "
            "about half as fast on one thread; to mend it, pip install '.[numba]' in a clone of Thinwire",
            stacklevel=2,
        )
        return None
