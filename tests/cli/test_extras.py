"""What needs a package that is not installed says what to install."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.metadata import metadata
from pathlib import Path

import pytest

from commands import run_python
from thinwire import AllReduce
from thinwire.errors import MissingExtraError
from watch.test_report import watched

ROOT = Path(__file__).parents[2]
PACKAGES = {"accelerate": ["accelerate"], "transformers": ["transformers"]}
PACKAGES["lightning"] = ["lightning", "pytorch_lightning"]


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


# In a forked process that has imported everything: it forgets some packages, and what has them.
WITHOUT = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] in ({0}, "thinwire", "typer")]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys([{0}]))
runpy.run_module("{1}", run_name="__main__")
"""


def test_lightnings_way_to_register_a_hook_needs_no_lightning() -> None:
    code = WITHOUT.format("'lightning', 'pytorch_lightning'", "thinwire.integrations.ddp_hooks")
    done = run_python("-u", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_package_that_the_command_line_lacks_is_named(package: str) -> None:
    done = run_python("-u", "-c", WITHOUT.format(f"'{package}'", "thinwire"))
    remedy = "pip install '.[cli]' in a clone of Thinwire"
    assert (done.returncode, done.stderr) == (2, f"thinwire: the command line needs {package}: {remedy}\n")


ASKED = "advise --parameters=350M --compute=0.8s --rate=1gbit"
PRINTED = {ASKED: "Do this: ", f"{ASKED} --steps=0": "total_steps must be", "report run.jsonl": "saved as"}
PRINTED |= {"--help": "Commands", "--version": "thinwire 0", "lab --machines=0 -- true": "machines must be"}


@pytest.mark.parametrize("typed", PRINTED)
def test_a_command_that_needs_no_torch_imports_none(typed: str, tmp_path: Path) -> None:
    """Importing it would take longer than the answer."""
    watched(tmp_path / "run.jsonl", AllReduce())
    done = run_python("-u", "-c", WITHOUT.format("'torch'", "thinwire"), *typed.split(), cwd=tmp_path)
    assert PRINTED[typed] in done.stdout + done.stderr


def test_what_is_told_to_install_can_be_installed_from_a_clone() -> None:
    """No index has Thinwire: `pip install 'thinwire[cli]'` would find nothing, or another package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    code = [path for folder in ("src", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    texts = {path.relative_to(ROOT): path.read_text() for path in (*pages, *code)}
    assert [path for path, text in texts.items() if "thinwire[" in text] == []
    named = {extra for text in texts.values() for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert len(named) > 5
    assert named <= set(metadata("thinwire").get_all("Provides-Extra") or ())
