"""Attaches a DDP model that other code has built."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.attach import attach
from thinwire.adapters.ddp import Switch
from thinwire.adapters.ddp_model import hook_of, num_trained
from thinwire.adapters.setup import live_objects, log_start, trains
from thinwire.algorithms import Algorithm
from thinwire.checkpoint import LOCAL_NAME, load_local, save_local
from thinwire.comm.agreement import said_if_slow
from thinwire.errors import AttachError, ThinwireError
from thinwire.preload.options import VARIABLE, Options, averaging_of
from thinwire.preload.strict import note_averaged
from thinwire.sync import GradientSync, engine_of
from thinwire.torch_private import (
    call_before_pass,
    comm_hooks,
    ddp_parameters,
    default_store,
    forget_hooks_in,
    stop_calling,
)
from thinwire.version import __version__

# How long a process waits for the others to answer.
STORE_SECONDS = 120.0  # that they were started the same: some receive the model's start much later
PASS_SECONDS = 1800.0  # that they have reached their first pass: as long as a message may take
PATIENCE_SECONDS = 10.0  # after this, a process logs that it waits for the others' first pass
ALL = "all have answered"
BY_ITSELF = "the script attaches by itself"

_num_built: Counter[tuple[int, ...]] = Counter()  # models per group of processes
_runs: weakref.WeakSet[_Run] = weakref.WeakSet()  # one per living model
if hasattr(os, "register_at_fork"):  # POSIX
    os.register_at_fork(after_in_child=_runs.clear)  # its parent's; it would wait for a step at SIGTERM
_waiting: set[_Votes] = set()  # one per model without a training pass, deleted or not

_before: weakref.WeakKeyDictionary[DistributedDataParallel, _BeforeFirstPass] = weakref.WeakKeyDictionary()
_attached: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_state_of_ddp = DistributedDataParallel.__getstate__
_join_hook_of_ddp = DistributedDataParallel.join_hook
_register_on_ddp = DistributedDataParallel.register_comm_hook


def _state_without_ours(model: DistributedDataParallel) -> dict[str, Any]:
    """Return a model's state for pickling and copying, without Thinwire's hooks."""
    state: dict[str, Any] = _state_of_ddp(model)  # type: ignore[no-untyped-call]
    stop_calling(model, state)
    if model in _attached:  # before that, hooks are the script's own, even those of `thinwire.attach`
        forget_hooks_in(state)
    return state


def _join_hook(model: DistributedDataParallel, **settings: Any) -> JoinHook:
    """Attach a model that enters a join context, in which a process without batches makes no pass."""
    if model in _before:
        _before[model](model)
    joined: JoinHook = _join_hook_of_ddp(model, **settings)  # type: ignore[no-untyped-call]
    return joined


def _register_comm_hook(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
    """Register the script's own hook; in an attached model it takes the place of Thinwire's."""
    try:
        _register_on_ddp(model, state, hook)
        return
    except RuntimeError:  # DDP lists a hook before it finds that it can't have another
        switches = [held for _, held in comm_hooks(model) if isinstance(held, Switch)]
        owned = [(run, held) for run in _runs for held in switches if engine_of(run.sync) is held.engine]
        if not owned:
            raise
    ((run, switch),) = owned
    if run.options.strict and not isinstance(state, Switch):
        raise AttachError(
            f"the script registers its communication hook {hook.__qualname__} after its first forward pass, "
            "when the model is attached; register it before, or leave out --strict"
        )
    run.votes.say(f"from now on the script's own communication hook {hook.__qualname__} averages")
    run.end()
    run.sync.detach()
    switch.hand_over(state, hook)
    if isinstance(state, Switch):  # the script attaches by itself
        note_averaged()


DistributedDataParallel.__getstate__ = _state_without_ours  # type: ignore[method-assign]
DistributedDataParallel.join_hook = _join_hook  # type: ignore[assignment,method-assign]
DistributedDataParallel.register_comm_hook = _register_comm_hook  # type: ignore[assignment,method-assign]


def note_built(model: DistributedDataParallel) -> None:
    """Attach a model before its first training pass, if all of its processes were started the same."""
    _log_to_stderr()
    votes = _Votes(model)
    try:
        options = Options.of()
    except ThinwireError as error:  # the environment was set by hand
        votes.cast("built", str(error), STORE_SECONDS)
        votes.say(f"the model stays as it is: {error}")
        return
    reason = votes.cast("built", f"{__version__} {os.environ[VARIABLE]}", STORE_SECONDS)
    if reason:
        _leave_alone(options, reason, votes)
        return
    # Attach later: the code that builds the model may still register its own hook.
    _before[model] = _BeforeFirstPass(options, votes)
    _waiting.add(votes)
    call_before_pass(model, _before[model])


class _Votes:
    """Exchanges answers between a model's processes, through their rendezvous store.

    Through a store, not by messages: a process started without `thinwire attach` would not answer. Models
    are numbered per group: if ranks 0 and 1 have built a model of their own before, the next model of all
    three would be their second, but rank 2's first.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(model.process_group))
        self.is_first = dist.get_rank() == self.ranks[0]
        _num_built[self.ranks] += 1
        self.number = _num_built[self.ranks]

    def cast(self, question: str, answer: str, seconds: float) -> str:
        """Publish an answer; return how the others' differ, "" if all are equal. Collective."""
        store, here = default_store(), dist.get_rank()
        outcome = f"thinwire attach {self.ranks} {self.number} {question}"
        decided = f"{outcome} decided"  # with USE_LIBUV=0, `compare_set` wakes nobody who waits for its key
        keys = {rank: f"{outcome} {rank}" for rank in self.ranks}
        store.set(keys[here], answer)
        # The last to answer or the first to give up decides: one that answers after others have given up
        # would find all answers there, and attach alone.
        if store.check(list(keys.values())):
            store.compare_set(outcome, "", ALL)
            store.set(decided, "")
        try:
            store.wait([decided], timedelta(seconds=seconds))
        except (RuntimeError, dist.DistStoreError):
            missing = ", ".join(str(rank) for rank, key in keys.items() if not store.check([key]))
            late = f"processes {missing} have not answered for {seconds:.0f} s"
            if question == "built":
                late += ": start all of them with the same thinwire attach command"
            store.compare_set(outcome, "", late)
            store.set(decided, "")
        how: str = store.get(outcome).decode()
        if how != ALL:
            return how
        answers = {rank: store.get(key).decode() for rank, key in keys.items()}
        others = [f"process {rank}: {other}" for rank, other in answers.items() if other != answer]
        return f"processes differ: process {here}: {answer}; {others[0]}" if others else ""

    def numbered(self, path: str) -> str:
        """Return the model's own path: a job may train several models, such as a GAN."""
        return path if self.number == 1 else f"{path}.{self.number}"

    def say(self, line: str) -> None:
        """Log a line once for the model."""
        if self.is_first:
            _say(line)


class _BeforeFirstPass:
    """Attaches a model before its first training pass; copies and pickled models lack it."""

    def __init__(self, options: Options, votes: _Votes) -> None:
        self._options, self._votes = options, votes

    def __call__(self, model: DistributedDataParallel) -> None:
        # Evaluation may run on one process only. A discriminator is frozen while its generator trains.
        # Any part: after a validation, Lightning puts its module back into training mode, but not the DDP.
        is_training = torch.is_grad_enabled() and any(part.training for part in model.modules())
        if not (is_training and num_trained(ddp_parameters(model))):
            return
        del _before[model]
        stop_calling(model, vars(model))
        _waiting.discard(self._votes)
        sync, problem = None, _why_not(model)
        if not problem:
            try:
                sync = _attach(model, self._options)
            except ThinwireError as error:
                problem = str(error)
        words = (
            f"process {dist.get_rank()} has waited {PATIENCE_SECONDS:g} s for the others to begin a training "
            "pass, too; a pass that one process makes alone, such as a check, must be in torch.no_grad()"
        )
        with said_if_slow(PATIENCE_SECONDS, _say, words):
            differs = self._votes.cast("first pass", problem, PASS_SECONDS)
        if differs and sync is not None:
            sync.detach()  # some processes could not attach
        if (differs or problem) and problem != BY_ITSELF:
            _leave_alone(self._options, differs or problem, self._votes)
            return
        if sync is None:
            note_averaged()
            return
        _attached.add(model)
        if why := _load(sync, self._options, self._votes):
            # A process that was killed has saved nothing: what the others load would be of another step.
            sync.detach()
            if self._options.strict:
                raise AttachError(why)
            self._votes.say(f"no process loads its saved state: {why}")
            sync = _attach(model, self._options)
        _Run(sync, self._options, self._votes)  # held by the engine


def _why_not(model: DistributedDataParallel) -> str:
    """Return why a model can't be attached; "" if it can be tried."""
    name, is_ours = hook_of(model)
    if is_ours:
        return BY_ITSELF
    if name and model.mixed_precision is None:  # that option's own hook: `attach` names the option
        return (
            f"it already has the communication hook {name}; remove that hook from your settings to use "
            "Thinwire's"
        )
    if dist.get_world_size(model.process_group) == 1:
        return "this process is alone in its group; start all processes as one job, with torchrun for example"
    return ""


def _attach(model: DistributedDataParallel, options: Options) -> GradientSync:
    owned = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    scalers = [scaler for scaler in live_objects(GradScaler) if scaler.is_enabled()]
    settings: dict[str, Any] = {"grad_scaler": scalers[0]} if len(scalers) == 1 else {}
    averaging = averaging_of(options.algorithm)
    if isinstance(averaging, Algorithm):
        return attach(model, averaging, **settings)
    optimizer = next((found for found in live_objects(torch.optim.Optimizer) if trains(found, owned)), None)
    if optimizer is None:
        raise AttachError(
            "auto needs this model's optimizer, but none trains it yet; build the optimizer before the "
            "first forward pass, or name an algorithm"
        )
    return averaging(model, optimizer, **settings).sync


def _load(sync: GradientSync, options: Options, votes: _Votes) -> str:
    """Load the folder's state; return why not all processes have loaded the same step's. Collective."""
    if options.checkpoint is None:
        return ""
    error, folder = "", Path(votes.numbered(options.checkpoint))
    if any(folder.glob(LOCAL_NAME.format("*"))):
        try:
            load_local(sync, folder)
        except (ThinwireError, OSError) as failed:
            error = str(failed)
    return votes.cast("state", error or f"step {sync.steps}", PASS_SECONDS) or error


class _RunsOfThread(weakref.WeakSet["_Run"]):
    """Ends its runs with the thread that trains: Ray Train kills the process after it."""

    def __del__(self) -> None:
        for run in list(self):
            run.end()


_of_thread = threading.local()


class _Run:
    """The checkpoint, the records and the final log line of an attached model's training.

    The model's engine holds it as an observer of its steps, so it ends with the model.
    """

    is_running = has_averaged = is_told_to_end = False

    def __init__(self, sync: GradientSync, options: Options, votes: _Votes) -> None:
        self.sync, self.options, self.votes = sync, options, votes
        self._watch, self._stats, self.is_running = ExitStack(), sync.stats(), True
        engine_of(sync).reporter.observers.append(self._after_step)
        _runs.add(self)
        _of_thread.__dict__.setdefault("runs", _RunsOfThread()).add(self)
        # Processes that multiprocessing forks end without running atexit's functions.
        Finalize(None, _end_runs, exitpriority=0)
        if options.checkpoint is None:
            if sync.algorithm.remembers:
                votes.say(
                    f"{sync.algorithm} remembers what it has not sent yet, but your checkpoints do not "
                    "contain it; --checkpoint DIR saves it"
                )
        # In Python, only the main thread can handle signals.
        elif (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _tell_runs_to_end)
        if options.watch is not None and votes.is_first:
            from thinwire.watch import Watch  # noqa: PLC0415

            try:
                self._watch.enter_context(Watch(sync, votes.numbered(options.watch)))
            except (ThinwireError, OSError) as error:
                _say(f"nothing is recorded: {error}")

    def _after_step(self, committed: bool) -> None:
        if not self.has_averaged:
            self.has_averaged = True
            note_averaged()
        # Not in the signal handler, which may run in the middle of a step.
        if self.is_told_to_end:
            _end_runs()
            _end_by_sigterm()

    def __del__(self) -> None:
        # The model is freed when the training function returns, long before the process ends.
        self.end()

    def end(self) -> None:
        """Save the state, and log what was sent, once."""
        if not self.is_running:
            return
        self.is_running = False
        self._watch.close()
        if self.options.checkpoint is not None:
            try:
                self.sync.abandon()  # if a pass was interrupted
                save_local(self.sync, Path(self.votes.numbered(self.options.checkpoint)))
            except (ThinwireError, OSError) as error:
                _say(f"nothing was saved: {error}")
        # Suppress: the device may have failed.
        with suppress(RuntimeError):
            before, now = self._stats, self.sync.stats()
            sent = (now.message_bytes - before.message_bytes) / 1e6
            numel = sum(spec.numel for spec in engine_of(self.sync).specs)
            in_bf16 = 2e-6 * numel * (now.steps - before.steps)
            if not self.has_averaged:
                self.votes.say("0 steps were averaged, so nothing was compressed")
            elif self.votes.is_first:
                _say(
                    f"{now.steps - before.steps} steps sent {sent:.3g} MB, where bf16 would have sent "
                    f"{in_bf16:.3g}; waited {now.waiting_seconds:.1f} s for messages"
                )


def _tell_runs_to_end(*_: object) -> None:
    for run in list(_runs):
        run.is_told_to_end = True
    if not any(run.is_running for run in _runs):  # no step follows
        _end_by_sigterm()


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


@atexit.register
def _end_runs() -> None:
    for run in list(_runs):
        run.end()
        _runs.discard(run)
    if _waiting and os.environ.get("RANK", "0") == "0" and getattr(sys, "last_value", None) is None:
        _say("a model stays as it is: it made no forward pass in training mode, with gradients")
    _waiting.clear()


def _leave_alone(options: Options, reason: str, votes: _Votes) -> None:
    """Log that a model stays as it is; with --strict, raise."""
    if options.strict:
        raise AttachError(reason)
    votes.say(f"the model stays as it is: {reason}")


def _log_to_stderr() -> None:
    """Show Thinwire's logs, such as its first line, unless the script already does."""
    logger = logging.getLogger("thinwire")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("thinwire attach: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        # axolotl makes new loggers hide all but warnings, and this one logs the first line.
        logging.getLogger(log_start.__module__).filters.clear()


def _say(line: str) -> None:
    print(f"thinwire attach: {line}", file=sys.stderr, flush=True)
