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
    """A user's handle of what averages a model's gradients: to look at, to switch, to save and to load.

    `thinwire.attach` makes one, and the other adapters have one as `sync`. Printing it gives some lines to
    read. It is what `torch.distributed.checkpoint` calls stateful.
    """

    def __init__(self, engine: Engine, detach: Callable[[], None] | None = None) -> None:
        self._engine, self._detach = engine, detach

    def __str__(self) -> str:
        """Return some lines: the algorithm, the plan's compression ratio, and what was done."""
        return str(self._engine.reporter)

    def __reduce__(self) -> NoReturn:
        raise not_copied("a handle")

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use."""
        return self._engine.algorithm

    @property
    def plan(self) -> Plan:
        """Which parameter travels how once past the warm-up, in the order of the model.

        An algorithm that works on whole buckets is planned for the buckets of the last step; before
        the first step, as if the model were one bucket.
        """
        return self._engine.plan

    @property
    def steps(self) -> int:
        """Steps so far, those that were not finite included."""
        return self._engine.steps

    @torch.inference_mode(False)
    def stats(self) -> Stats:
        """Return the figures of the steps so far.

        Cost: one norm for each compressed parameter and one host synchronisation.
        """
        return self._engine.reporter.stats()

    @torch.inference_mode(False)
    def use(self, algorithm: Algorithm) -> None:
        """Switch to a different algorithm from the next step on; to be called on every process alike.

        The residual is carried over: an algorithm with error feedback goes on with it, any other
        sends it in its first step.

        Raises:
            ConfigError: It is not an algorithm.
            GradientError: A parameter's gradient can't be averaged by it.
            StepError: A step is under way.
        """
        self._engine.check_between_steps("use()")
        self._engine.buckets.use(algorithm)

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return all that is remembered, the same on every process. Collective: call it on all processes.

        The residual of the processes is replaced by its mean, here and in the result: every later step
        depends on the mean alone, so a run that goes on and one that resumes are the same, on any number
        of processes. It has plain values, and tensors on the CPU, in tuples of pairs of a name and a tensor:
        `torch.load(weights_only=True)` and `torch.distributed.checkpoint` take it, `thinwire.checkpoint`
        writes it as safetensors, too.

        Cost: a gather of 32 bytes from each process, one exact average of all residuals (none if there was
        no step since the last time), and a copy to the CPU. For 100 M parameters that have a residual that
        is 400 MB, or 32 s between two processes at 100 Mbit/s (`thinwire advise` tells it for your model and
        link; `local_state_dict` sends nothing). `Quantize` and `Cast` have none. If other processes do not
        call it as well, it says so after 10 s, and fails after the group's timeout.

        Raises:
            StepError: A step is under way.
            AgreementError: The processes have made different steps, or have other algorithms.
            CommunicationError: A collective failed, or some process did not call it; memory is as it was.
        """
        return self._engine.state_dict()

    @torch.inference_mode(False)
    def local_state_dict(self) -> dict[str, Any]:
        """Return all that this process remembers, its own residual in it, without a message; for slow links.

        Call it on all processes after the same step, and let each save its own
        (`thinwire.checkpoint.save_local` does). On as many processes, laid out alike, each loads its own by
        `load_state_dict`, and goes on to the bit. On any other number or layout, load
        `thinwire.checkpoint.merge` of all of them on every process: the mean residual is kept.
        (`thinwire.checkpoint.load_local` does the one or the other.) Of an FSDP2 model each has its own
        shards, and may be loaded on the same mesh.

        Cost: a copy of what is remembered to the CPU, with zeros for what other processes of a machine have.

        Raises:
            StepError: A step is under way.
        """
        engine = self._engine
        engine.check_between_steps("local_state_dict()")
        engine.check_whole("local_state_dict()")
        with full_precision(torch.device("cpu")):
            return pack(engine.state.save_local(engine.algorithm, self.position, self._cuts()))

    def _cuts(self) -> Cuts:
        """Return how a sharded model is cut."""
        return {}

    @property
    def position(self) -> Position:
        """Which process of how many this is, for a file of its own; see `thinwire.checkpoint.save_local`."""
        group, partition, machines = self._engine.transport, self._engine.partition, self._engine.machines
        local = (0, 1) if partition is None else (partition.intra_node.rank, partition.intra_node.size)
        return Position(group.rank, group.size, *local, machines)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from a state saved by `state_dict`; to be called on every process with the same state.

        (Or, on each process, with its own `local_state_dict()`.) The number of processes may differ, and so
        may the buckets. The algorithm in use is kept: a state saved with other settings (what does not fit is
        cut or extended, with a warning), or by a different algorithm, is taken over, its residual included.
        All is checked before anything is changed; if the parameters are not known yet (the hooks), at the
        first step.

        Args:
            state: What `state_dict` returned, on any process.
            strict: Whether to refuse a state that lacks parameters of this model, or has others. If not,
                the residual of those others is dropped. If parameters are known by position only, all
                must be the same anyway.

        Raises:
            StateError: It is not such a state, damaged, of a later version, or of a different model.
            StepError: A step is under way.
        """
        with torch.inference_mode(False):  # no decorator: a warning points at the caller's line
            self._engine.load(self._checked(state, strict=strict))

    def _checked(self, state: Mapping[str, Any], *, strict: bool) -> SavedState:
        return self._engine.check_state_dict(state, strict=strict, position=self.position)

    def distributed_state(self) -> Stateful:
        """Return a state for `torch.distributed.checkpoint` to save and load, beside model and optimizer.

        For an FSDP2 model it has DTensors in place of whole tensors, so no process holds the whole residual,
        and it is resharded as the parameters are. For other models it is this handle. To be used on all
        processes: saving is collective, as `state_dict` is, and loading is strict. Cost: of an FSDP2 model a
        copy of what is remembered of this process's shards, and zeros for parameters of which nothing is.

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
        """Return a context whose steps leave no trace: for gradients that are dropped, or may be.

        What a step can't send is remembered, and added to the next gradient. If the step's own gradients are
        dropped or replaced, what was remembered of them is wrong. At the end of this context all is as it was
        on entry: the residual, counts of steps, warm-up. The gradients stay.

        The context gives a function, `keep`, to be called inside if the gradients are applied after all. All
        processes must decide alike, such as by the norm of the averaged gradients; so use it outside of
        `thinwire.join` only. Cost: a copy of what is remembered, mostly 4 bytes for each parameter that has a
        residual.

        Raises:
            StepError: A step is under way.

        Examples:
            >>> import thinwire, torch
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> ddp_model = DistributedDataParallel(torch.nn.Linear(64, 32))  # in a process group
            >>> sync = thinwire.attach(ddp_model, thinwire.PowerSGD(matrix_rank=2))
            >>> with sync.dry():  # a generator's step goes through its discriminator, say
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
                raise StepError("keep() was called after its dry() had ended; call it inside")
            go_back = None

        engine.num_dry += 1
        try:
            yield keep
        finally:
            engine.num_dry -= 1
            is_over = True
            if go_back is not None:
                go_back()
                # Buckets that were opened since then have made memory fit their plans.
                if engine.buckets.open_buckets() != opened:
                    engine.buckets.close_all()
                engine.reporter.forget_errors()

    def abandon(self) -> None:
        """Forget a step that an exception in the backward pass has ended. Memory is as it was before it."""
        self._engine.abandon()

    def detach(self) -> None:
        """Take Thinwire off the model again, between steps; to be called on every process alike.

        Then PyTorch averages as if it had not been there: DDP exactly; `replicate` and native HSDP too; of
        other models of `fully_shard` no one averages over the replicas. The model may be attached again.
        This handle keeps what was done and is remembered: `again.load_state_dict(sync.state_dict())` goes on
        with it.

        Raises:
            AttachError: No `attach` has made this handle, or it was detached.
            StepError: A step is under way.
        """
        if self._detach is None:
            raise AttachError(
                "there is nothing to take off: only what attach returned is detached, and once; a hook that "
                "you have registered yourself stays, so build a new DDP model"
            )
        self._engine.check_between_steps("detach()")
        self._detach()
        self._detach = None


def not_copied(what: str) -> StateError:
    """Return the error to raise where pickle or `copy.deepcopy` is asked for what sends messages."""
    return StateError(
        f"{what} sends messages, so it can't be pickled or copied; save what its state_dict() returns, make "
        "a new one for a different model, and keep it out of modules that are copied"
    )


class Synced(Protocol):
    """An object with a `GradientSync`: an aggregator, a `LocalSGD`, an integration's strategy or handler."""

    @property
    def sync(self) -> GradientSync:
        """The handle."""


@runtime_checkable
class Handle(Protocol):
    """Counts steps: an engine's `Reporter`, and an adapter that has one but counts different steps."""

    observers: list[Callable[[bool], None]]  # are called after every step, with whether it was committed

    @property
    def steps(self) -> int:
        """Steps so far."""

    def stats(self) -> Stats:
        """Return the figures of the steps so far."""

    def counts(self) -> Stats:
        """Return `stats()` without what must be computed. Cost: none."""


def attached(sync: GradientSync | None, otherwise: str) -> GradientSync:
    """Return the handle of what attaches itself later than it is made, if it has by now."""
    if sync is None:
        raise AttachError(otherwise)
    return sync


@runtime_checkable
class Counting(Protocol):
    """A handle that counts more than steps and messages, such as members that come and go."""

    def numbers(self) -> Mapping[str, float]:
        """Return its other counts so far, by name. Cost: none."""


def engine_of(target: GradientSync | Synced) -> Engine:
    """Return the engine that averages behind a handle; for what drives or watches it."""
    sync = target if isinstance(target, GradientSync) else target.sync
    # Kept private: the handle is the user's view, and adapters drive the engine.
    return sync._engine


def handle_of(target: object) -> Handle | None:
    """Return the counter of the steps that the user of `target` knows; None if it makes none."""
    if isinstance(target, GradientSync):
        return target._engine.reporter
    # A local SGD counts optimizer steps, of which its engine averages but some.
    if isinstance(target, Handle) and isinstance(getattr(target, "sync", None), GradientSync):
        return target
    return None
