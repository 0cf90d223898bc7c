"""GradientSync: the handle that a user keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch

from thinwire.algorithms import Algorithm
from thinwire.errors import AttachError, StateError, StepError
from thinwire.plan import Plan
from thinwire.sync.engine import Engine
from thinwire.sync.precision import full_precision
from thinwire.sync.state import Cuts, Position, SavedState, pack
from thinwire.sync.stats import Stats

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class GradientSync:
    """The user's handle of a model's averaging: inspect it, switch the algorithm, save and load state.

    `thinwire.attach` returns one, and the other adapters have one as `sync`. Printing it gives a summary.
    `torch.distributed.checkpoint` treats it as a `Stateful`.
    """

    def __init__(self, engine: Engine, detach: Callable[[], None] | None = None) -> None:
        self._engine, self._detach = engine, detach
        self._is_detached = False

    def __str__(self) -> str:
        """Return a summary: the algorithm, the plan's compression ratio, and the statistics."""
        return str(self._engine.reporter)

    def __reduce__(self) -> NoReturn:
        raise not_copied("a handle")

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use."""
        return self._engine.algorithm

    @property
    def plan(self) -> Plan:
        """How each parameter is sent after the warm-up, in model order.

        For an algorithm that works on whole buckets, the plan is that of the last step's buckets; before the
        first step, that of one bucket for the whole model.
        """
        return self._engine.reporter.plan

    @property
    def steps(self) -> int:
        """Steps so far, including those that were not finite."""
        return self._engine.steps

    @torch.inference_mode(False)
    def stats(self) -> Stats:
        """Return the statistics of the steps so far.

        Cost: one norm for each compressed parameter and one host synchronisation.
        """
        return self._engine.reporter.stats()

    @torch.inference_mode(False)
    def use(self, algorithm: Algorithm) -> None:
        """Switch to a different algorithm from the next step on. Call it on every process.

        The residual is kept: an algorithm with error feedback continues with it, any other sends it in its
        first step.

        Raises:
            AttachError: This handle was detached.
            ConfigError: It is not an algorithm.
            GradientError: It can't average a parameter's gradient.
            StepError: A step is in progress.
        """
        if self._is_detached:
            raise AttachError(
                "this handle was detached, so use() would change nothing; call attach(model, algorithm) again"
            )
        self._engine.check_between_steps("use()")
        self._engine.buckets.use(algorithm)

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on every process. Collective: call it on all processes.

        The residuals of the processes are replaced by their mean, in memory and in the result. Later steps
        depend on the mean alone, so a run that continues and one that resumes are the same, on any number of
        processes. The state has plain values, and tensors on the CPU in tuples of (name, tensor) pairs:
        `torch.load(weights_only=True)` and `torch.distributed.checkpoint` accept it, and
        `thinwire.checkpoint` also writes it as safetensors.

        Cost: a gather of 32 bytes from each process, one exact average of all residuals (none if there was
        no step since the last call), and a copy to the CPU. For 100 M parameters with a residual the average
        is 400 MB, or 32 s between two processes at 100 Mbit/s (`thinwire advise` computes it for your model
        and link; `local_state_dict` sends nothing). `Quantize` and `Cast` have no residual. If other
        processes do not call it as well, it logs that after 10 s, and fails after the group's timeout.

        Raises:
            StepError: A step is in progress.
            AgreementError: The processes differ in their steps or algorithms.
            CommunicationError: A collective failed, or some process did not call it; memory is as it was.
        """
        return self._engine.state_dict()

    @torch.inference_mode(False)
    def local_state_dict(self) -> dict[str, Any]:
        """Return this process's state with its own residual, without communication; for slow links.

        Call it on all processes after the same step, and save the result on each
        (`thinwire.checkpoint.save_local` does). With the same number of processes and the same layout, each
        loads its own with `load_state_dict` and continues bit for bit. With any other number or layout, load
        `thinwire.checkpoint.merge` of all of them on every process: the mean residual is kept.
        (`thinwire.checkpoint.load_local` does whichever is needed.) With FSDP2, each state holds the
        process's own shards and can be loaded on the same mesh.

        Cost: a copy of the state to the CPU, with zeros for parts that other processes of a machine hold.

        Raises:
            StepError: A step is in progress.
        """
        engine = self._engine
        engine.check_between_steps("local_state_dict()")
        engine.check_whole("local_state_dict()")
        with full_precision(torch.device("cpu")):
            return pack(engine.state.save_local(engine.algorithm, self.position, self._cuts()))

    def _cuts(self) -> Cuts:
        """Return how a sharded model is split."""
        return {}

    @property
    def position(self) -> Position:
        """This process's rank and layout, for its own file; see `thinwire.checkpoint.save_local`."""
        everyone, machines = self._engine.transport, self._engine.machines
        if machines is None:
            return Position(rank=everyone.rank, world_size=everyone.size)
        return Position(
            rank=everyone.rank,
            world_size=everyone.size,
            local_rank=machines.intra_node.rank,
            local_size=machines.intra_node.size,
            machines=machines.rows,
        )

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a state saved by `state_dict`. Call it on every process with the same state.

        (Or, on each process, with its own `local_state_dict()`.) The number of processes and the buckets may
        differ. The algorithm in use is kept. It continues from a state saved by another algorithm or with
        other settings, residual included; parts that do not fit are cut or extended, with a warning.
        Everything is checked before anything changes.

        Args:
            state: The result of `state_dict`, from any process.
            strict: Whether to refuse a state that lacks parameters of this model, or has others. If False,
                the residuals of the others are dropped.

        Raises:
            StateError: It is not such a state, or is damaged, from a later version or a different model.
            StepError: A step is in progress.
        """
        with torch.inference_mode(False):  # not a decorator, so that warnings point at the caller's line
            self._engine.load(self._checked(state, strict=strict))

    def _checked(self, state: Mapping[str, Any], *, strict: bool) -> SavedState:
        return self._engine.check_state_dict(state, strict=strict, position=self.position)

    def distributed_state(self) -> Stateful:
        """Return a state for `torch.distributed.checkpoint` to save and load with model and optimizer.

        For an FSDP2 model it has DTensors in place of whole tensors, so no process holds the whole residual,
        and it is resharded as the parameters are. For other models it is this handle. Use it on all
        processes: saving is collective, as `state_dict` is, and loading is strict. Cost for an FSDP2 model: a
        copy of the state of this process's shards, and zeros for parameters without state.

        Examples:
            >>> import thinwire, torch
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> ddp_model = DistributedDataParallel(torch.nn.Linear(64, 32))  # in a process group
            >>> sync = thinwire.attach(ddp_model, thinwire.PowerSGD(matrix_rank=2))
            >>> state = {"model": ddp_model.module.state_dict(), "sync": sync.distributed_state()}
            >>> state["sync"] is sync  # torch.distributed.checkpoint.save(state, checkpoint_id=folder)
            True
        """
        return self

    @contextmanager
    def dry(self) -> Iterator[Callable[[], None]]:
        """Return a context that undoes its steps at the end: for gradients that are dropped, or may be.

        A step adds what it can't send to the residual, for the next gradient. If you drop or replace the
        step's gradients, that residual is wrong. At the end of this context the residual, the step counts and
        the warm-up are as they were on entry. The gradients stay.

        The context yields a function, `keep`; call it inside if you apply the gradients after all. All
        processes must decide the same, for example by the norm of the averaged gradients; so do not use it
        inside `thinwire.join`. Cost: a copy of the state, mostly 4 bytes for each parameter with a residual.

        Raises:
            StepError: A step is in progress.

        Examples:
            >>> import thinwire, torch
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> ddp_model = DistributedDataParallel(torch.nn.Linear(64, 32))  # in a process group
            >>> sync = thinwire.attach(ddp_model, thinwire.PowerSGD(matrix_rank=2))
            >>> with sync.dry():  # for example, a generator's step through its discriminator
            ...     ddp_model(torch.ones(1, 64)).square().sum().backward()
            >>> sync.steps
            0
            >>> with sync.dry() as keep:
            ...     ddp_model.zero_grad()
            ...     ddp_model(torch.ones(1, 64)).square().sum().backward()
            ...     if torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0) < 1e6:
            ...         keep()  # and optimizer.step()
            >>> sync.steps
            1
        """
        engine = self._engine
        engine.check_between_steps("dry()", also_dry=False)
        go_back: Callable[[], None] | None = engine.state.remembered()
        opened, is_over = engine.buckets.open_buckets(), False

        def keep() -> None:
            nonlocal go_back
            if is_over:
                raise StepError("keep() was called after its dry() had ended; call it inside dry()")
            go_back = None

        engine.num_dry += 1
        try:
            yield keep
        finally:
            engine.num_dry -= 1
            is_over = True
            if go_back is not None:
                go_back()
                # Buckets opened since then have adapted memory to their plans.
                if engine.buckets.open_buckets() != opened:
                    engine.buckets.close_all()
                engine.reporter.forget_errors()

    def abandon(self) -> None:
        """Drop a step that an exception in the backward pass has ended. Memory is as it was before it."""
        self._engine.abandon()

    def detach(self) -> None:
        """Remove Thinwire from the model, between steps. Call it on every process.

        PyTorch then averages as before, exactly: DDP, `replicate` and native HSDP. Other `fully_shard` models
        are no longer averaged over the replicas. The model can be attached again. This handle keeps its
        statistics and state: `again.load_state_dict(sync.state_dict())` continues from it.

        Raises:
            AttachError: This handle was not made by `attach`, or was detached already.
            StepError: A step is in progress.
        """
        if self._detach is None:
            raise AttachError(
                "there is nothing to detach: only attach's result can be detached, and only once; a hook "
                "that you registered yourself can't be removed, so build a new DDP model"
            )
        self._engine.check_between_steps("detach()")
        self._detach()
        self._detach, self._is_detached = None, True


def not_copied(what: str) -> StateError:
    """Return the error to raise if an object that communicates is pickled or deep-copied."""
    return StateError(
        f"{what} sends messages, so it can't be pickled or copied; save its state_dict(), create a new one "
        "for another model, and keep it out of modules that are copied"
    )


class Synced(Protocol):
    """An object with a `GradientSync`: an aggregator, a `LocalSGD`, an integration's strategy or handler."""

    @property
    def sync(self) -> GradientSync:
        """The handle."""


def attached(sync: GradientSync | None, otherwise: str) -> GradientSync:
    """Return the handle of an object that attaches after its construction; raise if it has not yet."""
    if sync is None:
        raise AttachError(otherwise)
    return sync


@runtime_checkable
class StepCounter(Protocol):
    """Counts steps as a user does: an engine's `Reporter`, or a `LocalSGD`, which counts the optimizer's."""

    observers: list[Callable[[bool], None]]  # called after every step, with whether it was committed

    @property
    def steps(self) -> int:
        """Steps so far."""

    def stats(self) -> Stats:
        """Return the statistics of the steps so far."""

    def counts(self) -> Stats:
        """Return `stats()` without the figures that must be computed. Cost: none."""


@runtime_checkable
class Counting(Protocol):
    """A `StepCounter` with more counts, such as of members that come and go."""

    def numbers(self) -> Mapping[str, float]:
        """Return its other counts so far, by name. Cost: none."""


def engine_of(target: GradientSync | Synced) -> Engine:
    """Return the engine behind a handle, for code that drives or watches it."""
    sync = target if isinstance(target, GradientSync) else target.sync
    # Private: users see the handle, adapters drive the engine.
    return sync._engine


def counter_of(target: object) -> StepCounter | None:
    """Return the counter of the steps as the user of `target` counts them; None if it makes none."""
    if isinstance(target, GradientSync):
        return target._engine.reporter
    # `LocalSGD` counts optimizer steps; its engine averages only in some of them.
    if isinstance(target, StepCounter) and isinstance(getattr(target, "sync", None), GradientSync):
        return target
    return None
