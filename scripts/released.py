"""What is released holds what it must, and works beside nothing but torch; `make wheel` runs this.

Arguments: the archive of sources, and the wheel that is installed.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

DATA = ("advice/loss_gaps.json", "py.typed")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src/thinwire/py.typed", "scripts/released.py")
# Besides the package and its metadata, of these an installation would have no use.
STRANGERS = ("tests", "benchmarks", "examples", "docs")


def check_archives(sources: Path, wheel: Path) -> None:
    with tarfile.open(sources) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside.issuperset(SOURCES), inside
    names = zipfile.ZipFile(wheel).namelist()
    assert set(names).issuperset(f"thinwire/{name}" for name in DATA), names
    tops = {name.partition("/")[0] for name in names}
    # The third is run by Python when it starts, for `thinwire attach`.
    named = {"thinwire", f"thinwire-{version('thinwire')}.dist-info", "thinwire-attach.pth"}
    assert tops == named, tops
    assert not [name for name in names if set(name.split("/")) & {*STRANGERS, "__pycache__"}], names


def check_installed() -> None:
    thinwire = importlib.import_module("thinwire")
    assert "site-packages" in (thinwire.__file__ or ""), thinwire.__file__
    assert thinwire.__version__ == version("thinwire")
    missing = [name for name in ("typer", "numba", "lightning", "accelerate") if find_spec(name)]
    assert not missing, f"{missing} are installed, so this does not tell what works without"
    for name in thinwire.__all__:
        assert hasattr(thinwire, name), name
    for module in pkgutil.iter_modules(thinwire.__path__, "thinwire."):
        if module.name != "thinwire.__main__":
            importlib.import_module(module.name)
    ended = subprocess.run(
        [sys.executable, "-I", "-m", "thinwire"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended
    assert "the command line needs" in ended.stderr, ended


if __name__ == "__main__":
    check_archives(*map(Path, sys.argv[1:]))
    check_installed()
    print("the wheel holds what it must, and works beside nothing but torch")
