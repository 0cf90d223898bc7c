"""Which backend computes what: for each group the first one that serves it.

The functions here are the methods of `Kernels`, with every group handed to its backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch

from thinwire.kernels.base import FACTOR_ROWS, CodeKernels, EntryKernels, Kernels
from thinwire.kernels.matrices import Asked, Factors, MatrixGroup, Reconstruction, Write
from thinwire.kernels.torch_codes import TorchCodes
from thinwire.kernels.torch_entries import TorchEntries
from thinwire.kernels.torch_kernels import TorchKernels
from thinwire.kernels.triton import limits as triton_limits
from thinwire.tensors import accelerators


@dataclass(frozen=True)
class Backend:
    """Kernels, and what they serve.

    Attributes:
        name: For people.
        serves: Whether they serve matrices like this one at this matrix rank, in this process as it is now.
            Asked for every group of every step: cheap, reads nothing back from a device, imports nothing.
        load: Returns the kernels, or None where they can't be used; called only if they would serve.
        serves_codes: The same of averaging in few bits: whether a tensor like this one is served.
        load_codes: Returns the kernels for that, or None.
        load_entries: Returns the kernels for few entries, or None. Serving codes, it serves those.
        version: Returns that of the package, once the kernels are loaded.
    """

    name: str
    serves: Callable[[torch.Tensor, int], bool]
    load: Callable[[], Kernels | None]
    serves_codes: Callable[[torch.Tensor], bool]
    load_codes: Callable[[], CodeKernels | None]
    load_entries: Callable[[], EntryKernels | None] = lambda: None
    version: Callable[[], str] = lambda: ""


def _numba_serves(like: torch.Tensor, matrix_rank: int) -> bool:
    # With more threads PyTorch's products run on all of them, and compiled code on one.
    return (
        like.device.type == "cpu"
        and like.dtype == torch.float32
        and torch.get_num_threads() == 1
        and matrix_rank <= FACTOR_ROWS
    )


@lru_cache(maxsize=1)
def _numba_kernels() -> Kernels | None:
    if find_spec("numba") is None:
        return None
    try:
        # Not at the head of this file: Numba is an extra, and takes longer to import than all else.
        module = import_module("thinwire.kernels.numba.numba_kernels")
    # Numba's own, that it finds no place for its cache, and that it keeps it otherwise than is known.
    except (ImportError, RuntimeError, AttributeError) as error:
        warnings.warn(
            f"Numba is installed but can't be used ({error}): low-rank arithmetic takes PyTorch's products, "
            "about half as fast on one thread; to mend it, pip install '.[numba]' in a clone of Thinwire",
            stacklevel=2,
        )
        return None
    return cast("Kernels", module.NumbaKernels())


@lru_cache(maxsize=1)
def _numba_codes() -> CodeKernels | None:
    if _numba_kernels() is None:
        return None
    module = import_module("thinwire.kernels.numba.numba_codes")
    return cast("CodeKernels", module.NumbaCodes())


@lru_cache(maxsize=1)
def _numba_entries() -> EntryKernels | None:
    if _numba_kernels() is None:
        return None
    module = import_module("thinwire.kernels.numba.numba_entries")
    return cast("EntryKernels", module.NumbaEntries())


def _triton_serves(like: torch.Tensor, matrix_rank: int) -> bool:
    if not triton_limits.reaches(like.device):
        return False
    if like.dtype not in triton_limits.GRADIENT_TYPES:
        triton_limits.tell(f"Triton's kernels do not take {like.dtype}")
        return False
    if matrix_rank > triton_limits.FACTOR_ROWS:
        triton_limits.tell(
            f"Triton's kernels take matrix ranks up to {triton_limits.FACTOR_ROWS}, this one is {matrix_rank}"
        )
        return False
    return True


def _triton_serves_codes(like: torch.Tensor) -> bool:
    if not triton_limits.reaches(like.device):
        return False
    if like.dtype != torch.float32:
        triton_limits.tell(f"Triton's kernels for few bits do not take {like.dtype}")
        return False
    return True


@lru_cache(maxsize=1)
def _triton_kernels() -> Kernels:
    return cast("Kernels", import_module("thinwire.kernels.triton.triton_kernels").TritonKernels())


@lru_cache(maxsize=1)
def _triton_codes() -> CodeKernels:
    return cast("CodeKernels", import_module("thinwire.kernels.triton.triton_codes").TritonCodes())


# One of each for the process: groups are put together by the kernels that serve them.
_torch = (TorchKernels(), TorchCodes(), TorchEntries())

NUMBA = Backend(
    "Numba",
    _numba_serves,
    _numba_kernels,
    # With several threads as well: PyTorch's many passes over a part that stays in cache gain little by them.
    lambda like: like.device.type == "cpu" and like.dtype == torch.float32,
    _numba_codes,
    _numba_entries,
    lambda: str(import_module("numba").__version__),
)
TRITON = Backend(
    "Triton",
    _triton_serves,
    lambda: _triton_kernels() if triton_limits.can_be_used() else None,
    _triton_serves_codes,
    lambda: _triton_codes() if triton_limits.can_be_used() else None,
    version=lambda: triton_limits.installed() or "",
)
TORCH = Backend(
    "PyTorch",
    lambda like, matrix_rank: True,
    lambda: _torch[0],
    lambda like: True,
    lambda: _torch[1],
    lambda: _torch[2],
    # Wheels for a CPU and for a GPU are of one version.
    lambda: torch.__version__.partition("+")[0],
)

backends: tuple[Backend, ...] = (NUMBA, TRITON, TORCH)
"""By preference; the last one serves everything. The switch of tests and benchmarks, read at every call:
`dispatch.backends = (dispatch.TORCH,)` makes PyTorch's products serve all.
"""


def kernels_for(like: torch.Tensor, matrix_rank: int) -> Kernels:
    """Return the kernels of the first backend that serves."""
    return _serving(like, matrix_rank)[1]


def _serving(like: torch.Tensor, matrix_rank: int) -> tuple[Backend, Kernels]:
    for backend in backends:
        if backend.serves(like, matrix_rank):
            kernels = backend.load()
            # What can't be loaded has said so, once; the next one serves in its place.
            if kernels is not None:
                return backend, kernels
    names = ", ".join(backend.name for backend in backends)
    raise AssertionError(f"no backend of {names} serves {like.dtype} on {like.device}; PyTorch's serves all")


def name_of_kernels_for(like: torch.Tensor, matrix_rank: int) -> str:
    """Return who serves, with version and kind of device: where these differ, so may the last bits."""
    backend, _ = _serving(like, matrix_rank)
    name = f"{backend.name} {backend.version()}"
    if like.device.type != "cuda":
        return name
    gpu = torch.cuda.get_device_properties(like.device)
    return f"{name} on {gpu.gcnArchName if torch.version.hip else f'sm_{gpu.major}{gpu.minor}'}"


def code_kernels_for(like: torch.Tensor) -> CodeKernels:
    """Return the kernels of the first backend that serves averaging in few bits of a tensor like this one."""
    serving = (backend.load_codes() for backend in backends if backend.serves_codes(like))
    return next((kernels for kernels in serving if kernels is not None), _torch[1])


def entry_kernels_for(like: torch.Tensor) -> EntryKernels:
    """Return the kernels of the first backend that serves averaging of few entries of such a tensor."""
    # On an accelerator PyTorch's: nobody else has any, and to ask others might warn of what they lack.
    here = backends if like.device.type == "cpu" else (TORCH,)
    serving = (backend.load_entries() for backend in here if backend.serves_codes(like))
    return next((kernels for kernels in serving if kernels is not None), _torch[2])


def products(items: Sequence[Asked]) -> list[torch.Tensor]:
    """As `Kernels.products`, each group by its backend."""
    return _shared_out(_kinds(items), [items], lambda kernels, its: kernels.products(its))


def projections(items: Sequence[Asked]) -> list[torch.Tensor]:
    """As `Kernels.projections`, each group by its backend."""
    return _shared_out(_kinds(items), [items], lambda kernels, its: kernels.projections(its))


def reconstruct(items: Sequence[Reconstruction]) -> list[None]:
    """As `Kernels.reconstruct`, each group by its backend."""
    return _shared_out(_kinds(items), [items], lambda kernels, its: kernels.reconstruct(its))


def subtract_own(groups: Sequence[MatrixGroup], factors: Sequence[Factors]) -> None:
    """As `Kernels.subtract_own`, each group by its backend."""
    kinds = [(group.matrices[0], group.matrix_rank) for group in groups]
    _shared_out(kinds, [groups, factors], lambda kernels, *its: kernels.subtract_own(*its))


def write(items: Sequence[Write], is_healthy: torch.Tensor | None) -> list[torch.Tensor]:
    """As `Kernels.write`, each tensor by its backend."""
    # Device and type decide: writing is the same at every matrix rank.
    kinds = [(item.target, 1) for item in items]
    return _shared_out(kinds, [items], lambda kernels, its: kernels.write(its, is_healthy))


def orthonormal_rows(
    batches: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Return an orthonormal basis of the rows of every matrix, as `Kernels.orthonormal_rows`.

    A module-level function, so that requests from all buckets are batched into one call.
    """
    kinds = [(batch, batch.shape[1]) for batch in batches]
    columns = [batches] if drawn is None else [batches, drawn]
    return _shared_out(kinds, columns, lambda kernels, *its: kernels.orthonormal_rows(*its))


def all_finite(*tensors: torch.Tensor) -> torch.Tensor:
    """Return whether every element of every tensor is finite, as a tensor of one bool; not read back.

    Tensors without elements are finite. They may lie on several devices; the answer is on the first one's.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    if not kinds:
        return torch.tensor(True)
    answers = []
    for (device, _), alike in kinds.items():
        if accelerators.pays_per_launch(device):
            # As they lie: kernels are told where a tensor begins and how long it is.
            whole = [tensor.contiguous() for tensor in alike]
            answers.append(kernels_for(alike[0], 1).all_finite(whole))
        else:
            # NaN wins every minimum and maximum, so extremes are enough.
            extremes = torch.stack([each for tensor in alike for each in torch.aminmax(tensor)])
            answers.append(extremes.isfinite().all())
    if len(answers) == 1:
        return answers[0]
    return torch.stack([each.to(answers[0].device, non_blocking=True) for each in answers]).all()


def _kinds(items: Sequence[Asked] | Sequence[Reconstruction]) -> list[tuple[torch.Tensor, int]]:
    return [(item.group.matrices[0], item.group.matrix_rank) for item in items]


def _shared_out(
    kinds: Sequence[tuple[torch.Tensor, int]],
    columns: Sequence[Sequence[Any]],
    compute: Callable[..., Sequence[Any] | None],
) -> list[Any]:
    """Return what is computed of some items, in their order: all of a backend in one call, device by device.

    `kinds` are as `kernels_for` takes them; of each column, `compute` gets what belongs to its items.
    """
    # One launch may serve many shapes. It is on one device, and a model's parameters may lie on several: a
    # kernel that got an address of another device's memory would fault, or write anywhere.
    shares: dict[tuple[Kernels, torch.device], list[int]] = {}
    for index, (like, matrix_rank) in enumerate(kinds):
        shares.setdefault((kernels_for(like, matrix_rank), like.device), []).append(index)
    results: dict[int, Any] = {}
    for (kernels, _), share in shares.items():
        computed = compute(kernels, *([column[index] for index in share] for column in columns))
        results.update(zip(share, computed or [None] * len(share), strict=True))
    return [results[index] for index in range(len(kinds))]
