"""Other people's code to run beside ours: installed when a benchmark runs, never committed.

What pip can't install here is left out, and that is said.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

__all__ = ["Installed", "installed"]

# What to ask pip for, by package: all that it imports but PyTorch, since pip must not install another one.
REQUIREMENTS = {
    "powersgd": ("git+https://github.com/epfml/powersgd.git",),
    "torchft": (
        "torchft==0.2.0",
        "opentelemetry-api",
        "opentelemetry-exporter-http-transport",
        "opentelemetry-exporter-otlp-common",
        "opentelemetry-exporter-otlp-proto-common",
        "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry-proto",
        "opentelemetry-sdk",
        "opentelemetry-semantic-conventions",
        "googleapis-common-protos",
        "protobuf",
        "requests",
        "urllib3",
        "charset-normalizer",
        "certifi",
        "idna",
    ),
}


class Installed(NamedTuple):
    """What pip has made of what was asked for.

    Attributes:
        path: Where to import from, as `PYTHONPATH` has it.
        missing: The packages that pip can't install here.
    """

    path: str
    missing: frozenset[str]


@contextmanager
def installed(packages: Iterable[str]) -> Iterator[Installed]:
    """Install packages into folders that are gone at the end.

    Args:
        packages: Of `REQUIREMENTS`.
    """
    with TemporaryDirectory() as root:
        folders, missing = list[str](), set[str]()
        for name in sorted(packages):
            folder = str(Path(root, name))
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            done = subprocess.run([*pip, "--no-deps", "--target", folder, *REQUIREMENTS[name]], check=False)
            if done.returncode == 0:
                folders.append(folder)
            else:
                missing.add(name)
                print(f"SKIPPED: pip can't install {name} (its own words above), so it is not measured")
        yield Installed(":".join(folders), frozenset(missing))
