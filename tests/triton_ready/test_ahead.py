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

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="NO TRITON HERE: nothing was compiled (make test-triton)"
    ),
    pytest.mark.timeout(600),
]

MATRICES = {"G": "f", "ALIGNED": True, "DOT": "", "R": 4, "ROWS": 16, "COLUMNS": 128}
DOTS = {**MATRICES, "DOT": "tf32x3", "R": 32, "ROWS": 32, "COLUMNS": 64}
SETTLES = {"TERMS": 1, "LIMIT": 0.0, "is_healthy": None}
BASES = {"R": 4, "COLUMNS": 256, "CHUNK": 1024}
CODES = {"CUBIC": 112, "LEVELS": 15, "BITS": 4, "BLOCK": 64, "PADDED": 64, "ROWS": 16, "WHOLE": True}
CODED = {
    "LAST": 1127.0,
    "STATISTIC": "largest",
    "DRAWN": False,
    "keys": None,
    "firsts": None,
    "lengths": None,
}

# Kernel, constants, warps, whether products and sums are fused; whether it reads gradients.
KERNELS: list[tuple[str, dict[str, Any], int, bool, bool]] = [
    ("compiled_matrices.products", MATRICES, 4, True, True),
    ("compiled_matrices.products", {**MATRICES, "G": "b", "R": 8}, 8, True, True),
    ("compiled_matrices.products", DOTS, 4, True, True),
    ("compiled_matrices.projections", {**MATRICES, "SPLIT": 512}, 4, True, True),
    ("compiled_matrices.projections", {**DOTS, "SPLIT": 512}, 4, True, True),
    ("compiled_matrices.settle", {**MATRICES, **SETTLES}, 4, True, True),
    ("compiled_matrices.settle", {**DOTS, **SETTLES, "G": "b", "LIMIT": 3.3895e38}, 4, True, True),
    ("compiled_matrices.gram", BASES, 4, True, False),
    ("compiled_matrices.gram_again", {**BASES, "DEPENDENT": 1e-10}, 4, True, False),
    ("compiled_matrices.orthonormal", {**BASES, "DEPENDENT": 1e-10}, 4, True, False),
    ("compiled_matrices.add_splits", {"COLUMNS": 1024}, 4, True, False),
    ("compiled_matrices.finite", {"G": "f", "COLUMNS": 4096}, 4, True, False),
    ("compiled_codes.encode", {**CODES, **CODED, "starts": None}, 4, False, True),
    ("compiled_codes.average", {**CODES, **CODED, "KEEPS": False, "lost": None}, 4, False, False),
    (
        "compiled_codes.decode",
        {**CODES, "SUBTRACTS": True, "starts": None, "lengths": None},
        4,
        False,
        True,
    ),
]


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_gradients_are_read_16_bytes_at_a_time_and_not_spilled(architecture: int) -> None:
    script = Path(__file__).with_name("ahead.py")
    asked = json.dumps([each[:4] for each in KERNELS])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script, asked, str(architecture)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == len(KERNELS)
    for (kernel, constants, *_, reads_gradients), result in zip(KERNELS, found, strict=True):
        # A division in fp64 is a subroutine on sm_80, around which a few registers of bases are put aside.
        assert result["spilled"] <= (0 if reads_gradients else 64), (kernel, constants, result)
        assert result["wide"] or not reads_gradients, (kernel, constants)
