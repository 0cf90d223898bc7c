"""`LocalSGD` and `DiLoCo`: what users enter around their training loop."""

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

from thinwire.adapters.common import Shadow, averaging_model, tell_start
from thinwire.adapters.ddp import DDPAdapter, switched
from thinwire.algorithms import Algorithm, Quantize
from thinwire.comm import ProcessGroupTransport, Transport, copy_from
from thinwire.comm.process_group import notify_of_step
from thinwire.errors import AttachError, ConfigError, StepError
from thinwire.local_sgd.averaged_model import AveragedModel, replica_of, unwrapped
from thinwire.local_sgd.averager import ModelAverager
from thinwire.local_sgd.fragment import fragments_of
from thinwire.local_sgd.inner_optimizers import Optimizers, checked_optimizers
from thinwire.local_sgd.membership import StaticMembership
from thinwire.local_sgd.model_changes import ModelChanges, engines_of
from thinwire.local_sgd.outer import Nesterov, Outer, check_outer
from thinwire.local_sgd.saved_state import checked_state, packed_state, saved_outer
from thinwire.local_sgd.schedule import EXACT, NO_WARMUP, WHOLE, Schedule, Streaming, Warmup
from thinwire.local_sgd.training_loop import check_ddp, telling_of_ddp
from thinwire.tensors.layout import local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class LocalSGD(ModelAverager, Joinable):
    """Train each process on its own for some steps, then average the models: fewer messages.

    A context manager around the training loop, which every process of the group enters. What travels is each
    process's *change* of the parameters since the last averaging: `algorithm` may be any of Thinwire's, with
    its error memory. After an averaging all processes hold the same parameters to the bit, written in place.

    The warm-up, and what happens in subgroups, is plain data-parallel training: without `outer`, and exact
    but for `warmup.algorithm`. At the end of a DDP model's warm-up the parameters are averaged once, exactly.
    `algorithm` and `outer` are for the averagings over the group after it (table in docs/local-sgd.md).

    On entry all processes take the model of the group's first process, buffers included, unless a state was
    loaded. A clean exit averages the steps since the last averaging, so all processes leave with the same
    model; after an exception nothing is sent. A DDP model then averages its gradients over its group again.

    Sources: McMahan et al. (arXiv 1602.05629, algorithm 1); Stich (arXiv 1805.09767); Lin et al. (arXiv
    1808.07217, post-local and hierarchical); Douillard et al., "DiLoCo" (arXiv 2311.08105, algorithm 1).

    Args:
        model: A module, or a `DistributedDataParallel` model without a hook, built with
            `forward_sync_buffers=False` (before torch 2.13: `broadcast_buffers=False`) if it has buffers (or
            the result of `torch.compile` on either).
        optimizer: Trains the model; or several that train it together (Muon and AdamW), in the order of their
            steps, of which the last one's are counted. Their state is never averaged.
        every_steps: Steps from one averaging over the group to the next.
        algorithm: How the changes become their mean over the group.
        outer: The outer step, which moves the last averaged parameters along the mean change: a
            `thinwire.Nesterov`; or a function that makes an optimizer of them, which steps with minus the
            mean change as their gradient. None for the mean itself.
        streaming: In how many parts the model travels, and while training goes on or not.
        warmup: Steps at the start that are plain data-parallel training; None for none.
        replicas: The processes that average: a group, None for that of the DDP model or the default one. In
            tests it may be a transport, such as `thinwire.testing.InProcessTransport`, and `subgroup` as
            well. For a model in parts those that hold the same part of other replicas, such as
            `mesh["replicate"]` of the mesh whose `mesh["shard"]` was given to `fully_shard`.
        subgroup: This process's fast subgroup, such as the processes of its machine. If all are as large,
            what goes to the group is sent once for each, each process a part; see docs/machines.md.
        grad_scaler: The `GradScaler`, if there is one: the steps it skips on one process only must count
            as well. Its `step` is replaced on this object while the context lasts.

    Of a model in parts (FSDP2, native HSDP, tensor or expert parallel, a pipeline's stage) each process
    averages its own part, and no weights are gathered. A replica counts as one member. The state is of the
    whole model if `fully_shard` has cut it over a mesh of one dimension, else of each process's part.

    Cost: a copy of what is averaged (in fp32 of what has 16 bits), a second one during an averaging, and what
    `algorithm` and `outer` keep. An averaging first sends 136 bytes for each process, to compare step counts,
    and synchronises with the host three times.

    Attributes:
        sync: What averages the changes every `every_steps` steps: its plan, and switching the algorithm.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: No process group, or one this process is not in, or a DDP model that can't be driven, or
            a model whose parameters have no values yet, or are all frozen.
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
        averaged = AveragedModel(module, replica, ddp, buffers=streaming.average_buffers, make_outer=outer)
        optimizers = checked_optimizers(optimizer, averaged.tensors(), module, is_sharded=replica.is_sharded)
        group, within = averaged.transports(subgroup)
        if ddp is not None:
            check_ddp(ddp)
        self._engines = engines_of(averaged, schedule, algorithm, group, replica.shards, within)
        changes = ModelChanges(averaged, schedule, self._engines, optimizers)
        averaging_within = self._engines.subgroup if schedule.averages_within else None
        super().__init__(changes, StaticMembership(changes, averaging_within), grad_scaler)

    @torch.inference_mode(False)
    def __enter__(self) -> LocalSGD:
        """Start: all processes take the first one's model, unless a state was loaded. Collective."""
        model, engines, membership = self._model, self._engines, self._membership
        if model.entered:
            raise StepError(
                "this LocalSGD has been entered before; make a new one, and hand over what is remembered "
                "with load_state_dict(state_dict())"
            )
        self._check_copies()  # before models are made equal: copies are of each process's own
        averaged, group = model.tensors(), engines.main.transport
        # The models first: those of other shapes could not even be divided alike.
        membership.check_models(averaged, type(self).__name__)
        num_members = group.size // (1 if engines.subgroup is None else engines.subgroup.transport.size)
        model.divide(averaged, self._schedule, num_members, self._engine.algorithm)
        # All must know before the first message whether they start, which is collective, or go on.
        membership.agree_on_settings(self._loaded)
        if self._loaded is None:
            # Frozen parameters and integer buffers too: what is never averaged must be the same at the start.
            tensors = chain(self.module.parameters(), self.module.buffers())
            copy_from(group.rank == 0, map(local_tensor, tensors), group)
            for fragment in model.fragments:
                fragment.set_last()
        else:
            membership.resume(self._loaded)
        self._check_momentum(stacklevel=3)
        with ExitStack() as attached:
            # If the second refuses, the first is taken off.
            attached.enter_context(self._in_loop())
            if model.ddp is None:
                attached.enter_context(averaging_model(self, model.module, group))
                attached.enter_context(telling_of_ddp(model.module, group))
            else:
                ddp = model.ddp
                adapters = {"group": DDPAdapter(engines.gradients, ddp)}
                if engines.subgroup is not None:
                    adapters["subgroup"] = DDPAdapter(engines.subgroup, ddp)
                switch = switched(
                    ddp, lambda: adapters.get(self._schedule.gradients_in(self.steps)), taken_by="LocalSGD"
                )
                attached.callback(switch.free)
            self._attached = attached.pop_all()
        # Last: if anything above fails, the context may be entered again.
        model.enter(averaged)
        self._loaded, self._is_inside = None, True
        if model.ddp is not None:
            self._contributor.end_warmup()
        tell_start(self._engine, (), str(self))
        return self

    @torch.inference_mode(False)
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End: average what is left, unless an exception is under way, and take all hooks off."""
        try:
            # After an exception other processes may be anywhere: collectives would not match.
            if kind is None:
                self.average()
        finally:
            # After an average nothing is pending; after an exception no one waits for what is.
            self._membership.abandon()
            self._is_inside = False
            self._attached.close()

    def average(self) -> None:
        """Average over the group now, before an evaluation or a checkpoint, say. Collective.

        The schedule goes on as if it had not been called. With `outer`, this is an outer step. What is
        pending is applied first. A change that no step of `optimizer` has made, such as of weights that were
        loaded, is not averaged: it is taken over as it is if it is the same on all processes.

        Raises:
            StepError: Outside the context, or processes are at different steps, or a process's parameters
                are not finite, or have changed without a step, and not on all alike, or were loaded with
                steps pending, or the settings of `outer` differ; nothing was averaged.
            CommunicationError: A collective failed.
        """
        with self._collective("average()"):
            self._membership.average_all()

    # After each step.

    def _after_own_step(self) -> None:
        # Before all that the step sends: processes that shadow it are waiting for this message.
        notify_of_step(self)
        super()._after_own_step()

    def _average_if_due(self) -> None:
        if self._schedule.averages_within:
            with self._collective("a step"):
                self._membership.average_within()
        super()._average_if_due()
        if self._model.ddp is not None:  # whose gradients are averaged without a commit
            self._contributor.end_warmup()

    # Uneven inputs: see thinwire.join.

    def join_hook(self, **options: Any) -> JoinHook:
        """Return, for a join context, how this process shadows the others once it has no more input.

        Changes are divided by the members of the group, or (`divide_by_initial_world_size=False`) by the
        processes that had input since the last averaging. At the context's end what is left is averaged.

        Raises:
            StepError: The LocalSGD context is not entered.
            AttachError: The model is a DDP model, which averages its gradients itself, or a sharded one.
            ConfigError: By the contributors with a subgroup, fragments or a delay.
        """
        if not self._is_inside:
            raise StepError("enter LocalSGD before the join context: with local, thinwire.join(local): …")
        if self._model.ddp is not None:
            raise AttachError("a DDP model can't be joined through LocalSGD; pass LocalSGD the plain module")
        if self._model.replica.is_sharded:
            raise AttachError(
                "a sharded model can't be joined: FSDP2 needs all processes of a replica in every pass; give "
                "all processes as many batches"
            )
        by_contributors, schedule = not options.get("divide_by_initial_world_size", True), self._schedule
        if by_contributors and schedule.has_subgroup:
            raise ConfigError("with a subgroup, use divide_by_initial_world_size=True")
        if by_contributors and (schedule.streaming.fragments > 1 or schedule.streaming.delay_steps):
            raise ConfigError(
                "with fragments or delay_steps, use divide_by_initial_world_size=True: a change is on its "
                "way before it is known who contributes to it"
            )
        self._contributor.weigh_by = "contributors" if by_contributors else "members"
        return Shadow(self, lambda: self._after_step(is_own=False), lambda _: self.average())

    @property
    def join_device(self) -> torch.device:
        """The device of a join context's own messages.

        Raises:
            StepError: The LocalSGD context is not entered, or the model has other parameters than on entry.
        """
        self._check_inside("join_device")
        return self._contributor.device

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

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, the last average and what algorithm and outer optimizer remember. Collective.

        The same on every process. The model and the optimizer are the user's to save: between averagings
        they differ from process to process, so save them on each to resume to the bit; or call
        `average()` first and save one model. `torch.load(weights_only=True)` takes it. What is pending is
        waited for and saved as it came; it is applied when it is due, here and in the run that resumes.

        Cost: a copy of what is averaged and of the outer optimizer's state; see `GradientSync.state_dict`.

        Raises:
            StepError: It was not entered yet, or processes are at different steps.
            CommunicationError: A collective failed.
            AgreementError: The processes have made different steps, or have other algorithms.
        """
        model, pending, warmup = self._model, self._membership.pending, self._schedule.warmup
        if not model.entered:
            raise StepError("there is nothing to save before the context is entered: with local: …")
        # The memory of an algorithm is known when its step has ended.
        if pending is not None and not pending.is_done:
            with self._collective("state_dict()"):
                self._membership.settle()
        fragments, replica, sent_at = model.fragments, model.replica, self._contributor.sent_at
        means = {} if pending is None else pending.changes
        lasts = dict(chain.from_iterable(fragment.named(fragment.last).items() for fragment in fragments))
        # Several of these are collective: in one order on all processes, of the shards of a replica too.
        return packed_state(
            step=self.steps,
            sent_after=tuple(sent_at if fragment in means else fragment.sent_after for fragment in fragments),
            in_flight=tuple(
                (fragments.index(fragment), replica.whole(fragment.named(flats)))
                for fragment, flats in means.items()
            ),
            last_average=replica.whole(lasts),
            sync=self.sync.state_dict(),
            outer=None if model.outer is None else saved_outer(model.outer, fragments.lasts, replica),
            # Its last step is exact, and sends what was kept before. After it nothing of it is needed.
            warmup=self._engines.gradients.state_dict()
            if warmup.algorithm is not None and self.steps < warmup.steps
            else None,
        )

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved by `state_dict`; before entering, with the same state on every process.

        Load the model and the optimizer as well: with a state, entering leaves the model alone. The number of
        fragments may be different, unless an average was pending. The outer optimizer goes on with the
        learning rate and momentum of the state, whatever is given here or would be chosen, as torch's
        optimizers do: to change them, write to `outer.param_groups` after entering.

        Raises:
            StateError: It is not such a state, or it is of a different model.
            StepError: The context was entered already.
        """
        if self._model.entered:
            raise StepError("load the state before the context is entered")
        replica, num_fragments = self._model.replica, self._schedule.streaming.fragments
        shapes = [
            {tensor.name: replica.shape_of(tensor.name, tensor.value) for tensor in part}
            for part in fragments_of(self._model.tensors(), num_fragments)
        ]
        has_outer, has_warmup = self._model.make_outer is not None, bool(self._schedule.warmup.algorithm)
        # A copy: it is used on entry, and the caller's own may have changed by then.
        loaded = checked_state(copy.deepcopy(state), shapes, has_outer=has_outer, has_warmup=has_warmup)
        loaded = loaded._replace(
            last_average=replica.own(loaded.last_average),
            pending=[(number, replica.own(means)) for number, means in loaded.pending],
        )
        warm_engine = self._engines.gradients
        warmup = None if loaded.warmup is None else warm_engine.check_state_dict(loaded.warmup)
        # First what may refuse: then nothing else has changed.
        self.sync.load_state_dict(loaded.sync)
        if warmup is not None:
            warm_engine.load(warmup)
        self._loaded = loaded
        self._contributor.steps = loaded.step


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    `LocalSGD` with other defaults: see there what is averaged, when, and what is refused. The outer optimizer
    is SGD with Nesterov's momentum on the last averaged parameters; changes travel in four bits a number.
    With `streaming` it is Streaming DiLoCo: the model is averaged in parts, while training goes on. With Muon
    inside, and AdamW for what is no matrix, it is MuLoCo: `DiLoCo(model, [muon, adamw])`. Arguments, cost and
    errors are those of `LocalSGD`; a subgroup counts as one member.

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
