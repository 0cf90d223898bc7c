"""An integration whose package is not installed says what to install."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("accelerate", ("accelerate",)),
        ("lightning", ("lightning", "pytorch_lightning")),
        ("transformers", ("transformers",)),
    ],
)
def test_a_missing_package_is_named(extra: str, packages: tuple[str, ...]) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({packages}))
try:
    import thinwire.integrations.{extra}
except ImportError as error:
    print(type(error).__name__, error, type(error.__cause__).__name__)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.startswith("MissingExtraError")
    assert f"pip install '.[{extra}]' in a clone of Thinwire ModuleNotFoundError" in out.stdout


def test_what_is_told_to_install_can_be_installed_from_a_clone() -> None:
    """No index has Thinwire: `pip install 'thinwire[cli]'` would find nothing, or another package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    code = [path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    told = {path.relative_to(ROOT): path.read_text() for path in (*pages, *code)}
    assert [path for path, text in told.items() if "thinwire[" in text] == []
    named = {extra for text in told.values() for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert len(named) > 5
    assert named <= set(metadata("thinwire").get_all("Provides-Extra") or ())
