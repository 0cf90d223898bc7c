"""An integration whose package is not installed says what to install."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.metadata import metadata
from pathlib import Path

import pytest

from commands import WITHOUT_PACKAGE, run_python
from thinwire.errors import MissingExtraError

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning", "pytorch_lightning"],
    "transformers": ["transformers"],
}


@pytest.mark.parametrize("extra", list(PACKAGES))
def test_a_missing_package_is_named(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"thinwire.integrations.{extra}"
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES[extra]]:
        monkeypatch.delitem(sys.modules, name)
    for name in PACKAGES[extra]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingExtraError) as raised:
        import_module(module)
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
    assert str(raised.value).endswith(f"pip install '.[{extra}]' in a clone of Thinwire")


def test_lightnings_way_to_register_a_hook_needs_no_lightning() -> None:
    done = run_python(WITHOUT_PACKAGE, ",".join(PACKAGES["lightning"]), "thinwire.integrations.ddp_hooks")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_told_to_install_can_be_installed_from_a_clone() -> None:
    """No index has Thinwire: `pip install 'thinwire[cli]'` would find nothing, or another package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    code = [path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    texts = {path.relative_to(ROOT): path.read_text() for path in (*pages, *code)}
    assert [path for path, text in texts.items() if "thinwire[" in text] == []
    named = {extra for text in texts.values() for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert len(named) > 5
    assert named <= set(metadata("thinwire").get_all("Provides-Extra") or ())
