"""An integration whose package is not installed says what to install."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning", "pytorch_lightning"],
    "transformers": ["transformers"],
}


def test_a_missing_package_is_named() -> None:
    code = f"""
import sys
for extra, packages in {PACKAGES}.items():
    sys.modules.update(dict.fromkeys(packages))
    try:
        __import__(f"thinwire.integrations.{{extra}}")
    except ImportError as error:
        print(type(error).__name__, error, type(error.__cause__).__name__)
    for package in packages:
        del sys.modules[package]
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    lines = out.stdout.splitlines()
    assert len(lines) == len(PACKAGES)
    for line, extra in zip(lines, PACKAGES, strict=True):
        assert line.startswith("MissingExtraError")
        assert line.endswith(f"pip install '.[{extra}]' in a clone of Thinwire ModuleNotFoundError")


def test_what_is_told_to_install_can_be_installed_from_a_clone() -> None:
    """No index has Thinwire: `pip install 'thinwire[cli]'` would find nothing, or another package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    code = [path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    told = {path.relative_to(ROOT): path.read_text() for path in (*pages, *code)}
    assert [path for path, text in told.items() if "thinwire[" in text] == []
    named = {extra for text in told.values() for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert len(named) > 5
    assert named <= set(metadata("thinwire").get_all("Provides-Extra") or ())
