"""How the compiled arithmetic is compiled, and how it is handed many tensors in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

Matrix: TypeAlias = NDArray[np.float32]
FactorBatch: TypeAlias = NDArray[np.float32]
"""Factors of several matrices, (matrices, r, rows or columns)."""
Addresses: TypeAlias = NDArray[np.int64]

# Sums may be reordered, so that they can be vectorised. Infinity and NaN keep their meaning.
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},
    # Other threads go on meanwhile: the backward pass's, and the backend's.
    "nogil": True,
    # Partitioner by zero gives infinity, as in PyTorch, and loops need not look out for it.
    "error_model": "numpy",
    # To compile takes seconds, and each process of a job would do it again.
    "cache": True,
}

# Numba keeps what it compiled until the function's own file changes, though it calls functions of others.
SOURCES = sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function when it is called first, and keep that until any file of this folder changes."""
    return cast("Function", _keyed_by_sources(njit(**OPTIONS)(function)))


def inlined(function: Function) -> Function:
    """Compile a function as `compiled` does, to become a part of those that call it."""
    # So vectors stay in registers from one to the next, and what is constant for a caller is so within.
    return cast("Function", _keyed_by_sources(njit(**OPTIONS, forceinline=True)(function)))


def _keyed_by_sources(dispatcher: Any) -> Any:
    # Numba has no public word for what it compares; if that is gone, `dispatch` does without Numba. Names of
    # files change too: those of an older version may name types that are gone, and Numba could not read them.
    file = dispatcher._cache._cache_file
    file._source_stamp = SOURCES
    file._index_path = file._index_path.replace(".nbi", f".{SOURCES[:8]}.nbi")
    file._data_name_pattern = file._data_name_pattern.replace(".{", f".{SOURCES[:8]}.{{")
    return dispatcher


def addresses(tensors: Sequence[torch.Tensor]) -> Addresses:
    """Return where tensors lie, to hand over many in one call."""
    # An address tells neither type nor strides: compiled code would read, and write, whatever lies there.
    if not all(tensor.is_contiguous() and tensor.dtype is torch.float32 for tensor in tensors):
        raise AssertionError("compiled code got a tensor that is not contiguous or not fp32")
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)
