"""Triton's kernels compile for GPUs that are not here, without a warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from thinwire.kernels.triton.limits import installed
from thinwire.tensors.coded import CODEBOOKS

KERNELS = {
    *("products", "projections", "reconstruct", "gram", "gram_again", "orthonormal", "add_splits", "write"),
    *("encode", "average", "decode", "decode_and_keep"),
    *("select", "merge", "pack", "unpack", "finite", "probe"),
}


@pytest.mark.skipif(
    find_spec("triton") is None, reason="NO TRITON HERE: nothing was compiled (make test-triton)"
)
@pytest.mark.timeout(1200)
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
def test_what_is_launched_compiles(architecture: int, ranks: list[int], bits: list[int]) -> None:
    """By the path that Triton takes on a GPU, of which a driver tells that is none."""
    if architecture == 100 and (installed() or "").startswith("3.2"):
        pytest.skip("Triton 3.2 does not know sm_100")
    # Without Triton's interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("launched.py"))]
    command += map(json.dumps, (architecture, ranks, bits))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(json.loads(done.stdout)) == KERNELS
