"""The choice of backends: for each bucket the first one that serves it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, cast
from zlib import crc32

import torch

from thinwire.kernels.backend import NUMBA_FACTOR_ROWS, CodeKernels, EntryKernels, Kernels, Tables
from thinwire.kernels.torch_codes import CODES
from thinwire.kernels.torch_entries import ENTRIES
from thinwire.kernels.torch_kernels import LOW_RANK
from thinwire.kernels.triton import limits as triton_limits
from thinwire.tensors import accelerators
from thinwire.tensors.entries import EntryLayout
from thinwire.tensors.layout import group_indices


@dataclass(frozen=True, eq=False)
class Backend:
    """Tables of functions, and what they serve."""

    name: str  # to show
    # Returns the tables; None if they can't be used. Called only if they would serve; later calls are cheap.
    load: Callable[[], Tables | None]
    version: Callable[[], str] = lambda: ""  # the package's, once the tables are loaded
    # Whether they serve matrices of a dtype on a device at a matrix rank or, if that is None, tensors in few
    # bits and few entries. Depends otherwise only on the number of threads.
    serves: Callable[[torch.device, torch.dtype, int | None], bool] = lambda *_: True


@cache
def _load_numba() -> Tables | None:
    if find_spec("numba") is None:
        return None
    try:
        # Imported here: Numba is an extra, and takes longer to import than everything else.
        return cast("Tables", import_module("thinwire.kernels.numba.tables").TABLES)
    # Import errors; no folder for Numba's cache; and unknown internals of that cache.
    except (ImportError, RuntimeError, AttributeError) as error:
        # As in a container without a home: Numba finds no folder in which this user can write.
        fix = "pip install '.[numba]' in a clone of Thinwire"
        if "no locator available" in str(error):
            fix = "set NUMBA_CACHE_DIR to a folder that this process can write"
        warnings.warn(
            f"Numba is installed but can't be used ({error}): PyTorch's arithmetic is used, about half as "
            f"fast on one thread; to fix this, {fix}",
            stacklevel=2,
        )
        return None


def _numba_serves(device: torch.device, dtype: torch.dtype, matrix_rank: int | None) -> bool:
    if device.type != "cpu" or dtype == torch.float64:
        return False
    # PyTorch's products use all threads, compiled code only one. For few bits and entries, PyTorch makes many
    # passes over data that stays in cache, which gain little from more threads.
    if matrix_rank is None:
        return True
    is_served = dtype == torch.float32 and matrix_rank <= NUMBA_FACTOR_ROWS
    return is_served and torch.get_num_threads() == 1


def _load_triton() -> Tables | None:
    if why_not := triton_limits.why_unusable():
        triton_limits.warn_fallback(why_not)
        return None
    return cast("Tables", import_module("thinwire.kernels.triton.triton_kernels").TABLES)


# One object for the process: matrices are grouped by the kernels that serve them.
TORCH_TABLES = Tables(LOW_RANK, CODES, ENTRIES)

NUMBA = Backend("Numba", _load_numba, lambda: str(import_module("numba").__version__), _numba_serves)
TRITON = Backend("Triton", _load_triton, lambda: triton_limits.installed() or "", triton_limits.serves)
# Wheels for a CPU and for a GPU have the same version before the "+".
TORCH = Backend("PyTorch", lambda: TORCH_TABLES, lambda: torch.__version__.partition("+")[0])

backends: tuple[Backend, ...] = (NUMBA, TRITON, TORCH)
"""Preferred backends first; the last one serves everything. It is read at every call, so that tests and
benchmarks can switch it: `dispatch.backends = (dispatch.TORCH,)` uses only PyTorch's products.
"""


def _serving(like: torch.Tensor, matrix_rank: int | None) -> tuple[Backend, Tables]:
    """Return the first backend that serves (see `Backend.serves`), and its tables."""
    return _first_that_serves(backends, like.device, like.dtype, matrix_rank, torch.get_num_threads())


@cache
def _first_that_serves(
    known: tuple[Backend, ...],
    device: torch.device,
    dtype: torch.dtype,
    matrix_rank: int | None,
    num_threads: int,
) -> tuple[Backend, Tables]:
    for backend in known:
        # A backend that can't be loaded has warned of it, once; use the next one.
        if backend.serves(device, dtype, matrix_rank) and (tables := backend.load()) is not None:
            return backend, tables
    names = ", ".join(backend.name for backend in known)
    raise AssertionError(f"no backend of {names} serves {dtype} on {device}; PyTorch's serves all")


def kernels_for(like: torch.Tensor, matrix_rank: int) -> Kernels:
    """Return the low-rank kernels that serve matrices like this one."""
    return _serving(like, matrix_rank)[1].low_rank


def code_kernels_for(like: torch.Tensor) -> CodeKernels:
    """Return the kernels that serve averaging in few bits of a tensor like this one."""
    return _serving(like, None)[1].codes


def entry_kernels_for(like: torch.Tensor, layout: EntryLayout) -> EntryKernels:
    """Return the kernels that serve averaging of few entries of a tensor like this one."""
    kernels = _serving(like, None)[1].entries
    return kernels if kernels.serves(layout) else ENTRIES


def name_of_kernels_for(like: torch.Tensor, matrix_rank: int) -> str:
    """Return the backend's name, version and kind of device: if these differ, the last bits may differ."""
    backend, device = _serving(like, matrix_rank)[0], like.device
    is_by_threads = backend is TORCH and device.type == "cpu"
    return name_of_results("products", device) if is_by_threads else _name_of(backend, device)


def name_of_results(kind: Literal["products", "eigenvectors"], device: torch.device) -> str:
    """Return the same for PyTorch's products or eigenvectors, with a sum of some of their bits."""
    threads = torch.get_num_threads()
    some = f"{kind} {_bits_of_some(kind, device, threads)}"
    return f"{_name_of(TORCH, device)}, threads (OMP_NUM_THREADS): {threads}, {some}"


@cache
def _bits_of_some(kind: str, device: torch.device, threads: int) -> str:
    # The kind of a processor decides how its library multiplies. Where eigenvalues are close, other last bits
    # turn eigenvectors by any angle: rank 0, on an AMD, would decode directions that rank 1, on an Intel, has
    # not sent. The name has the number of threads, which decides, too; here it is only the cache's key.
    rows, columns = (torch.arange(side, device=device, dtype=torch.float32) for side in (512, 2048))
    matrix = torch.outer(rows, columns).remainder(251) / 251
    results = matrix @ matrix.T
    if kind == "eigenvectors":
        results = torch.linalg.eigh(results).eigenvectors
    return f"{crc32(bytes(results.cpu().flatten().view(torch.uint8).tolist())):08x}"


def _name_of(backend: Backend, device: torch.device) -> str:
    name = f"{backend.name} {backend.version()}"
    if device.type != "cuda":
        return name
    gpu = torch.cuda.get_device_properties(device)
    return f"{name} on {gpu.gcnArchName if torch.version.hip else f'sm_{gpu.major}{gpu.minor}'}"


def choice() -> tuple[object, ...]:
    """Return the facts besides tensors that choose backends, for callers that keep kernels to compare."""
    return backends, torch.get_num_threads()


def all_finite(*tensors: torch.Tensor) -> torch.Tensor:
    """Return whether every element of every tensor is finite, as a tensor of one bool; not read back.

    Empty tensors are finite. Tensors may be on several devices; the answer is on the first one's.
    """
    filled = list(filter(torch.numel, tensors))
    if not filled:
        return torch.tensor(True, device="cpu")
    answers = []
    for kind in group_indices(filled, lambda tensor: (tensor.device, tensor.dtype)):
        some = [filled[index] for index in kind]
        if accelerators.is_accelerator(some[0].device):
            # Kernels get no strides, only a tensor's address and length.
            whole = [tensor.contiguous() for tensor in some]
            answers.append(kernels_for(whole[0], 1).all_finite(whole))
        else:
            # NaN propagates through minimum and maximum, so the extremes are enough.
            extremes = torch.stack([extreme for tensor in some for extreme in torch.aminmax(tensor)])
            answers.append(extremes.isfinite().all())
    if len(answers) == 1:
        return answers[0]
    return torch.stack([answer.to(answers[0].device, non_blocking=True) for answer in answers]).all()
