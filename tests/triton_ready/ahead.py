"""Compile kernels for GPUs that need not be there, and print what became of them, as JSON.

A process of its own: where Triton's interpreter is on, nothing can be compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from triton_ready.launched import Driver, driver, triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# Tensors by their types, and a number that nothing can be concluded of.
ARGUMENTS: dict[str, torch.dtype | int] = {
    **dict.fromkeys(["table", "bases", "starts", "lengths"], torch.int64),
    **dict.fromkeys(["flat", "out", "lost", "levels", "rest", "loss_scale"], torch.float32),
    **dict.fromkeys(["error", "values", "sums", "counts"], torch.float32),
    **dict.fromkeys(["message", "received", "sent"], torch.uint8),
    **dict.fromkeys(["stride", "received_stride", "sent_stride", "share", "count", "members"], 17),
    **dict.fromkeys(["own", "until", "entries", "first_word", "first_scale"], 17),
    **dict.fromkeys(["keys", "owners", "tiles", "positions"], torch.int32),
    "flags": torch.int8, "is_healthy": torch.int8, "less": torch.float64,
}  # fmt: skip


def compiled(kernel: str, constants: dict[str, Any], warps: int, fuses: bool) -> dict[str, Any]:
    """Return how often a thread puts something aside, bytes of shared memory, and loads of 16 bytes."""
    module, _, name = kernel.partition(".")
    function = getattr(import_module(f"thinwire.kernels.triton.{module}"), name)
    # A table, or how many there are.
    given = ARGUMENTS if "table" in function.arg_names else {**ARGUMENTS, "tiles": 17}
    arguments = [constants[each] if each in constants else given[each] for each in function.arg_names]
    found = function.warmup(*arguments, grid=(1,), num_warps=warps, enable_fp_fusion=fuses)
    ptx = found.asm["ptx"]
    return {
        "kernel": kernel,
        "spilled": _put_aside(found.asm["cubin"]),
        "shared": found.metadata.shared,
        "wide": ptx.count("ld.global.v4") + ptx.count(".v4.b32") + ptx.count("0x10, "),
    }


def _put_aside(cubin: bytes) -> int:
    """Count the stores to a thread's own memory in what the GPU would get."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "kernel.cubin")).write_bytes(cubin)
        told = subprocess.run([CUOBJDUMP, "-sass", path], capture_output=True, text=True, check=True).stdout
    assert " EXIT" in told
    return told.count(" STL")


if __name__ == "__main__":
    asked, architecture = json.loads(sys.argv[1]), int(sys.argv[2])
    driver.set_active(Driver(architecture))
    print(json.dumps([compiled(*each) for each in asked]))
