"""Persistent process pools: real Gloo processes that run one test body after the other.

After a failure the pool is thrown away, and the next test gets a new one.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import update_wrapper
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forked

STARTUP_SECONDS = 60.0
# Tests' groups are not ended, since torch's caches know their names. With a thousand of their threads a test
# takes ten times as long, and some hang.
MAX_THREADS = 200


class WorkerFailed(Exception):  # noqa: N818 (it reports a failure, it is not one of ours)
    """A process of the pool raised, died or hung; the message holds its traceback or its stacks."""


class Pool:
    """`world_size` processes in one Gloo group, each waiting for a function to run."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = Path(tempfile.mkdtemp(prefix="thinwire-pool-"))
        self._ends, theirs = zip(*(forked.context().Pipe() for _ in range(world_size)), strict=True)
        self._processes = [
            forked.process(_serve, process_rank, world_size, str(self._folder), end)
            for process_rank, end in enumerate(theirs)
        ]
        for process in self._processes:
            process.start()
        self.alive = True
        self._answered(STARTUP_SECONDS)

    def run(self, body: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """Run `body(*args)` on every process; what each returned, by process rank."""
        task = pickle.dumps((body, args))
        for end in self._ends:
            end.send_bytes(task)
        return self._answered(timeout_seconds)

    def is_crowded(self) -> bool:
        """Whether the tests so far have left so many threads that a new pool is cheaper."""
        return len(os.listdir(f"/proc/{self._processes[0].pid}/task")) > MAX_THREADS

    def close(self) -> None:
        """End all processes."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answered(self, timeout_seconds: float) -> list[Any]:
        try:
            return self._collect(timeout_seconds)
        except BaseException:
            # A test's own timeout strikes here as well: answers that come later would be the next test's.
            self.close()
            raise

    def _collect(self, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        results: list[Any] = []
        for process_rank, (process, end) in enumerate(zip(self._processes, self._ends, strict=True)):
            seconds = max(0.0, deadline - time.monotonic())
            ready = connection.wait([end, process.sentinel], seconds)
            try:
                ok, value = pickle.loads(end.recv_bytes() if end in ready else b"")
            except EOFError:
                how = "ended" if ready else f"hung for {timeout_seconds} s"
                raise WorkerFailed(f"process {process_rank} {how}\n{self._stacks()}") from None
            if not ok:
                raise WorkerFailed(f"process {process_rank} of {self.world_size} failed\n{value}")
            results.append(value)
        return results

    def _stacks(self) -> str:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("stacks-*")))


class Pools:
    """One pool a world size, started when first asked for, and again after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def of(self, world_size: int) -> Pool:
        pool = self._pools.get(world_size)
        if pool is not None and pool.alive and pool.is_crowded():
            pool.close()
        if pool is None or not pool.alive:
            pool = self._pools[world_size] = Pool(world_size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What all processes of the pool have given, by process rank."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.detach().contiguous())
    return rows


def are_alike(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all processes of the pool have given the same finite tensors, to the bit."""
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if not real.isfinite().all() or not all(torch.equal(real, other) for other in gathered(real)):
            return False
    return True


def in_each_process(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let every process of a pool run a test's body, with its parameters and fixtures.

    In the processes assertions are plain ones: a failure shows the line, but no values.
    """

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        def test(pools: Pools, **given: Any) -> None:
            pools.of(world_size).run(_run_body, body.__module__, body.__name__, given)

        update_wrapper(test, body)
        parameters = [inspect.Parameter("pools", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorated


def _run_body(module: str, name: str, given: dict[str, Any]) -> None:
    inspect.unwrap(getattr(import_module(module), name))(**given)


def _serve(process_rank: int, world_size: int, folder: str, end: connection.Connection) -> None:
    """A process of the pool: join the group, then run what comes."""
    warnings.simplefilter("error")
    # Of the compiler's own accesses, and of the version of Python.
    warnings.filterwarnings("ignore", module=r"torch\._dynamo")
    # torch.distributed.checkpoint of torch 2.6 calls what torch 2.6 warns of.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    with Path(folder, f"stacks-{process_rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=process_rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        assert dist.get_world_size() == world_size  # of every test in this pool
        end.send_bytes(pickle.dumps((True, None)))
        while True:
            body, args = pickle.loads(end.recv_bytes())
            try:
                answer = (True, body(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            end.send_bytes(pickle.dumps(answer))
