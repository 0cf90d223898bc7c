"""Triton's kernels compile for GPUs that are not here: gradients are read by 16 bytes, and not spilled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from thinwire.kernels.triton.limits import installed
from thinwire.tensors.coded import CODEBOOKS

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="NO TRITON HERE: nothing was compiled (make test-triton)"
    ),
    pytest.mark.timeout(1200),
]

TRITON = tuple(int(part) for part in (installed() or "0.0").split(".")[:2])
OLD = TRITON < (3, 3)
# Stores to a thread's own memory, at most. Those of 3.2, which torch 2.6 comes with, cost time and nothing
# else; those of `merge` lie around a division, of 16-bit gradients by their loss scale.
PUT_ASIDE = {"projections": 566, "reconstruct": 3, "gram_again": 6} if OLD else {"merge": 4}

OF_GRADIENTS = {"products", "projections", "reconstruct", "select", "merge"}
OF_CODES = {"encode", "average", "decode", "decode_and_keep"}
OTHERS = {"probe", "gram", "gram_again", "orthonormal", "add_splits", "finite", "write", "pack", "unpack"}


@pytest.mark.parametrize(
    ("architecture", "ranks", "bits"),
    [
        (80, [4], [4]),
        *(
            pytest.param(architecture, [1, 2, 4, 8, 16, 32], [*CODEBOOKS], marks=pytest.mark.long)
            for architecture in (80, 90, 100)
        ),
    ],
)
def test_what_is_launched_compiles_without_a_warning_and_reads_and_spills_as_it_should(
    architecture: int, ranks: list[int], bits: list[int]
) -> None:
    """By the path that Triton takes on a GPU, of which a driver tells that is none."""
    if architecture == 100 and OLD:
        pytest.skip("Triton 3.2 does not know sm_100")
    compiled = launched(architecture, ranks, bits)
    assert {found["kernel"] for found in compiled} == OF_GRADIENTS | OF_CODES | OTHERS
    # Each rank has two types, and matrices that are not aligned.
    assert sum(found["kernel"] == "reconstruct" for found in compiled) == 3 * len(ranks)
    for found in compiled:
        kernel, is_aligned = found["kernel"], found["constants"]["ALIGNED"]
        # Matrices that are not aligned are rare; there speed does not count.
        assert is_aligned is False or found["spilled"] <= PUT_ASIDE.get(kernel, 0), found
        assert not is_aligned or kernel not in OF_GRADIENTS or found["wide"], found
        # Codes of a word are a thread's.
        assert kernel not in OF_CODES or found["constants"]["BITS"] < 4 or not found["shared"], found
    # Those of 16 bits are read by 8 bytes.
    for kernel in OF_CODES - {"average"}:
        for number in bits:
            variants = [
                found["wide"]
                for found in compiled
                if found["kernel"] == kernel and found["constants"]["BITS"] == number
            ]
            assert max(variants) > 0, (kernel, number)


def launched(*arguments: Any) -> list[dict[str, Any]]:
    """Return what launched.py prints, without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("launched.py")
    command: list[Any] = [sys.executable, "-W", "error", script, *map(json.dumps, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
