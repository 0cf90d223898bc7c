"""`LocalSGD` and `DiLoCo`: contexts that users enter around their training loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Joinable, JoinHook

from thinwire.adapters.ddp import DDPAdapter, switched
from thinwire.adapters.ddp_model import names_of
from thinwire.adapters.setup import Shadow, averaging_model, log_start
from thinwire.algorithms import Algorithm, Quantize
from thinwire.comm import ProcessGroupTransport, Transport, copy_from
from thinwire.comm.process_group import notify_of_step
from thinwire.errors import AttachError, ConfigError, StepError
from thinwire.local_sgd.averaged_model import AveragedModel, replica_of, unwrapped
from thinwire.local_sgd.averager import ModelAverager
from thinwire.local_sgd.fragment import fragments_of
from thinwire.local_sgd.inner_optimizers import Optimizers
from thinwire.local_sgd.membership import StaticMembership
from thinwire.local_sgd.model_changes import ModelChanges
from thinwire.local_sgd.outer import Nesterov, Outer, check_outer
from thinwire.local_sgd.saved_state import checked_state, packed_state, saved_outer
from thinwire.local_sgd.schedule import EXACT, NO_WARMUP, WHOLE, Schedule, Streaming, Warmup
from thinwire.local_sgd.training_loop import check_ddp, warn_of_ddp
from thinwire.tensors.layout import local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class LocalSGD(ModelAverager, Joinable):
    """Train each process on its own for some steps, then average the models: fewer messages.

    A context manager around the training loop. Every process of the group enters it. Each process sends the
    *change* of its parameters since the last averaging: `algorithm` can be any of Thinwire's, with its
    residual. After an averaging all processes hold the same parameters to the bit, written in place.

    The warm-up and all averaging within subgroups are plain data-parallel training: without `outer`, and
    exact except for `warmup.algorithm`. A DDP model's parameters are averaged once, exactly, at the end of
    its warm-up. `algorithm` and `outer` apply to later averagings over the group; see docs/local-sgd.md.

    On entry all processes receive the model of the group's first process, buffers included, unless a state
    was loaded. A clean exit averages the steps since the last averaging, so all processes leave with the same
    model; after an exception nothing is sent. A DDP model then averages its gradients over its group again.

    Sources: McMahan et al. (arXiv 1602.05629, algorithm 1); Stich (arXiv 1805.09767); Lin et al. (arXiv
    1808.07217, post-local and hierarchical); Douillard et al., "DiLoCo" (arXiv 2311.08105, algorithm 1).

    Args:
        model: A module, or a `DistributedDataParallel` model without a hook, built with
            `forward_sync_buffers=False` (before torch 2.13: `broadcast_buffers=False`) if it has buffers (or
            the result of `torch.compile` on either).
        optimizer: Trains the model; or several that train it together (Muon and AdamW), in the order of their
            steps: the steps of the last one, or of one that it wraps (SAM), are counted. Their state is never
            averaged.
        every_steps: Steps from one averaging over the group to the next.
        algorithm: How the changes become their mean over the group.
        outer: The outer step, which moves the last averaged parameters along the mean change: a
            `thinwire.Nesterov`, or a function that makes an optimizer of these parameters. Their gradient is
            then minus the mean change. None for the mean itself.
        streaming: How many parts the model is sent in, and whether training continues meanwhile.
        warmup: Steps at the start that are plain data-parallel training; None for none.
        replicas: The group of processes that average; None for the DDP model's group or the default one. In
            tests it may be a transport, such as `thinwire.testing.InProcessTransport`, and `subgroup` as
            well. For a model in parts, the processes that hold the same part of other replicas, such as
            `mesh["replicate"]` of the mesh whose `mesh["shard"]` was given to `fully_shard`.
        subgroup: This process's fast subgroup, such as the processes of its machine. If all subgroups have
            the same size, each sends everything once, each process a part; see docs/machines.md.
        grad_scaler: The `GradScaler`, if there is one: steps that it skips on only one process must be
            counted, too. Its `step` is replaced on this object inside the context.

    If the model is in parts (FSDP2, native HSDP, tensor or expert parallel, a pipeline's stage), each process
    averages its own part, and no weights are gathered. A replica counts as one member. The state is that of
    the whole model if `fully_shard` cut it over a one-dimensional mesh, otherwise of each process's part.

    Cost: a copy of the averaged tensors (fp32 for 16-bit ones), a second one during an averaging, and the
    state of `algorithm` and `outer`. An averaging first sends 128 bytes for each process, to compare step
    counts, and synchronises with the host three times.

    Attributes:
        sync: The handle of the averagings every `every_steps` steps: their plan, and `use`.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model. (On entry.) Another
            open context averages the model, or a part of it.
        AttachError: There is no process group, or this process is not in it, or LocalSGD can't drive the DDP
            model, or the model's parameters have no values yet or are all frozen.
        GradientError: The algorithm can't average a parameter.

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

    _membership: StaticMembership

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        every_steps: int,
        algorithm: Algorithm = EXACT,
        outer: Outer | None = None,
        streaming: Streaming = WHOLE,
        warmup: Warmup | None = None,
        replicas: dist.ProcessGroup | Transport | DeviceMesh | None = None,
        subgroup: dist.ProcessGroup | Transport | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        module, ddp = unwrapped(model)
        has_subgroup, warmup = subgroup is not None, NO_WARMUP if warmup is None else warmup
        schedule = Schedule(every_steps, warmup, ddp is not None, has_subgroup, streaming)
        check_outer(outer)
        schedule.check_gradient_settings(grad_scaler)
        replica = replica_of(module, replicas, has_subgroup=has_subgroup)
        buffers = streaming.average_buffers
        averaged_model = AveragedModel(module, replica, ddp, buffers=buffers, make_outer=outer)
        averaged_model.set_optimizers(optimizer)
        group, within = averaged_model.transports(subgroup)
        if ddp is not None:
            check_ddp(ddp)
        changes = ModelChanges(averaged_model, schedule, algorithm, group, within)
        super().__init__(changes, StaticMembership(changes), grad_scaler)

    @torch.inference_mode(False)
    def __enter__(self) -> LocalSGD:
        """Give all processes the first one's model, unless a state was loaded. Collective."""
        model, changes, membership = self._model, self._contributor, self._membership
        if model.entered:
            raise StepError(
                "this LocalSGD was already entered; create a new one, and pass on its state with "
                "load_state_dict(state_dict())"
            )
        self._refuse_nested()
        self._check_copies()  # before models are made equal: each copy is of its process's own model
        averaged, group, subgroup = model.tensors(), self._engine.transport, changes.subgroup_engine
        # Check the models first: different shapes could not even be divided the same way.
        membership.check_models(averaged, type(self).__name__)
        num_members = group.size // (1 if subgroup is None else subgroup.transport.size)
        changes.divide(averaged, num_members)
        # Before the first message, all must know whether they start, which is collective, or resume.
        membership.agree_on_settings(self._loaded)
        if self._loaded is None:
            # Frozen parameters and integer buffers too: they are never averaged, so they must start equal.
            buffers = (it for name, it in self.module.named_buffers() if name not in model.ignored)
            tensors = chain(names_of(self.module, model.ignored), buffers)
            copy_from(group.rank == 0, map(local_tensor, tensors), group)
            for fragment in model.fragments:
                fragment.set_last()
        else:
            membership.resume(self._loaded)
        self._check_momentum(stacklevel=3)
        with ExitStack() as attached:
            # If any of these raises, those before it are removed.
            self._watch_loop(attached)
            if (ddp := model.ddp) is None:
                attached.enter_context(averaging_model(self, model.module, group))
                warn_of_ddp(model.module, group, attached)
            else:
                adapters = {"group": DDPAdapter(changes.warmup_engine, ddp)}
                if subgroup is not None:
                    adapters["subgroup"] = DDPAdapter(subgroup, ddp)
                switch = switched(
                    ddp, lambda: adapters.get(self._schedule.gradients_in(self.steps)), taken_by="LocalSGD"
                )
                attached.callback(switch.free)
            attached.callback(setattr, self, "_is_inside", False)
            attached.callback(membership.abandon)  # after an exception nobody waits for the pending average
            self._attached = attached.pop_all()
        # Last: if anything above fails, the context may be entered again.
        model.enter(averaged)
        model.frozen = model.frozen_norms()
        self._loaded, self._is_inside = None, True
        log_start(self._engine, (), str(self))
        return self

    @torch.inference_mode(False)
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Average what is left, unless an exception was raised, and remove all hooks."""
        with self._attached:
            # After an exception other processes may be anywhere: collectives would not match.
            if kind is None:
                self.average()

    def average(self) -> None:
        """Average over the group now, for example before an evaluation or a checkpoint. Collective.

        The schedule continues as if this had not been called. With `outer`, this is an outer step. A pending
        average is applied first. Changes that no step of `optimizer` has made, such as loaded weights, are
        not averaged: they are kept if they are the same on all processes.

        Raises:
            StepError: Outside the context, or processes are at different steps, or the settings of `outer`
                differ; or a process's parameters are not finite, or have changed without a step, and not the
                same way on all, or were loaded with steps pending. Nothing was averaged.
            CommunicationError: A collective failed.
        """
        with self._collective("average()"):
            self._membership.average_all()

    # After each step.

    def _after_own_step(self) -> None:
        # Before the step sends anything else: shadowing processes are waiting for this message.
        notify_of_step(self)
        super()._after_own_step()

    def _average_if_due(self) -> None:
        if self._schedule.averages_within:
            with self._collective("a step"):
                self._membership.average_within()
        super()._average_if_due()
        if num_rounds := self._membership.rounds_due:
            with self._collective("a step"):
                self._membership.advance(num_rounds)
        self._contributor.end_warmup()

    # Uneven inputs: see thinwire.join.

    def join_hook(self, **options: Any) -> JoinHook:
        """Return the hook with which a process without input shadows the others in a join context.

        Changes are divided by the members of the group, or (`divide_by_initial_world_size=False`) by the
        processes that had input since the last averaging. The end of the context averages what is left.

        Raises:
            StepError: The LocalSGD context is not entered.
            AttachError: The model is a DDP model, which averages its gradients itself, or a sharded one.
            ConfigError: Division by contributors with a subgroup, fragments or a delay.
        """
        if not self._is_inside:
            raise StepError("enter LocalSGD before the join context: `with local, thinwire.join(local):`")
        if self._model.ddp is not None:
            raise AttachError("a DDP model can't be joined through LocalSGD; pass LocalSGD the plain module")
        if self._model.replica.is_sharded:
            raise AttachError(
                "a sharded model can't be joined: FSDP2 needs all processes of a replica in every pass; "
                "give all processes the same number of batches"
            )
        by_contributors, schedule = not options.get("divide_by_initial_world_size", True), self._schedule
        if by_contributors and schedule.has_subgroup:
            raise ConfigError("with a subgroup, join needs divide_by_initial_world_size=True")
        if by_contributors and (schedule.streaming.fragments > 1 or schedule.streaming.delay_steps):
            raise ConfigError(
                "with fragments or delay_steps, join needs divide_by_initial_world_size=True: changes are "
                "sent before the contributing processes are known"
            )
        self._membership.divides_by_contributors = by_contributors
        return Shadow(self, lambda: self._after_step(0.0), lambda _: self.average())

    @property
    def join_device(self) -> torch.device:
        """The device of a join context's own messages.

        Raises:
            StepError: The LocalSGD context is not entered, or the model has other parameters than on entry.
        """
        self._check_inside("join_device")
        return self._model.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group of the join context.

        Raises:
            AttachError: There is none: this averages over a transport.
        """
        transport = self._engine.transport
        if not isinstance(transport, ProcessGroupTransport):
            raise AttachError(f"there is no process group to join: this averages over {transport!r}")
        return transport.group

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, the last average and the state of algorithm and outer optimizer. Collective.

        The result is the same on every process. Save the model and the optimizer yourself: between averagings
        they differ from process to process, so save them on each to resume to the bit; or call
        `average()` first and save one model. `torch.load(weights_only=True)` accepts it. A pending average is
        waited for and saved; it is applied when it is due, in this run and in the run that resumes.

        Cost: a copy of the averaged tensors and the outer optimizer's state; see `GradientSync.state_dict`.

        Raises:
            StepError: The context was not entered yet, or processes are at different steps.
            CommunicationError: A collective failed.
            AgreementError: The processes differ in their steps or algorithms.
        """
        model, pending, warmup = self._model, self._membership.pending, self._schedule.warmup
        if not model.entered:
            raise StepError(
                "there is nothing to save before the context is entered; enter it first: `with local:`. For "
                "torch.distributed.checkpoint use local.distributed_state()"
            )
        # An algorithm's memory is final only when its step has ended.
        if pending is not None and not pending.is_done:
            with self._collective("state_dict()"):
                self._membership.settle()
        fragments, replica, sent_at = model.fragments, model.replica, self._contributor.sent_at
        means = {} if pending is None else pending.changes
        lasts = dict(chain.from_iterable(fragment.named(fragment.last).items() for fragment in fragments))
        # Several of these are collective: keep one order on all processes, including a replica's shards.
        return packed_state(
            step=self.steps,
            sent_after=tuple(sent_at if fragment in means else fragment.sent_after for fragment in fragments),
            in_flight=tuple(
                (fragments.index(fragment), replica.whole(fragment.named(flats)))
                for fragment, flats in means.items()
            ),
            last_average=replica.whole(lasts),
            sync=self.sync.state_dict(),
            outer=saved_outer(model),
            place=replica.place,
            # The warm-up's last step is exact, and sends the residual; after it, its state is not needed.
            warmup=self._contributor.warmup_engine.state_dict()
            if warmup.algorithm is not None and self.steps < warmup.steps
            else None,
        )

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state saved by `state_dict`, the same on every process; call it before entering.

        Load the model and the optimizer as well: with a state, entering leaves the model alone. The number of
        fragments may differ, unless an average was pending. As in torch's optimizers, the outer optimizer
        uses the learning rate and momentum of the state, not those given or chosen in this run: to change
        them, write to `outer.param_groups` after entering.

        Raises:
            StateError: It is not such a state, or is from a different model.
            StepError: The context was entered already.
        """
        if self._model.entered:
            raise StepError("load the state before you enter the context")
        replica, num_fragments = self._model.replica, self._schedule.streaming.fragments
        shapes = [
            {tensor.name: replica.shape_of(tensor.name, tensor.value) for tensor in part}
            for part in fragments_of(self._model.tensors(), num_fragments)
        ]
        loaded = checked_state(
            copy.deepcopy(state),  # used on entry: the caller may change the original before
            shapes,
            place=replica.place,
            has_outer=self._model.make_outer is not None,
            has_warmup=self._schedule.warmup.algorithm is not None,
        )
        loaded = loaded._replace(
            last_average=replica.own(loaded.last_average),
            pending=[(number, replica.own(means)) for number, means in loaded.pending],
        )
        warm_engine = self._contributor.warmup_engine
        warmup = None if loaded.warmup is None else warm_engine.check_state_dict(loaded.warmup)
        # This may raise, so nothing is changed before it.
        self.sync.load_state_dict(loaded.sync)
        if warmup is not None:
            warm_engine.load(warmup)
        self._loaded = loaded
        self._contributor.steps = loaded.step


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    This is `LocalSGD` with other defaults; see there what is averaged and when. The outer optimizer is SGD
    with Nesterov momentum on the last averaged parameters; changes are sent in four bits per number. With
    `streaming` it is Streaming DiLoCo: the model is averaged in parts, while training continues. With Muon
    inside, and AdamW for parameters that are not matrices, it is MuLoCo: `DiLoCo(model, [muon, adamw])`.
    Arguments, cost and errors are those of `LocalSGD`; a subgroup counts as one member.

    Sources: Douillard et al., "DiLoCo" (arXiv 2311.08105, algorithm 1) and "Streaming DiLoCo" (arXiv
    2501.18512, algorithm 2); Thérien et al., "MuLoCo" (arXiv 2505.23725).

    Examples:
        >>> import thinwire, torch
        >>> model = nn.Linear(64, 32)  # in a process group
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with thinwire.DiLoCo(model, optimizer, every_steps=30) as local:
        ...     for _ in range(60):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 64)).sum().backward()
        ...         optimizer.step()
        >>> print(local)
        DiLoCo(every_steps=30), Quantize(bits=4)
        >>> local.stats().compression_ratio > 200
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        every_steps: int = 30,
        algorithm: Algorithm = Quantize(bits=4),  # noqa: B008
        outer: Outer | None = Nesterov(),  # noqa: B008
        **settings: Any,
    ) -> None:
        settings |= {"every_steps": every_steps, "algorithm": algorithm, "outer": outer}
        super().__init__(model, optimizer, **settings)
