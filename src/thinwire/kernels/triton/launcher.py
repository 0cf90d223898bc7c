"""Launches of kernels by name, and the tables that they look up; imported without Triton or a device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import torch

from thinwire.tensors.accelerators import to_device_async

# Set explicitly: Triton's default differs between versions, and so would the last bits.
FUSED: dict[str, object] = {"enable_fp_fusion": True, "num_warps": 4}


def launch(
    kernel: str,
    programs: int,
    arguments: Sequence[torch.Tensor | int | None],
    constants: Mapping[str, object],
) -> None:
    """Launch a kernel on the current stream of the device of its first argument, a tensor."""
    first = arguments[0]
    assert isinstance(first, torch.Tensor)
    # If all parameters are empty: CUDA refuses an empty grid.
    if programs == 0:
        return
    # Triton launches on the current device, which may not be that of the tensors. Its interpreter has none.
    # The device's current stream is the caller's, so the kernel runs after those that made its inputs.
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        _function(kernel)[(programs,)](*arguments, **constants)


def padded(size: int) -> int:
    """Return the next power of two, as tiles require."""
    return 1 << (size - 1).bit_length()


def check() -> None:
    """Compile a small kernel and launch it on the current device. Raises whatever Triton raises."""
    number = torch.zeros(1, dtype=torch.float32, device="cuda")
    # With the usual options: without them some versions of Triton warn, and warnings may be errors.
    launch("compiled_codes.probe", 1, [number], FUSED)


@cache
def _function(kernel: str) -> Any:
    module, _, name = kernel.partition(".")
    # Imported here: Triton is optional.
    return getattr(import_module(f"thinwire.kernels.triton.{module}"), name)


# Tables of addresses and sizes, cached on the device from step to step.

# A step has tens. Tables of old addresses are evicted.
MAX_TABLES = 1024


class LaunchTable(NamedTuple):
    """The numbers that the programs of a launch look up."""

    rows: torch.Tensor  # per tensor or matrix, int64: addresses, and sizes, which kernels multiply
    tiles: torch.Tensor  # each program's row, and its tile of that, int32, (programs, 2)


TableRows: TypeAlias = tuple[Sequence[tuple[int, ...]], Sequence[int]]
"""Rows of numbers, and the number of programs for each."""

_tables: OrderedDict[Hashable, LaunchTable] = OrderedDict()
_workspaces: dict[Hashable, torch.Tensor] = {}
_lock = threading.Lock()


def launch_table(key: Hashable, make: Callable[[], TableRows], device: torch.device) -> LaunchTable:
    """Return the table of a launch on a device, made when its key is first seen.

    In most steps nothing is new: DDP's buckets and the residuals keep their addresses, and the allocator
    reuses the memory of the step before. The key identifies all inputs of the table: the numbers of bound
    groups, and every other address.
    """
    # One per stream: on another stream, the copy may not have arrived yet.
    key = (device, _stream(device), key)
    # Backward passes of several devices, or models, run in different threads.
    with _lock:
        table = _tables.get(key)
        if table is not None:
            _tables.move_to_end(key)
            return table
    rows, counts = make()
    table = LaunchTable(
        to_device_async(device, torch.tensor(rows, dtype=torch.int64, device="cpu")),
        to_device_async(device, _tiles(counts)),
    )
    # Don't cache a tensor subclass, such as a fake tensor: it is useless after its mode has ended.
    if type(table.rows) is torch.Tensor:
        with _lock:
            _tables[key] = table
            if len(_tables) > MAX_TABLES:
                # A kernel that still reads it runs before anything that reuses the memory on its stream.
                _tables.popitem(last=False)
    return table


def workspace(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a buffer for data between the launches of one call; the next call overwrites it.

    It keeps its address until a call needs more memory.
    """
    # One per stream, whose launches run one after the other.
    key = name, dtype, device, _stream(device)
    with _lock:
        buffer = _workspaces.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=dtype, device=device)
            if type(buffer) is torch.Tensor:
                _workspaces[key] = buffer
    return buffer[:numel]


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _tiles(counts: Sequence[int]) -> torch.Tensor:
    sizes = torch.tensor(counts, device="cpu")
    owners = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
    tiles = torch.arange(len(owners), device="cpu") - (sizes.cumsum(0) - sizes)[owners]
    # Adjacent, so that a program reads both from one line of memory.
    return torch.stack([owners, tiles], dim=1).int()
