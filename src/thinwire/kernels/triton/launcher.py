"""Launches of kernels by name, and the tables that they look up: known without Triton, or a device."""

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

# Given, and not left to Triton: its versions differ in it, and with it the last bits.
FUSED: dict[str, object] = {"enable_fp_fusion": True, "num_warps": 4}


def launch(
    kernel: str,
    programs: int,
    arguments: Sequence[torch.Tensor | int | None],
    constants: Mapping[str, object],
    device: torch.device,
    touched: Sequence[torch.Tensor],
) -> None:
    """Launch a kernel on the current stream of a device; `touched` is what it reads and what it writes."""
    # For parameters without elements; CUDA refuses an empty grid.
    if programs == 0:
        return
    # Triton launches on the current device, which need not be that of the tensors. Its interpreter has none.
    # The stream that is current there is the caller's, so the kernel runs behind what has made its inputs.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _function(kernel)[(programs,)](*arguments, **constants)


def padded(size: int) -> int:
    """Return the next power of two: tiles have no other sizes."""
    return 1 << (size - 1).bit_length()


def check() -> None:
    """Compile a small kernel and launch it on the current device. Raises whatever Triton raises."""
    number = torch.zeros(1, dtype=torch.float32, device="cuda")
    # With the options of all launches: without them some versions of Triton warn, which may be an error.
    launch("compiled_codes.probe", 1, [number], FUSED, number.device, [number])


@cache
def _function(kernel: str) -> Any:
    module, _, name = kernel.partition(".")
    # Imported here: Triton is no requirement.
    return getattr(import_module(f"thinwire.kernels.triton.{module}"), name)


# Tables of addresses and sizes, kept on the device from step to step.

# A step has tens. Tables of addresses that no longer exist fall out at the other end.
MAX_TABLES = 1024


class LaunchTable(NamedTuple):
    """The numbers that the programs of a launch look up."""

    rows: torch.Tensor  # of each tensor or matrix, int64: addresses, and sizes of which two are multiplied
    tiles: torch.Tensor  # of each program its row and its tile of that, int32, (programs, 2)
    programs: int


TableRows: TypeAlias = tuple[Sequence[tuple[int, ...]], Sequence[int]]
"""Rows of numbers, and for each the programs that it takes."""

_tables: OrderedDict[Hashable, LaunchTable] = OrderedDict()
_workspaces: dict[Hashable, torch.Tensor] = {}
_lock = threading.Lock()


def launch_table(key: Hashable, make: Callable[[], TableRows], device: torch.device) -> LaunchTable:
    """Return the table of a launch on a device, made when its key is seen for the first time.

    In most steps nothing is new: DDP's buckets and the residuals stay where they are, and the allocator gives
    a step the memory of the one before. The key names all that the table is made of: numbers of bound groups,
    and every other address.
    """
    # One for each stream: on a different one the copy may not have arrived yet.
    key = (device, _stream(device), key)
    # Backward passes of several devices, or models, run in different threads.
    with _lock:
        table = _tables.get(key)
        if table is not None:
            _tables.move_to_end(key)
            return table
    rows, counts = make()
    table = LaunchTable(
        to_device_async(device, torch.tensor(rows, dtype=torch.int64)),
        to_device_async(device, _tiles(counts)),
        sum(counts),
    )
    # A tensor of a subclass, such as torch's fake mode makes, is of no use when that mode has ended.
    if type(table.rows) is torch.Tensor:
        with _lock:
            _tables[key] = table
            if len(_tables) > MAX_TABLES:
                # A kernel that still reads it runs before anything that its stream gives the memory to.
                _tables.popitem(last=False)
    return table


def workspace(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for what the launches of one call hand to each other; the next call overwrites it.

    It stays, and with it its address, until a call needs more.
    """
    # One for each stream, whose launches run one after the other.
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
    sizes = torch.tensor(counts)
    owners = torch.arange(len(sizes)).repeat_interleave(sizes)
    tiles = torch.arange(len(owners)) - (sizes.cumsum(0) - sizes)[owners]
    # Side by side, so that a program reads both from one line of memory.
    return torch.stack([owners, tiles], dim=1).int()
