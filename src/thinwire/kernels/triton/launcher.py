"""Launches of kernels by name: so they can be counted without a device to run them on, and without Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch

# Given, and not left to Triton: its versions differ in it, and with it the last bits.
FUSED: dict[str, object] = {"enable_fp_fusion": True, "num_warps": 4}


def launch(
    kernel: str,
    programs: int,
    arguments: Sequence[torch.Tensor | int | None],
    constants: Mapping[str, object],
    device: torch.device,
    *,
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
) -> None:
    """Launch a kernel on the current stream of a device."""
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
    launch("compiled_codes.probe", 1, [number], FUSED, number.device, writes=[number])


@cache
def _function(kernel: str) -> Any:
    module, _, name = kernel.partition(".")
    # Imported here: Triton is no requirement.
    return getattr(import_module(f"thinwire.kernels.triton.{module}"), name)
