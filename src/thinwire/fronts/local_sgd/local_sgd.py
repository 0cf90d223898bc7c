"""`LocalSGD`: what users enter around their training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Joinable, JoinHook

from thinwire.algorithms import Algorithm, AllReduce
from thinwire.channel import ProcessGroupTransport, Transport, agree, copy_from
from thinwire.channel.uneven import notify_of_step
from thinwire.checks import checked_scaler, true_or_false, whole_count
from thinwire.errors import AttachError, ConfigError, StepError
from thinwire.fronts.local_sgd.consensus import Answer, consensus
from thinwire.fronts.local_sgd.fragment import Averaged, Fragment, are_finite, averaged_tensors
from thinwire.fronts.local_sgd.gradients import check_ddp, driven_gradients
from thinwire.fronts.local_sgd.schedule import Members, Schedule
from thinwire.fronts.local_sgd.steps import calling_after_steps
from thinwire.fronts.local_sgd.validation import (
    OUTER_EXAMPLE,
    STATE_VERSION,
    Outer,
    checked_optimizer,
    checked_state,
    checked_transports,
    new_outer,
    unwrapped,
)
from thinwire.sync import Engine, GradientSync, Settings
from thinwire.sync.checksum import with_checksum
from thinwire.sync.nonfinite import OnNonfinite, checked_on_nonfinite
from thinwire.sync.precision import full_precision
from thinwire.sync.stats import Stats

__all__ = ["LocalSGD"]

EXACT = AllReduce()


class LocalSGD(Joinable):
    """Train each process on its own for some steps, then average the models: fewer messages.

    A context manager around the training loop; to be entered on every process of the group alike. The loop,
    the model and the optimizer stay as they are. What travels is each process's *change* of the parameters
    since the last averaging, through the same exchange as gradients: `algorithm` may be any of Thinwire's,
    with its error memory. After an averaging all processes hold the same parameters to the bit. They are
    written in place.

    One counter, that of attempted steps, says what happens after each:

    | model | subgroup | warm-up, each step | later, each step | later, every `every_steps` steps |
    |---|---|---|---|---|
    | plain module | none | parameters, group | nothing | parameters, group |
    | plain module | given | parameters, group | parameters, subgroup | parameters, group |
    | DDP model | none | gradients, group | nothing | parameters, group |
    | DDP model | given | gradients, group | gradients, subgroup | parameters, group |

    The warm-up, and what happens in subgroups, is plain data-parallel training: exact, without `outer`. At
    the end of a DDP model's warm-up the parameters are averaged once, exactly. `algorithm` and `outer` are
    for the averagings over the group every `every_steps` steps after it.

    On entry all processes take the model of the group's first process, buffers included, as DDP does; not
    if a state was loaded. On a clean exit the steps since the last averaging are averaged, so that all
    processes leave with the same model. When an exception leaves the context, nothing is sent. After it, a
    DDP model averages its gradients over its whole group again.

    Sources: McMahan et al. (arXiv 1602.05629, algorithm 1); Stich, "Local SGD Converges Fast and
    Communicates Little" (arXiv 1805.09767); Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (arXiv
    1808.07217, post-local and hierarchical); Douillard et al., "DiLoCo" (arXiv 2311.08105, algorithm 1).

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
        process_group: The group, None for that of the DDP model or the default one. In tests it may be a
            transport, such as `thinwire.testing.InProcessTransport`, and `subgroup` as well.
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
        subgroup: dist.ProcessGroup | Transport | None = None,
        average_buffers: bool = True,
        algorithm: Algorithm = EXACT,
        outer: Outer | None = None,
        process_group: dist.ProcessGroup | Transport | None = None,
        grad_scaler: GradScaler | None = None,
        on_nonfinite: OnNonfinite = "nan",
    ) -> None:
        super().__init__()
        every_steps = whole_count("every_steps", every_steps, minimum=1)
        warmup_steps = whole_count("warmup_steps", warmup_steps, minimum=0)
        if outer is not None and not callable(outer):
            raise ConfigError(
                f"outer must be a function that makes an optimizer, got {outer!r}; {OUTER_EXAMPLE}"
            )
        self.module, self._ddp = unwrapped(model)
        has_ddp, has_subgroup = self._ddp is not None, subgroup is not None
        self._schedule = Schedule(every_steps, warmup_steps, has_ddp, has_subgroup)
        self._average_buffers = true_or_false("average_buffers", average_buffers)
        averaged = self._averaged_now()
        self._optimizer = checked_optimizer(optimizer, averaged, self.module)
        self._grad_scaler = checked_scaler(grad_scaler)
        if checked_on_nonfinite(on_nonfinite, grad_scaler) != "nan" and not has_ddp:
            raise ConfigError(
                f'on_nonfinite="{on_nonfinite}" is about gradients that a DDP model averages, and this model '
                "is a plain module, whose parameters are averaged; leave it out"
            )
        if on_nonfinite == "raise" and has_subgroup:
            raise ConfigError(
                'on_nonfinite="raise" does not go with a subgroup: processes of other subgroups would not '
                'raise; use "zero"'
            )
        device, specs = averaged[0].tensor.device, [each.spec for each in averaged]
        group, part = checked_transports(process_group, subgroup, self._ddp, device)
        if self._ddp is not None:
            check_ddp(self._ddp)
        # One for the one fragment; what else averages over the same group counts with it.
        self._engine = Engine(algorithm, group, specs)
        counts: dict[str, Any] = {"traffic": self._engine.traffic, "clock": self._engine.clock}
        settings = Settings(on_nonfinite=on_nonfinite)
        self._exact: dict[Members, Engine] = {"group": Engine(EXACT, group, specs, settings, **counts)}
        if part is not None:
            self._exact["subgroup"] = Engine(EXACT, part, specs, settings)
        self._sync = GradientSync(self._engine)
        self._gradient_bytes = sum(each.spec.gradient_bytes for each in averaged if not each.is_buffer)
        self._make_outer = outer
        self._fragments: tuple[Fragment, ...] = ()  # from entry on
        self._loaded: Mapping[str, Any] | None = None  # from loading to entry
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
        return self._fragments[0].outer if self._fragments else None

    def stats(self) -> Stats:
        """Return what was sent to the group, buffers included, and how much less that is than data-parallel.

        `steps` are attempted steps, and `gradient_bytes` those that averaging exact gradients in each of
        them would have sent, so `compression_ratio` compares with plain data-parallel training. What is
        sent within the subgroup is not in it, nor the time spent waiting for processes that are slower.
        """
        return self._compared(self.sync.stats())

    def counts(self) -> Stats:
        """Return `stats()` without errors; see `Engine.counts`."""
        return self._compared(self._engine.counts())

    def _compared(self, stats: Stats) -> Stats:
        return replace(stats, steps=self._step, gradient_bytes=self._steps_here * self._gradient_bytes)

    @property
    def steps(self) -> int:
        """Attempted steps."""
        return self._step

    def __str__(self) -> str:
        return f"LocalSGD(every_steps={self._schedule.every_steps}), {self.sync.algorithm}"

    def __enter__(self) -> LocalSGD:
        """Start: all processes take the first one's model, unless a state was loaded. Collective.

        Raises:
            StepError: It was entered before.
            ConfigError: `outer` does not make an optimizer of the tensors it is given.
            StateError: The loaded state is not of this outer optimizer.
            AgreementError: The processes have other models, settings or loaded states.
            CommunicationError: A collective failed.
        """
        if self._fragments:
            raise StepError(
                "this LocalSGD has been entered before; make a new one, and hand over what is remembered "
                "with load_state_dict(state_dict())"
            )
        schedule, loaded, group = self._schedule, self._loaded, self._engine.transport
        self._engine.agree()
        described = {
            "every_steps": schedule.every_steps,
            "warmup_steps": schedule.warmup_steps,
            "average_buffers": self._average_buffers,
            "subgroup": schedule.has_subgroup,
            "outer optimizer": self._make_outer is not None,
            "loaded state": loaded is not None and loaded["checksum"],
        }
        agree(group, {subject: str(value) for subject, value in described.items()}, "entering LocalSGD")
        fragment = Fragment(self._averaged_now(), self._engine)
        if self._make_outer is not None:
            saved = None if loaded is None else loaded["outer"]
            fragment.outer = new_outer(self._make_outer, fragment.parameters, saved, self._engine.algorithm)
        if loaded is None:
            copy_from(group.rank == 0, chain(self.module.parameters(), self.module.buffers()), group)
            fragment.take()
        else:
            fragment.load(loaded["last_average"])
        with ExitStack() as attached:
            attached.enter_context(
                calling_after_steps(self._optimizer, self._grad_scaler, self._after_own_step)
            )
            if self._ddp is not None:
                attached.enter_context(
                    driven_gradients(self._ddp, self._exact, lambda: schedule.gradients_in(self._step))
                )
            # Kept only when all are attached: where one refuses, those before it are taken off.
            self._attached = attached.pop_all()
        self._fragments, self._loaded, self._is_inside = (fragment,), None, True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        self._average("group")

    def _after_own_step(self) -> None:
        """Count a step that the optimizer, or the scaler, has attempted."""
        notify_of_step(self)
        self._own_pending_steps += 1
        self._after_step()

    def _after_step(self) -> None:
        """Count a step, of this process or (in a join context) of others while it has no more input.

        If an averaging is due, it takes part with what it has changed since the last one: without input,
        its own last steps at first, then nothing.
        """
        self._steps_here += 1
        self._step += 1
        self._pending_steps += 1
        due = self._schedule.after(self._step)
        if due is not None:
            self._average(due)
        for observer in tuple(self.observers):  # a copy: one may leave while it is called
            observer(True)

    def _average(self, members: Members) -> None:
        """Average over the group; or within the subgroup, which leaves the last average what it was."""
        with full_precision(self.join_device):  # the step may stand under autocast
            changes = {fragment: fragment.changes() for fragment in self._fragments}
            flats = list(chain(*changes.values()))
            own = Answer(self._step, are_finite(flats), self._own_pending_steps > 0)
            asked = self._exact["subgroup"].transport if self._schedule.meets_in_subgroups else None
            answers = consensus(own, self._engine.transport, asked, asks_group=members == "group")
            if members == "subgroup":
                for fragment, means in changes.items():
                    fragment.average(means, self._exact["subgroup"])
                    fragment.write(means)
                return
            if not self._pending_steps:
                return
            num_contributors = sum(answer.contributes for answer in answers)
            if self._divides_by_contributors and num_contributors:  # what goes in, so that the mean comes out
                for flat in flats:
                    flat.mul_(len(answers) / num_contributors)
            is_exact = self._schedule.is_warm_up(self._step)
            for fragment, means in changes.items():
                fragment.average(means, self._exact["group"] if is_exact else fragment.engine)
            # Only when all have come: where one fails, no fragment has moved.
            for fragment, means in changes.items():
                fragment.move(means, by_outer=not is_exact)
        self._pending_steps = self._own_pending_steps = 0

    def _check_inside(self) -> None:
        if not self._is_inside:
            raise StepError("average() was called outside the context; call it inside: with local: …")
        entered = {each.name: id(each.tensor) for fragment in self._fragments for each in fragment.averaged}
        now = {each.name: id(each.tensor) for each in self._averaged_now()}
        differing = sorted({name for name, _ in entered.items() ^ now.items()})
        if differing:
            raise StepError(
                f"the model's trainable parameters or buffers are others than on entry: {differing[:4]}; "
                "leave the LocalSGD context before you freeze, unfreeze or replace some, and enter a new one"
            )

    def _averaged_now(self) -> list[Averaged]:
        ignored = () if self._ddp is None else self._ddp.parameters_to_ignore
        return averaged_tensors(self.module, ignored=ignored, buffers=self._average_buffers)

    # Uneven inputs: see thinwire.join.

    def join_hook(self, **options: Any) -> JoinHook:
        """Return, for a join context, how this process shadows the others once it has no more input.

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
        if self._divides_by_contributors and self._schedule.has_subgroup:
            raise ConfigError("with a subgroup, use divide_by_initial_world_size=True")
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where a join context's own messages are.

        Raises:
            StepError: The LocalSGD context is not entered, or the model has other parameters than on entry.
        """
        self._check_inside()
        return self._fragments[0].averaged[0].tensor.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that is joined.

        Raises:
            AttachError: There is none: this averages over a transport.
        """
        transport = self._engine.transport
        if not isinstance(transport, ProcessGroupTransport):
            raise AttachError(f"there is no process group to join: this averages over {transport!r}")
        return transport.group

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, the last average and what algorithm and outer optimizer remember. Collective.

        The same on every process. The model and the optimizer are the user's to save: between averagings
        they differ from process to process, so save them on each to resume to the bit; or call
        `average()` first and save one model. `torch.load(weights_only=True)` takes it.

        Cost: a copy of what is averaged and of the outer optimizer's state; see `GradientSync.state_dict`.

        Raises:
            StepError: It was not entered yet.
            CommunicationError: A collective failed.
            AgreementError: The processes have made different steps, or have other algorithms.
        """
        if not self._fragments:
            raise StepError("there is nothing to save before the context is entered: with local: …")
        state = {
            "version": STATE_VERSION,
            "step": self._step,
            "pending_steps": self._pending_steps,
            "last_average": self._fragments[0].last_average(),
            "sync": self.sync.state_dict(),
            "outer": None if self.outer is None else copy.deepcopy(self.outer.state_dict()),
        }
        return with_checksum(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved by `state_dict`; before entering, with the same state on every process.

        Load the model and the optimizer as well: with a state, entering leaves the model alone.

        Raises:
            StateError: It is not such a state, or is of another model.
            StepError: The context was entered already.
        """
        if self._fragments:
            raise StepError("load the state before the context is entered")
        loaded = checked_state(state, self._averaged_now(), has_outer=self._make_outer is not None)
        self.sync.load_state_dict(loaded["sync"])
        self._loaded = copy.deepcopy(loaded)
        self._step, self._pending_steps = loaded["step"], loaded["pending_steps"]


class _Shadow(JoinHook):
    """How a process that has no more input takes part in the steps of the others."""

    def __init__(self, local: LocalSGD) -> None:
        self._local = local

    def main_hook(self) -> None:
        self._local._after_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Average what is left, once all have run out, so that all hold the same model."""
        self._local._join_config = type(self._local._join_config).construct_disabled_join_config()
        self._local.average()
