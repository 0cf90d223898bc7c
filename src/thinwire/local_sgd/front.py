"""`LocalSGD`: one object that owns the schedule, the groups and the averaging."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from thinwire.algorithms import Algorithm
from thinwire.channel.broadcast import copy_from
from thinwire.checks import checked_scaler, true_or_false, whole_count
from thinwire.checksum import with_checksum
from thinwire.errors import AttachError, ConfigError, StepError
from thinwire.local_sgd.averager import EXACT, Averager
from thinwire.local_sgd.checks import (
    STATE_VERSION,
    Loaded,
    checked_groups,
    checked_optimizer,
    checked_state,
    unwrapped,
)
from thinwire.local_sgd.gradients import check_ddp, driven_gradients
from thinwire.local_sgd.outer import Outer, check_outer, new_outer
from thinwire.local_sgd.replica import Averaged, Replica, averaged_tensors
from thinwire.local_sgd.steps import calling_after_steps
from thinwire.local_sgd.uneven import Shadow
from thinwire.nonfinite import OnNonfinite, checked_on_nonfinite
from thinwire.stats import Stats
from thinwire.sync import GradientSync

__all__ = ["LocalSGD"]


class LocalSGD(Joinable):
    """Train each process on its own for some steps, then average the models: fewer messages.

    A context manager around the training loop; to be entered on every process of the group alike. The
    loop, the model and the optimizer stay as they are:

        with thinwire.LocalSGD(model, optimizer, every_steps=16) as local:
            for batch, target in loader:
                optimizer.zero_grad()
                loss_fn(model(batch), target).backward()
                optimizer.step()

    What travels is each process's *change* of the parameters since the last averaging, through the same
    exchange as gradients: `algorithm` may be any of Thinwire's, with its error memory. After an averaging
    all processes hold the same parameters to the bit. They are written in place.

    One counter, that of attempted steps, says what happens after each:

    | model | subgroup | warm-up, each step | later, each step | later, every `every_steps` steps |
    |---|---|---|---|---|
    | plain module | none | parameters, group | nothing | parameters, group |
    | plain module | given | parameters, group | parameters, subgroup | parameters, group |
    | DDP model | none | gradients, group | nothing | parameters, group |
    | DDP model | given | gradients, group | gradients, subgroup | parameters, group |

    The warm-up, and what happens in subgroups, is plain data-parallel training: exact, without `outer`.
    `algorithm` and `outer` are for the averagings over the group every `every_steps` steps after it.

    On entry all processes take the model of the group's first process, buffers included, as DDP does; not
    if a state was loaded. On a clean exit the steps since the last averaging are averaged, so that all
    processes leave with the same model. When an exception leaves the context, nothing is sent. After it, a
    DDP model averages its gradients over its whole group again.

    Sources: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    (arXiv 1602.05629, algorithm 1); Stich, "Local SGD Converges Fast and Communicates Little" (arXiv
    1805.09767); Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217, post-local
    and hierarchical); Douillard et al., "DiLoCo" (arXiv 2311.08105, algorithm 1).

    Args:
        model: A module, or a `DistributedDataParallel` model without a hook, built with
            `forward_sync_buffers=False` (before torch 2.13: `broadcast_buffers=False`) if it has buffers (or
            the result of `torch.compile` on either).
        optimizer: Trains the model; of several, the one that steps last. Its state is never averaged.
        every_steps: Steps from one averaging over the group to the next.
        warmup_steps: Steps at the start that are plain data-parallel training.
        subgroup: This process's fast subgroup, such as the processes of its machine.
        average_buffers: Whether to average floating buffers that the model saves (BatchNorm's statistics).
            Integer ones, such as `num_batches_tracked`, are left alone.
        algorithm: How the changes become their mean over the group.
        outer: Makes an optimizer of the last averaged parameters. It steps them with minus the mean change
            as their gradient. DiLoCo: `lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)`.
        process_group: The group, None for that of the DDP model or the default one.
        grad_scaler: The `GradScaler`, if there is one: the steps it skips on one process only must count
            as well. Its `step` is replaced on this object while the context lasts.
        on_nonfinite: What becomes of gradients that a DDP model averages (in the warm-up and within the
            subgroup) and that are not finite: see `thinwire.attach`. What no group averages is left alone;
            parameters that are not finite raise `StepError` at the next averaging.

    Cost: a copy of what is averaged, a second one during an averaging, and what `algorithm` and `outer`
    keep. An averaging first sends 24 bytes for each process, to compare step counts, and synchronises
    with the host three times.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: No process group, or one this process is not in, or a DDP model that can't be driven.
        GradientError: A parameter can't be averaged by the algorithm.

    Examples:
        >>> import thinwire
        >>> model = nn.Linear(8, 4)  # in a process group
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with thinwire.LocalSGD(model, optimizer, every_steps=5) as local:
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 8)).sum().backward()
        ...         optimizer.step()
        >>> local.stats().steps, local.stats().messages, local.stats().compression_ratio
        (10, 2, 5.0)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every_steps: int,
        warmup_steps: int = 0,
        subgroup: dist.ProcessGroup | None = None,
        average_buffers: bool = True,
        algorithm: Algorithm = EXACT,
        outer: Outer | None = None,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: GradScaler | None = None,
        on_nonfinite: OnNonfinite = "nan",
    ) -> None:
        super().__init__()
        self._every_steps = whole_count("every_steps", every_steps, least=1)
        self._warmup_steps = whole_count("warmup_steps", warmup_steps, least=0)
        check_outer(outer)
        self.module, self._ddp = unwrapped(model)
        self._average_buffers = true_or_false("average_buffers", average_buffers)
        averaged = self._averaged_now()
        self._optimizer = checked_optimizer(optimizer, averaged, self.module)
        self._grad_scaler = checked_scaler(grad_scaler)
        if checked_on_nonfinite(on_nonfinite, grad_scaler) != "nan" and self._ddp is None:
            raise ConfigError(
                f'on_nonfinite="{on_nonfinite}" is about gradients that a DDP model averages, and this model '
                "is a plain module, whose parameters are averaged; leave it out"
            )
        if on_nonfinite == "raise" and subgroup is not None:
            raise ConfigError(
                'on_nonfinite="raise" does not go with a subgroup: processes of other subgroups would not '
                'raise; use "zero"'
            )
        group, inner = checked_groups(process_group, subgroup, self._ddp or self.module)
        if self._ddp is not None:
            check_ddp(self._ddp)
        self._averager = Averager(
            group,
            inner,
            algorithm,
            [each.spec for each in averaged],
            averaged[0].tensor.device,
            on_nonfinite=on_nonfinite,
            asks_subgroup=self._ddp is None,
        )
        self._sync = GradientSync(self._averager.engine)
        self._gradient_bytes = sum(each.spec.gradient_bytes for each in averaged if not each.is_buffer)
        self._make_outer = outer
        self._outer: torch.optim.Optimizer | None = None
        self._replica: Replica | None = None
        self._loaded: Loaded | None = None
        self._attached = ExitStack()
        self._is_inside = self._divides_by_contributors = False
        self._step = self._steps_here = self._pending_steps = self._own_pending_steps = 0
        self.observers: list[Callable[[bool], None]] = []

    @property
    def sync(self) -> GradientSync:
        """What averages the changes every `every_steps` steps: its plan, and switching the algorithm."""
        return self._sync

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, from entry on; for a learning-rate schedule, say."""
        return self._outer

    def stats(self) -> Stats:
        """What was sent to the group, buffers included, and how much less that is than data-parallel.

        `steps` are attempted steps, and `gradient_bytes` those that averaging exact gradients in each of
        them would have sent, so `compression_ratio` compares with plain data-parallel training. What is
        sent within the subgroup is not in it, nor the time spent waiting for processes that are slower.
        """
        return self._compared(self.sync.stats())

    def counts(self) -> Stats:
        """`stats()` without errors; see `Engine.counts`."""
        return self._compared(self._averager.engine.counts())

    def _compared(self, stats: Stats) -> Stats:
        return replace(stats, steps=self._step, gradient_bytes=self._steps_here * self._gradient_bytes)

    @property
    def steps(self) -> int:
        """Attempted steps."""
        return self._step

    def __str__(self) -> str:
        return f"LocalSGD(every_steps={self._every_steps}), {self.sync.algorithm}"

    def __enter__(self) -> LocalSGD:
        """Start: all processes take the first one's model, unless a state was loaded. Collective.

        Raises:
            StepError: It was entered before.
            ConfigError: `outer` does not make an optimizer of the tensors it is given.
            StateError: The loaded state is not of this outer optimizer.
            AgreementError: The processes have other models, settings or loaded states.
            CommunicationError: A collective failed.
        """
        if self._replica is not None:
            raise StepError(
                "this LocalSGD has been entered before; make a new one, and hand over what is remembered "
                "with load_state_dict(state_dict())"
            )
        self._agree()
        replica = Replica(self._averaged_now())
        if self._make_outer is not None:
            saved = None if self._loaded is None else self._loaded.outer
            self._outer = new_outer(self._make_outer, replica.last_parameters, saved)
        if self._loaded is None:
            everything = chain(self.module.parameters(), self.module.buffers())
            group = self._averager.channel.group
            copy_from(group.rank() == 0, everything, group)
            replica.take()
        else:
            replica.load(self._loaded.last_average)
        self._attach()
        self._replica, self._loaded, self._is_inside = replica, None, True
        return self

    def _agree(self) -> None:
        self._averager.engine.agree()
        told = {
            "every_steps": self._every_steps,
            "warmup_steps": self._warmup_steps,
            "average_buffers": self._average_buffers,
            "subgroup": self._averager.inner is not None,
            "outer optimizer": self._make_outer is not None,
            "loaded state": self._loaded is not None and self._loaded.checksum,
        }
        purpose = "entering LocalSGD"
        self._averager.channel.agree({subject: str(value) for subject, value in told.items()}, purpose)

    def _attach(self) -> None:
        averager = self._averager
        with ExitStack() as attached:
            attached.enter_context(calling_after_steps(self._optimizer, self._grad_scaler, self._after_step))
            if self._ddp is not None:
                attached.enter_context(
                    driven_gradients(
                        self._ddp, averager.exact, averager.inner, lambda: self._step < self._warmup_steps
                    )
                )
            self._attached = attached.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End: average what is left, unless an exception is under way, and take all hooks off."""
        try:
            if kind is None:
                self.average()
        finally:
            self._is_inside = False
            self._attached.close()

    def average(self) -> None:
        """Average over the group now, before an evaluation or a checkpoint, say. Collective.

        The schedule goes on as if it had not been called. With `outer`, this is an outer step. Does
        nothing but compare step counts if there was no step since the last averaging.

        Raises:
            StepError: Outside the context, or processes are at different steps, or a process's parameters
                are not finite; nothing was averaged.
            CommunicationError: A collective failed.
        """
        self._average()

    def _after_step(self) -> None:
        """The optimizer, or the scaler, has attempted a step."""
        Join.notify_join_context(self)
        self._own_pending_steps += 1
        self._shadow()

    def _shadow(self) -> None:
        """Count a step, of this process or (in a join context) of others while it has no more input.

        If an averaging is due, it takes part with what it has changed since the last one: without input,
        its own last steps at first, then nothing.
        """
        self._steps_here += 1
        self._step += 1
        self._pending_steps += 1
        if self._is_due():
            self._average()
        elif self._ddp is None and self._averager.inner is not None:
            self._averager.in_subgroup(self._checked_replica(), self._step)
        for observer in tuple(self.observers):
            observer(True)

    def _is_due(self) -> bool:
        """Whether the parameters are averaged over the group after this step."""
        if self._step > self._warmup_steps:
            return (self._step - self._warmup_steps) % self._every_steps == 0
        return self._ddp is None or self._step == self._warmup_steps

    def _average(self) -> None:
        self._averager.over_group(
            self._checked_replica(),
            self._step,
            exactly=self._step <= self._warmup_steps,
            outer=self._outer,
            nothing_new=self._pending_steps == 0,
            contributes=self._own_pending_steps > 0,
            divides_by_contributors=self._divides_by_contributors,
        )
        self._pending_steps = self._own_pending_steps = 0

    def join_hook(self, **options: Any) -> JoinHook:
        """For a join context: how this process shadows the others once it has no more input.

        Changes are divided by the members of the group, or (`divide_by_initial_world_size=False`) by the
        contributors: the processes that had input since the last averaging. At the end of the join
        context what is left is averaged.

        Raises:
            StepError: The LocalSGD context is not entered.
            AttachError: The model is a DDP model, which averages gradients of its own.
            ConfigError: Division by the contributors with a subgroup.
        """
        if not self._is_inside:
            raise StepError("enter LocalSGD before the join context: with local, thinwire.join(local): …")
        if self._ddp is not None:
            raise AttachError("a DDP model can't be joined through LocalSGD; pass LocalSGD the plain module")
        self._divides_by_contributors = not options.get("divide_by_initial_world_size", True)
        if self._divides_by_contributors and self._averager.inner is not None:
            raise ConfigError("with a subgroup, use divide_by_initial_world_size=True")
        return Shadow(self._shadow, self._end_join)

    def _end_join(self) -> None:
        self._join_config = type(self._join_config).construct_disabled_join_config()
        self.average()

    @property
    def join_device(self) -> torch.device:
        """Where a join context's own messages are."""
        return self._checked_replica().device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that is joined."""
        return self._averager.channel.group

    def _checked_replica(self) -> Replica:
        if self._replica is None or not self._is_inside:
            raise StepError("average() was called outside the context; call it inside: with local: …")
        self._replica.check_unchanged(self._averaged_now())
        return self._replica

    def _averaged_now(self) -> list[Averaged]:
        ignored = () if self._ddp is None else self._ddp.parameters_to_ignore
        return averaged_tensors(self.module, ignored=ignored, buffers=self._average_buffers)

    def state_dict(self) -> dict[str, Any]:
        """The schedule, the last average and what algorithm and outer optimizer remember. Collective.

        The same on every process. The model and the optimizer are the user's to save: between averagings
        they differ from process to process, so save them on each to resume to the bit; or call
        `average()` first and save one model. `torch.load(weights_only=True)` takes it.

        Cost: a copy of what is averaged and of the outer optimizer's state; see `GradientSync.state_dict`.

        Raises:
            StepError: It was not entered yet.
            CommunicationError: A collective failed.
        """
        if self._replica is None:
            raise StepError("there is nothing to save before the context is entered: with local: …")
        state = {
            "version": STATE_VERSION,
            "step": self._step,
            "pending_steps": self._pending_steps,
            "last_average": self._replica.last_average(),
            "sync": self.sync.state_dict(),
            "outer": None if self._outer is None else copy.deepcopy(self._outer.state_dict()),
        }
        return with_checksum(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved by `state_dict`; before entering, with the same state on every process.

        Load the model and the optimizer as well: with a state, entering leaves the model alone.

        Raises:
            StateError: It is not such a state, or is of another model.
            StepError: The context was entered already.
        """
        if self._replica is not None:
            raise StepError("load the state before the context is entered")
        loaded = checked_state(state, self._averaged_now(), has_outer=self._make_outer is not None)
        self.sync.load_state_dict(loaded.sync)
        self._loaded = copy.deepcopy(loaded)
        self._step, self._pending_steps = loaded.step, loaded.pending_steps
