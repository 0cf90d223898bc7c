"""How the tests run: what is imported, and when."""

from __future__ import annotations

import gc
import shlex
import sys
from contextlib import ExitStack

import pytest

import forked
from stand_ins import stand_ins

# Of tests, beyond what preloaded.py imports.
PACKAGES = ["accelerate", "lightning.pytorch", "transformers.trainer", "matplotlib.pyplot"]

_until_the_end = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Fork xdist's workers from the server that will fork the tests' processes: all import together, once."""
    workers = config.getoption("tx", None)
    if workers and not hasattr(config, "workerinput"):
        forked.modules += PACKAGES
        launch = [sys.executable, "-S", *_until_the_end.enter_context(stand_ins())]
        config.option.tx = [f"popen//python={shlex.join(launch)}" for _ in workers]
    else:
        # Here and not above: the process that only hands out tests does not wait for torch.
        import shared_fixtures  # noqa: PLC0415

        config.pluginmanager.register(shared_fixtures)


def pytest_unconfigure() -> None:
    """End what the workers were forked by."""
    _until_the_end.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let processes start with what the tests of this run need; CUDA must not start before a fork."""
    functions = [item for item in session.items if isinstance(item, pytest.Function)]
    forked.modules += sorted({each.module.__name__ for each in functions} - {"test_gpu"})
    gc.freeze()  # all that is imported: collections need not look at it again and again
