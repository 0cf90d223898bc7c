"""Triton's kernels on the CPU, by its interpreter: slow, so what they are given is tiny."""

from __future__ import annotations

import os
from importlib import import_module
from unittest.mock import patch

import pytest

with patch.dict(
    os.environ, TRITON_INTERPRET="1"
):  # it is asked for wherever a kernel is defined, its own too
    # The interpreters of older ones do not work with today's NumPy.
    triton = pytest.importorskip(
        "triton", "3.9", reason="NO TRITON HERE: no kernel of Triton's was tested (make test-triton)"
    )
    if isinstance(triton.language.cdiv, triton.JITFunction):
        pytest.skip("TRITON WAS IMPORTED ELSEWHERE: its interpreter is off", allow_module_level=True)
    import_module("triton.experimental.gluon.language")
    for name in ("compiled_bases", "compiled_codes", "compiled_entries", "compiled_matrices"):
        import_module(f"thinwire.kernels.triton.{name}")

# What is not finite is computed with as on a GPU, which warns of nothing.
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
