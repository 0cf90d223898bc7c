"""Tables of numbers that kernels look up, kept on the device from step to step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch

from thinwire.tensors.accelerators import sent_to

# Of a step there are tens; those of bucket layouts and addresses that are gone fall out at the other end.
MAX_TABLES = 1024

_kept: OrderedDict[tuple[object, ...], torch.Tensor] = OrderedDict()
_lock = threading.Lock()


def on_device(
    what: tuple[object, ...], made: Callable[[], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return a table on a device, copied there when it is asked for the first time."""
    # One for each stream: on another one the copy need not have arrived.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    # By all of its contents: an address that was freed and given to another tensor is the same address still.
    key = (device, stream, *what)
    # Backward passes of several devices, or models, come from threads of their own.
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
            return found
    found = sent_to(device, made())
    # A tensor of a subclass, as of torch's fake mode, is of no use when that mode has ended.
    if type(found) is torch.Tensor:
        with _lock:
            _kept[key] = found
            if len(_kept) > MAX_TABLES:
                # A kernel that still reads it comes before whatever its stream gives the memory to.
                _kept.popitem(last=False)
    return found


def number_on(device: torch.device, number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor of shape (): a plain number in an operation costs a launch."""
    return on_device(("number", number, dtype), lambda: torch.tensor(number, dtype=dtype), device)
