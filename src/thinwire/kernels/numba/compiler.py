"""How arithmetic is compiled, and how it gets many tensors in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
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
    # Other threads continue meanwhile: those of the backward pass and of the backend.
    "nogil": True,
    # Division by zero gives infinity, as in PyTorch, and loops need no check.
    "error_model": "numpy",
    # Compiling takes seconds, and each process of a job would repeat it.
    "cache": True,
}

# Numba caches compiled code until the function's own file changes, even if it calls functions of other files.
SOURCES = sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call, and cache it until any file of this folder changes."""
    return cast("Function", _keyed_by_sources(njit(**OPTIONS)(function)))


def inlined(function: Function) -> Function:
    """Compile a function as `compiled` does, inlined into its callers."""
    # So vectors stay in registers between functions, and a caller's constants are constants inside.
    return cast("Function", _keyed_by_sources(njit(**OPTIONS, forceinline=True)(function)))


def _keyed_by_sources(dispatcher: Any) -> Any:
    # Numba has no public API for the stamp that it compares; if it is gone, `dispatch` does without Numba.
    # File names change too: old files may name types that are gone, and Numba could not read them. Kinds of
    # processors that share a home have separate files: if two wrote at once, one could load the other's code.
    file = dispatcher._cache._cache_file
    file._source_stamp = SOURCES
    processor = dispatcher.targetctx.codegen().magic_tuple()
    key = sha256(repr((SOURCES, processor)).encode()).hexdigest()[:8]
    file._index_path = file._index_path.replace(".nbi", f".{key}.nbi")
    file._data_name_pattern = file._data_name_pattern.replace(".{", f".{key}.{{")
    for name in ("load_overload", "save_overload"):
        setattr(dispatcher._cache, name, _if_possible(getattr(dispatcher._cache, name), file._index_path))
    return dispatcher


def _if_possible(use_files: Callable[..., Any], index: str) -> Callable[..., Any]:
    def use_or_leave(*arguments: Any) -> Any:
        # On a full disk, with others' files or after a power cut, only compile: otherwise one rank's first
        # step would fail. Readers raise all kinds of errors for a damaged file.
        try:
            return use_files(*arguments)
        except Exception:
            with suppress(OSError):
                Path(index).unlink()  # so that a new one can be written

    return use_or_leave


def addresses(tensors: Sequence[torch.Tensor]) -> Addresses:
    """Return the addresses of tensors, to pass many in one call."""
    # An address has no dtype or strides: compiled code would read and write whatever is there.
    if not all(tensor.is_contiguous() and tensor.dtype is torch.float32 for tensor in tensors):
        raise AssertionError("compiled code got a tensor that is not contiguous or not fp32")
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)
