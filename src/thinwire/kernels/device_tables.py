"""Tables of numbers that kernels look up, kept on the device from step to step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from thinwire.tensors.accelerators import to_device_async

# A step has tens. Tables of bucket layouts and addresses that no longer exist fall out at the other end.
MAX_TABLES = 1024

_kept: OrderedDict[tuple[object, ...], torch.Tensor] = OrderedDict()
_lock = threading.Lock()


def on_device(
    what: tuple[object, ...], made: Callable[[], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return a table on a device, copied there when it is asked for the first time."""
    # One for each stream: on a different one the copy may not have arrived yet.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    # Keyed by all of its contents: an address that was freed and given to a new tensor is still the same.
    key = (device, stream, *what)
    # Backward passes of several devices, or models, run in different threads.
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
            return found
    found = to_device_async(device, made())
    # A tensor of a subclass, such as torch's fake mode makes, is of no use when that mode has ended.
    if type(found) is torch.Tensor:
        with _lock:
            _kept[key] = found
            if len(_kept) > MAX_TABLES:
                # A kernel that still reads it runs before anything that its stream gives the memory to.
                _kept.popitem(last=False)
    return found


# For Triton's kernels: addresses and sizes of many tensors. In most steps nothing is new in them: DDP's
# buckets and the residuals stay where they are, and the allocator gives a step the memory of the one before.


def table_of(rows: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """Return rows of numbers on a device, int64, shape (rows, numbers)."""
    # 64 bits: addresses, and sizes of which two are multiplied.
    return on_device(("table", *rows), lambda: torch.tensor(rows, dtype=torch.int64), device)


def tiles_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return for each program its row of a table and its tile of that, int32, shape (programs, 2)."""

    def made() -> torch.Tensor:
        sizes = torch.tensor(counts)
        owners = torch.arange(len(sizes)).repeat_interleave(sizes)
        tiles = torch.arange(len(owners)) - (sizes.cumsum(0) - sizes)[owners]
        # Side by side, so that a program reads both from one line of memory.
        return torch.stack([owners, tiles], dim=1).int()

    return on_device(("tiles", *counts), made, device)
