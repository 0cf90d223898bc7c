"""Triton's kernels compile for GPUs that are not here: gradients are read by 16 bytes, and not spilled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from thinwire.kernels.triton import triton_codes
from thinwire.kernels.triton.limits import installed
from thinwire.kernels.triton.triton_kernels import DOT_ROWS, basis_constants, tile_of
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="NO TRITON HERE: nothing was compiled (make test-triton)"
    ),
    pytest.mark.timeout(1200),
]

MEANS: dict[str, Any] = {"TERMS": 1, "LIMIT": 0.0}
# Name, constants, warps, whether products and sums are fused; whether it reads gradients by 16 bytes.
Kernel: TypeAlias = tuple[str, dict[str, Any], int, bool, bool]

WHOLE: dict[str, Any] = {"starts": None, "lengths": None}
ENTRIES = {"DECAY": 0.95, "LENGTH": 4096, "ALIGNED": True}
MERGED = {**ENTRIES, "BY_SENDERS": True, "KEPT": 64}
PLAIN = {"loss_scale": None, "is_healthy": None}
FEW = {"LOW": 6, "CODE": 2, "ROWS": 4}


def basis(name: str, rows: int) -> Kernel:
    constants: dict[str, Any] = basis_constants(name, rows)
    warps, fuses = constants.pop("num_warps"), constants.pop("enable_fp_fusion")
    return f"compiled_bases.{name}", constants, warps, fuses, False


def matrices(name: str, rank: int, letter: str = "f", *, aligned: bool = True, **constants: Any) -> Kernel:
    tile = tile_of(name, rank, is_aligned=aligned, keeps=constants.get("KEEPS", False))
    given: dict[str, Any] = {"G": letter, "R": rank, "ROWS": tile.rows, "COLUMNS": tile.columns}
    given |= {"ALIGNED": aligned, "DOT": "tf32x3" if rank >= DOT_ROWS else "", **constants}
    given |= {"STAGES": tile.stages} if name != "reconstruct" else {}
    return f"compiled_matrices.{name}", given, tile.warps, True, aligned


def codes(name: str, bits: int, *, drawn: bool = False, **constants: Any) -> Kernel:
    given: dict[str, Any] = triton_codes.constants(CODEBOOKS[bits], Blocks((64,), 64, 1), **constants)
    warps, fuses = given.pop("num_warps"), given.pop("enable_fp_fusion")
    if name in ("encode", "average"):
        given |= triton_codes.statistic(CODEBOOKS[bits]) | (
            {} if drawn else dict.fromkeys(["keys", "bases", "owners"])
        )
    given |= {"levels": None} if bits >= 4 else {}
    if name == "average":
        given.pop("starts", None)
    return f"compiled_codes.{name}", given, warps, fuses, name != "average" and given["ALIGNED"]


RANKS = (1, 2, 4, 8, 16, 32)

KERNELS: list[Kernel] = [
    *(matrices("products", rank, KEEPS=True) for rank in RANKS),
    *(matrices("products", rank, "b", KEEPS=False) for rank in RANKS),
    *(matrices("projections", rank, SPLIT=512, KEEPS=False) for rank in RANKS),
    *(matrices("projections", rank, SPLIT=512, KEEPS=True) for rank in RANKS),
    *(matrices("projections", rank, "b", SPLIT=512, KEEPS=False) for rank in RANKS),
    *(matrices("reconstruct", rank, **MEANS, is_healthy=None) for rank in RANKS),
    *(matrices("reconstruct", rank, **MEANS, aligned=False) for rank in RANKS),
    *(matrices("reconstruct", rank, "b", TERMS=1, LIMIT=3.3895e38) for rank in RANKS),
    *(matrices("reconstruct", rank, TERMS=3, LIMIT=0.0) for rank in (1, 4)),
    *(basis(name, rows) for rows in RANKS for name in ("gram", "gram_again", "orthonormal")),
    ("compiled_matrices.add_splits", {"COLUMNS": 1024}, 4, True, False),
    ("compiled_matrices.finite", {"G": "f", "COLUMNS": 4096}, 4, True, False),
    ("compiled_matrices.write", {"G": "b", "SOURCE": "f", "COLUMNS": 4096}, 4, True, False),
    *(codes("encode", bits, **WHOLE) for bits in CODEBOOKS),
    *(codes("average", bits, **WHOLE, lost=None) for bits in CODEBOOKS),
    *(codes("decode", bits, **WHOLE, LIMIT=0.0) for bits in CODEBOOKS),
    *(codes("decode_and_keep", bits, **WHOLE, LIMIT=0.0) for bits in CODEBOOKS),
    *(codes("encode", bits, drawn=True, **WHOLE) for bits in CODEBOOKS),
    *(codes("average", bits, drawn=True, **WHOLE) for bits in CODEBOOKS),
    codes("encode", 4),
    codes("encode", 4, ALIGNED=False),
    codes("decode", 4, LIMIT=0.0),
    codes("average", 4),
    codes("decode_and_keep", 4, LIMIT=0.0),
    ("compiled_entries.select", {**ENTRIES, "loss_scale": None}, 4, False, True),
    ("compiled_entries.select", {**ENTRIES, "ALIGNED": False}, 4, False, False),
    ("compiled_entries.pack", {**FEW, "KEPT": 64}, 4, False, False),
    ("compiled_entries.pack", {**FEW, "LOW": 2, "KEPT": 1024, "ROWS": 1}, 4, False, False),
    ("compiled_entries.unpack", {**FEW, "MARKS": 128, "ROWS": 8}, 4, False, False),
    ("compiled_entries.unpack", {**FEW, "CODE": 0, "MARKS": 2048, "ROWS": 1}, 4, False, False),
    ("compiled_entries.merge", {**MERGED, **PLAIN, "LIMIT": 0.0}, 8, False, True),
    ("compiled_entries.merge", {**MERGED, "LIMIT": 65504.0, "BY_SENDERS": False}, 8, False, True),
]

# So much in every run of all tests: what changes most, on one architecture.
SOME = [
    matrices("reconstruct", 8, **MEANS),
    basis("gram_again", 8),
    codes("average", 4, **WHOLE, lost=None),
]


TRITON = tuple(int(part) for part in (installed() or "0.0").split(".")[:2])

OLD = TRITON < (3, 3)
# Stores to a thread's own memory, at most. Those of 3.2, which torch 2.6 comes with, cost time and nothing
# else; those of `merge` lie around a division, of 16-bit gradients by their loss scale.
PUT_ASIDE = {"projections": 566, "reconstruct": 3, "gram_again": 6} if OLD else {"merge": 4}


@pytest.mark.long
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_gradients_are_read_16_bytes_at_a_time_and_nothing_is_spilled(architecture: int) -> None:
    if architecture == 100 and OLD:
        pytest.skip("Triton 3.2 does not know sm_100")
    check(KERNELS, architecture)


def test_so_are_some_on_the_oldest_architecture() -> None:
    assert [kernel.partition(".")[2] for kernel, *_ in SOME] == ["reconstruct", "gram_again", "average"]
    check(SOME, 80)


@pytest.mark.parametrize(
    ("architecture", "ranks"),
    [(80, [4]), *(pytest.param(each, list(RANKS), marks=pytest.mark.long) for each in (80, 90))],
)
def test_what_is_launched_compiles_without_a_warning(architecture: int, ranks: list[int]) -> None:
    """By the path that Triton takes on a GPU, of which a driver tells that is none."""
    compiled = json.loads(run_apart("launched.py", str(architecture), json.dumps(ranks)))
    kernels = {each.partition(" ")[0].partition(".")[2] for each in compiled}
    assert kernels >= {"products", "projections", "add_splits", "reconstruct", "write", "finite", "gram"}
    assert kernels >= {"probe", "encode", "average", "decode", "decode_and_keep"}
    assert kernels >= {"select", "pack", "unpack", "merge"}
    # Each rank has two types, and matrices that are not aligned.
    assert sum("reconstruct" in each for each in compiled) == 3 * len(ranks)


def run_apart(script: str, *arguments: str) -> str:
    """Run a script without Triton's interpreter; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, environment.get("PYTHONPATH", "")])
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, "-W", "error", path, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def check(kernels: list[Kernel], architecture: int) -> None:
    found = json.loads(run_apart("ahead.py", json.dumps([each[:4] for each in kernels]), str(architecture)))
    assert len(found) == len(kernels)
    for (kernel, constants, *_, reads_gradients), result in zip(kernels, found, strict=True):
        assert result["spilled"] <= PUT_ASIDE.get(kernel.partition(".")[2], 0), (kernel, constants, result)
        assert result["wide"] or not reads_gradients, (kernel, constants)
        # Codes of a word are a thread's.
        assert kernel.partition(".")[0] != "compiled_codes" or constants["BITS"] < 4 or not result["shared"]
