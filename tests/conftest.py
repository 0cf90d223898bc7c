"""How the tests run: what is imported, and when."""

from __future__ import annotations

import fcntl
import gc
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import forked
from stand_ins import stand_ins

# Of tests, beyond what preloaded.py imports.
PACKAGES = ["accelerate", "lightning.pytorch", "transformers.trainer", "matplotlib.pyplot"]
# What torch imports late: to train under Lightning, to compile.
PACKAGES += ["torch.distributed.optim", "torch._dynamo.backends.debugging"]

# By when all measurements have ended, where other workers wait for them.
MEASUREMENTS_SECONDS = 600

_until_the_end = ExitStack()
_ended = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Fork xdist's workers from the server that will fork the tests' processes: all import together, once."""
    # A shell lets what it starts in the background ignore Ctrl-C, and so would all that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    workers = config.getoption("tx", None)
    if workers and not hasattr(config, "workerinput"):
        forked.modules += PACKAGES
        launch = [sys.executable, "-S", *_until_the_end.enter_context(stand_ins())]
        config.option.tx = [f"popen//python={shlex.join(launch)}" for _ in workers]
        config.stash[_ended] = _until_the_end.enter_context(tempfile.TemporaryDirectory())
    else:
        # Here and not above: the process that only hands out tests does not wait for torch.
        import shared_fixtures  # noqa: PLC0415

        config.pluginmanager.register(shared_fixtures)
    if hasattr(config, "workerinput") and hasattr(os, "sched_setaffinity"):
        # Members in one process are threads that take turns: they hand over sooner on one core. What the
        # worker's server forks runs on all.
        cores = sorted(os.sched_getaffinity(0))
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each of xdist's workers the folder that all share."""
    node.workerinput["ended"] = node.config.stash[_ended]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell failures apart that may be the machine's: of measurements, while others used it."""
    failed = [each.nodeid for each in terminalreporter.getreports("failed") if "alone" in each.keywords]
    if failed:
        terminalreporter.section("failed, but need a quiet machine: run them again, alone")
        terminalreporter.line(f"pytest {' '.join(map(shlex.quote, failed))}")


def pytest_unconfigure() -> None:
    """End what the workers were forked by."""
    _until_the_end.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let measurements come first, then what is so long that it has a timeout of its own.

    Long tests at the end would leave the other workers without work.
    """
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("alone", "timeout")])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let processes start with what the tests of this run need; CUDA must not start before a fork."""
    functions = [item for item in session.items if isinstance(item, pytest.Function)]
    forked.modules += sorted({each.module.__name__ for each in functions if each.path.parent.name != "gpu"})
    measurements = sum(item.get_closest_marker("alone") is not None for item in session.items)
    if measurements and hasattr(session.config, "workerinput"):
        ended = Path(session.config.workerinput["ended"])
        session.config.pluginmanager.register(Measurements(ended, measurements))
    gc.freeze()  # all that is imported: collections need not look at it again and again


class Measurements:
    """Keep a worker of xdist from whatever would disturb a measurement, by itself or by others.

    All workers share the folder `ended`, which gets a file for each of `number` measurements as it ends.
    """

    def __init__(self, ended: Path, number: int) -> None:
        self.ended, self.number = ended, number

    # First: the time of waiting is none of the test's, whose timeouts begin further inside.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Measure one at a time; run other tests when all measurements have ended."""
        if item.get_closest_marker("alone"):
            lock = os.open(self.ended, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return (yield)
            finally:
                os.close(tempfile.mkstemp(dir=self.ended)[0])
                os.close(lock)
        deadline = time.monotonic() + MEASUREMENTS_SECONDS
        while len(os.listdir(self.ended)) < self.number:
            assert time.monotonic() < deadline, f"not all of {self.number} measurements have ended"
            time.sleep(0.05)
        item.config.pluginmanager.unregister(self)
        return (yield)
