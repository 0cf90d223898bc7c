"""How the tests run: what is imported, in which order they run, and how one that hangs ends."""

from __future__ import annotations

import faulthandler
import gc
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.util import Finalize
from subprocess import CompletedProcess
from typing import Any

import pytest

import processes
from commands import stand_ins
from processes import Spawn, Typed

# Of tests, beyond what preloaded.py imports.
PACKAGES = ["accelerate", "lightning.pytorch", "transformers.trainer", "matplotlib.pyplot"]
PACKAGES += ["hypothesis", "torchft", "thinwire.advice", "thinwire.elastic", "thinwire.hooks"]
# What torch imports late: to train under Lightning, to compile.
PACKAGES += ["torch.distributed.optim", "torch._dynamo.backends.debugging"]

_until_the_end = ExitStack()
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Fork xdist's workers from the server that will fork the tests' processes: all import together, once."""
    # A shell lets what it starts in the background ignore Ctrl-C, and so would all that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_stderr] = os.dup(2)  # the terminal's, while a test's is captured
    worker, workers = getattr(config, "workerinput", None), config.getoption("tx", None)
    if worker is None:
        _put_temporary_files_in_one_folder()
    if workers and worker is None:
        processes.modules += PACKAGES
        launch = [sys.executable, "-S", *_until_the_end.enter_context(stand_ins())]
        config.option.tx = [f"popen//python={shlex.join(launch)}" for _ in workers]
        return
    gc.disable()  # until all tests are collected: imports leave no garbage
    import torch  # noqa: PLC0415 - here, for the process that hands out tests needs no torch

    # Simulated workers make many small tensors: a second thread costs more than it brings.
    torch.set_num_threads(1)
    if worker is not None and hasattr(os, "sched_setaffinity"):
        # Members in one process take turns: they hand over sooner on one core. What is forked runs on all.
        cores = sorted(os.sched_getaffinity(0))
        number = int(worker["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def _put_temporary_files_in_one_folder() -> None:
    """Remove at the end what killed processes, torchrun and others leave."""
    # As at Ctrl-C: by default SIGTERM, which `timeout` sends, would end this process before it removes them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # tmp_path stays, to look into after a failure
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(usual, f"torchinductor-{os.getuid()}"))
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="thinwire-tests-")
    # Last of all that multiprocessing ends, at -100 a folder in this one.
    Finalize(None, shutil.rmtree, (tempfile.tempdir,), {"ignore_errors": True}, exitpriority=-200)


def pytest_unconfigure() -> None:
    """End what the workers were forked by."""
    _until_the_end.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what is so long that it has a timeout: at the end, other workers would wait for it."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let processes start with what the tests of this run need; CUDA must not start before a fork."""
    functions = [item for item in session.items if isinstance(item, pytest.Function)]
    processes.modules += sorted(
        {each.module.__name__ for each in functions if each.path.parent.name != "gpu"}
    )
    gc.freeze()  # all that is imported: collections need not look at it again and again
    gc.enable()
    gc.set_threshold(20_000)  # tests make few cycles, and their rows and lists are soon gone


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Print all stacks and end the process if a test hangs in C, where its timeout does not reach."""
    mark = item.get_closest_marker("timeout")
    usual = item.config.getoption("timeout", None) or item.config.getini("timeout")
    seconds = float(mark.args[0] if mark else usual)
    if seconds > 0:
        faulthandler.dump_traceback_later(1.25 * seconds, file=item.config.stash[_stderr], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if nextitem is not None and nextitem.path != item.path:
            # Some files keep very many objects, such as syntax trees, and tests of others search all objects.
            gc.collect()
            gc.freeze()


@pytest.fixture(scope="session")
def spawn() -> Iterator[Spawn]:
    """Run a function in several processes: `spawn(2, body, *args)`; see processes.py."""
    spawn = Spawn()
    yield spawn
    spawn.close()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Run `thinwire …` in this process: `typed("report", path)` tells how it ended, and what it printed."""
    from thinwire.cli import main  # noqa: PLC0415 - as torch above

    def run(*arguments: object) -> CompletedProcess[str]:
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.setattr(sys, "argv", ["thinwire", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return CompletedProcess(sys.argv, ended.value.code, printed.out, printed.err)  # type: ignore[arg-type]

    return run


@pytest.fixture
def one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all workers orthonormalize is the same, and half of the time: the first one's result serves."""
    from catalog import remember_bases  # noqa: PLC0415 - as torch above

    remember_bases(monkeypatch)
