"""An integration whose package is not installed says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("extra", ["accelerate", "lightning", "transformers"])
def test_a_missing_package_is_named(extra: str) -> None:
    code = f"""
import sys
sys.modules["{extra}"] = None
try:
    import thinwire.integrations.{extra}
except ImportError as error:
    print(type(error).__name__, error, type(error.__cause__).__name__)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.startswith("MissingExtraError")
    assert f"pip install 'thinwire[{extra}]' ModuleNotFoundError" in out.stdout
