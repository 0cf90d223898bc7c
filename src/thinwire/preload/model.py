"""Attaches a DDP model that somebody else's code has built."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.attach import attach
from thinwire.adapters.ddp_model import hook_of
from thinwire.algorithms.registry import parsed
from thinwire.checkpoint import LOCAL_NAME, load_local, save_local
from thinwire.errors import AttachError, ThinwireError
from thinwire.preload.settings import VARIABLE, Options
from thinwire.sync import GradientSync
from thinwire.torch_private import default_store, remove_forward_pre_hooks
from thinwire.version import __version__

STORE_SECONDS = 30.0  # how long a process waits for the others to say that they were started alike

_num_built = 0


def note_built(model: DistributedDataParallel) -> None:
    """Attach a model before its first pass that trains, if all of its processes were started alike."""
    global _num_built  # noqa: PLW0603
    _num_built += 1
    options = Options.of()
    _log_to_stderr()
    reason = _not_started_alike(model, _num_built)
    if reason:
        _leave_alone(options, reason)
        return
    # Later, since whoever builds the model may still register a hook of their own.
    model.register_forward_pre_hook(_BeforeFirstPass(options))


class _BeforeFirstPass:
    """A forward hook of a model that is to be attached; copies and pickled models have it too."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, model: DistributedDataParallel, _: object) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        remove_forward_pre_hooks(model, _BeforeFirstPass)
        name, is_ours = hook_of(model)
        if is_ours:
            return  # the script attaches by itself
        if name:
            _leave_alone(
                self._options,
                f"it has the communication hook {name}; leave that out of your settings to use Thinwire's",
            )
            return
        if dist.get_world_size(model.process_group) == 1:
            _leave_alone(self._options, "this is one process, in a group of its own")
            return
        try:
            _attach(model, self._options)
        except ThinwireError as error:
            if self._options.strict:
                raise
            _leave_alone(self._options, str(error))


def _attach(model: DistributedDataParallel, options: Options) -> None:
    owned = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    scalers = [scaler for scaler in _live(GradScaler) if scaler.is_enabled()]
    settings: dict[str, Any] = {"grad_scaler": scalers[0]} if len(scalers) == 1 else {}
    algorithm = parsed(options.algorithm)
    if isinstance(algorithm, dict):
        # Imported here: it measures, which needs more than attaching does.
        from thinwire.advice import auto  # noqa: PLC0415

        optimizer = next((found for found in _live(torch.optim.Optimizer) if _trains(found, owned)), None)
        if optimizer is None:
            raise AttachError(
                "no optimizer trains this model yet, and auto needs to know it; build it before the first "
                "forward pass, or name an algorithm"
            )
        sync = auto(model, optimizer, **algorithm, **settings).sync
    else:
        sync = attach(model, algorithm, **settings)
    _Run(sync, options, is_first=dist.get_rank(model.process_group) == 0)


class _Run:
    """What surrounds the training of an attached model: its checkpoint, its records, and the last line."""

    def __init__(self, sync: GradientSync, options: Options, *, is_first: bool) -> None:
        self._sync, self._folder, self._is_first = sync, options.checkpoint, is_first
        if self._folder is not None:
            if any(Path(self._folder).glob(LOCAL_NAME.format("*"))):
                load_local(sync, self._folder)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._save_and_end)
        elif is_first and sync.algorithm.remembers:
            _say(
                f"{sync.algorithm} remembers what it has not sent yet, and your checkpoints lack that; "
                "--checkpoint DIR saves it"
            )
        if options.watch is not None and is_first:
            from thinwire.watch import Watch  # noqa: PLC0415

            atexit.register(Watch(sync, options.watch).__enter__().__exit__, None, None, None)
        atexit.register(self._end)

    def _end(self) -> None:
        if self._folder is not None:
            self._save(self._folder)
        if self._is_first:
            stats = self._sync.stats()
            _say(
                f"{stats.steps} steps sent {stats.message_bytes / 1e6:.3g} MB, where bf16 would have sent "
                f"{stats.gradient_bytes / 2e6:.3g}; waited {stats.waiting_seconds:.1f} s for messages"
            )

    def _save(self, folder: str) -> None:
        try:
            self._sync.abandon()  # a pass that was interrupted
            save_local(self._sync, folder)
        except (ThinwireError, OSError) as error:
            _say(f"nothing was saved: {error}")

    def _save_and_end(self, number: int, _: FrameType | None) -> None:
        self._save(str(self._folder))
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _not_started_alike(model: DistributedDataParallel, number: int) -> str:
    """Return why the model's processes can't be attached alike; "" if they can.

    With a store, not with a message: a process that was started without `thinwire attach` answers none.
    """
    store, group = default_store(), model.process_group
    here, said = dist.get_rank(), f"{__version__} {os.environ[VARIABLE]}"
    ranks = dist.get_process_group_ranks(group)
    keys = [f"thinwire attach {number} {rank}" for rank in ranks]
    store.set(f"thinwire attach {number} {here}", said)
    try:
        store.wait(keys, timedelta(seconds=STORE_SECONDS))
    except (RuntimeError, dist.DistStoreError):
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        return (
            f"processes {', '.join(map(str, missing))} were not started with thinwire attach; type the same "
            "line on each machine"
        )
    for rank, key in zip(ranks, keys, strict=True):
        other = store.get(key).decode()
        if other != said:
            return (
                f"process {rank} was started with thinwire {other}, and this one with {said}; type the same"
            )
    return ""


def _leave_alone(options: Options, reason: str) -> None:
    """Say that a model stays as it is; with --strict, raise."""
    if options.strict:
        raise AttachError(reason)
    if dist.get_rank() == 0:
        _say(f"the model stays as it is: {reason}")


def _live(kind: type) -> Iterable[Any]:
    """Yield the objects of a type that there are in this process."""
    # Types are compared, since `isinstance` asks objects, and some do something then.
    return (found for found in gc.get_objects() if issubclass(type(found), kind))


def _trains(optimizer: Any, owned: set[int]) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(id(parameter) in owned for group in groups for parameter in group["params"])


def _log_to_stderr() -> None:
    """Show what Thinwire logs, such as its first line, unless the script shows it already."""
    logger = logging.getLogger("thinwire")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("thinwire attach: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _say(line: str) -> None:
    print(f"thinwire attach: {line}", file=sys.stderr, flush=True)
