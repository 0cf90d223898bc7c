"""Tables of addresses and sizes that Triton's kernels look up, kept on the device from step to step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from thinwire.tensors.accelerators import to_device_async

# A step has tens. Tables of addresses that no longer exist fall out at the other end.
MAX_TABLES = 1024


class LaunchTable(NamedTuple):
    """The numbers that the programs of a launch look up."""

    rows: torch.Tensor  # of each tensor or matrix, int64: addresses, and sizes of which two are multiplied
    tiles: torch.Tensor  # of each program its row and its tile of that, int32, (programs, 2)
    programs: int


TableRows: TypeAlias = tuple[Sequence[tuple[int, ...]], Sequence[int]]
"""Rows of numbers, and for each the programs that it takes."""

_kept: OrderedDict[Hashable, LaunchTable] = OrderedDict()
_workspaces: dict[Hashable, torch.Tensor] = {}
_lock = threading.Lock()


def launch_table(key: Hashable, make: Callable[[], TableRows], device: torch.device) -> LaunchTable:
    """Return the table of a launch on a device, made when its key is seen for the first time.

    In most steps nothing is new: DDP's buckets and the residuals stay where they are, and the allocator gives
    a step the memory of the one before.

    Args:
        key: Names all that the table is made of: numbers of bound groups, and every other address.
        make: Makes its rows.
        device: Where kernels read it.
    """
    # One for each stream: on a different one the copy may not have arrived yet.
    key = (device, _stream(device), key)
    # Backward passes of several devices, or models, run in different threads.
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
            return found
    rows, counts = make()
    table = LaunchTable(
        to_device_async(device, torch.tensor(rows, dtype=torch.int64)),
        to_device_async(device, _tiles(counts)),
        sum(counts),
    )
    # A tensor of a subclass, such as torch's fake mode makes, is of no use when that mode has ended.
    if type(table.rows) is torch.Tensor:
        with _lock:
            _kept[key] = table
            if len(_kept) > MAX_TABLES:
                # A kernel that still reads it runs before anything that its stream gives the memory to.
                _kept.popitem(last=False)
    return table


def workspace(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for what the launches of one call hand to each other; the next call overwrites it.

    It stays, and with it its address, until a call needs more.
    """
    # One for each stream, whose launches run one after the other.
    key = name, dtype, device, _stream(device)
    with _lock:
        room = _workspaces.get(key)
        if room is None or room.numel() < numel:
            room = torch.empty(numel, dtype=dtype, device=device)
            if type(room) is torch.Tensor:
                _workspaces[key] = room
    return room[:numel]


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _tiles(counts: Sequence[int]) -> torch.Tensor:
    sizes = torch.tensor(counts)
    owners = torch.arange(len(sizes)).repeat_interleave(sizes)
    tiles = torch.arange(len(owners)) - (sizes.cumsum(0) - sizes)[owners]
    # Side by side, so that a program reads both from one line of memory.
    return torch.stack([owners, tiles], dim=1).int()
