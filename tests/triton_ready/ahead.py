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

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"

TYPES = {
    **dict.fromkeys(["table", "bases", "starts", "lengths"], "*i64"),
    **dict.fromkeys(["flat", "out", "lost", "levels", "rest", "loss_scale"], "*fp32"),
    **dict.fromkeys(["error", "values", "sums", "counts"], "*fp32"),
    **dict.fromkeys(["message", "received", "sent"], "*u8"),
    **dict.fromkeys(["stride", "received_stride", "sent_stride", "share", "count", "members"], "i32"),
    **dict.fromkeys(["own", "until", "entries", "first_word", "first_scale"], "i32"),
    **dict.fromkeys(["keys", "owners", "tiles", "positions"], "*i32"),
    "flags": "*i8", "is_healthy": "*i8", "less": "*fp64",
}  # fmt: skip


def compiled(
    kernel: str, constants: dict[str, Any], warps: int, fuses: bool, architecture: int
) -> dict[str, Any]:
    """Return the bytes spilled, those of shared memory, and how many loads of 16 bytes there are."""
    module, _, name = kernel.partition(".")
    function = getattr(import_module(f"thinwire.kernels.triton.{module}"), name)
    names = function.arg_names
    # A table, or how many there are.
    types = TYPES if "table" in names else {**TYPES, "tiles": "i32"}
    source = ASTSource(
        fn=function,
        signature={each: "constexpr" if each in constants else types[each] for each in names},
        constexprs={(names.index(each),): value for each, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, each in enumerate(names)
            if each not in constants and types[each][0] == "*"
        },
    )
    options = {"num_warps": warps, "enable_fp_fusion": fuses}
    found = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = found.asm["ptx"]
    # By name, for architectures whose features a plain number leaves out.
    target = next(line.split()[1].rstrip(",") for line in ptx.splitlines() if line.startswith(".target"))
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "kernel.ptx")).write_text(ptx)
        told = subprocess.run(
            [PTXAS, "-v", f"--gpu-name={target}", "-o", Path(folder, "kernel.cubin"), path],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    return {
        "kernel": kernel,
        "spilled": sum(int(word) for word, of in _pairs(told) if of in ("spill stores", "spill loads")),
        "shared": found.metadata.shared,
        "wide": ptx.count("ld.global.v4") + ptx.count(".v4.b32") + ptx.count("0x10, "),
    }


def _pairs(told: str) -> list[tuple[str, str]]:
    parts = told.replace("\n", ",").split(",")
    return [
        (words[0], " ".join(words[2:]))
        for words in (part.split() for part in parts)
        if words[1:2] == ["bytes"] and words[0].isdigit()
    ]


if __name__ == "__main__":
    asked, architecture = json.loads(sys.argv[1]), int(sys.argv[2])
    results = [
        compiled(kernel, constants, warps, fuses, architecture) for kernel, constants, warps, fuses in asked
    ]
    print(json.dumps(results))
