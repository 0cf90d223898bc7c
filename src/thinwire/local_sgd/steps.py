"""`elastic.Steps`: gradients averaged at every step, with all present members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.adapters.setup import trains
from thinwire.algorithms import Algorithm
from thinwire.checks import number
from thinwire.errors import ConfigError, LeftError, StepError
from thinwire.local_sgd.averaged_model import AveragedModel
from thinwire.local_sgd.elastic_contributor import ElasticContributor, Values
from thinwire.local_sgd.elastic_members import Member, prepare_member
from thinwire.local_sgd.elastic_membership import ElasticMembership
from thinwire.local_sgd.fragment import Averaged, Buckets
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.inner_optimizers import Optimizers, as_sharded, check_owned
from thinwire.local_sgd.pending_average import PendingAverage
from thinwire.sync import Engine, Settings
from thinwire.sync.precision import full_precision
from thinwire.tensors.layout import local_tensor
from thinwire.torch_private import closure_not_compiled, makes_state


class Steps(Member):
    """Average the gradients of every step with all present members, and take the optimizer's step.

    Does what `thinwire.attach` does for a DDP model, on a group whose members change; call `step()` in place
    of `optimizer.step()`. If a member is lost during a step, the others average the same gradients again and
    take the same step. After each step, parameters and optimizer are the same on all members to the bit. A
    member that joins receives model, optimizer and counters, and then takes the others' step with them.
    Residuals, leaving, and members that vanish are handled as in `elastic.DiLoCo`.

    Each step asks the lighthouse for a quorum, and needs one more round trip over the slow link than
    `thinwire.attach`; everything is sent after the backward pass. `elastic.DiLoCo` asks only every few steps.

    Args:
        model: A module. For a member of several processes, a DDP model or one in parts. Buffers are not
            averaged.
        optimizer: Trains the whole model; or several that do so together, which step in this order. Base a
            learning-rate schedule on `steps`: a member that joins receives the optimizers' settings, but not
            the scheduler's count. Do not use a `GradScaler`: some members might skip a step.
        algorithm: How the gradients become their mean over the group.
        group: Finds the members; None for `TorchftGroup()`.

    Cost: a copy of the gradients; what the algorithm sends; a quorum, 128 bytes from each member before it
    and 8 bytes after it. When members change, that of `elastic.LocalSGD`.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: The model is not on all processes of this member, or is all frozen.
        GradientError: The algorithm can't average a parameter.

    Examples:
        >>> from thinwire import PowerSGD, elastic
        >>> model = nn.Linear(64, 32)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> group = elastic.InProcessGroup(elastic.InProcessLighthouse())  # else elastic.TorchftGroup()
        >>> with elastic.Steps(model, optimizer, PowerSGD(matrix_rank=2), group=group) as steps:
        ...     while steps.steps < 3:
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 64)).sum().backward()
        ...         steps.step()
        >>> steps.membership().averagings
        3
    """

    _contributor: Gradients

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, algorithm: Algorithm, *, group: Group | None = None
    ) -> None:
        averaged_model, group = prepare_member(model, optimizer, group, buffers=False)
        # A joining member takes its first optimizer steps on entry, so it must receive the optimizers.
        if not group.send_optimizer:
            raise ConfigError("elastic.Steps needs a group with send_optimizer=True, got False")
        gradients = Gradients(averaged_model, algorithm, group)
        super().__init__(gradients, ElasticMembership(gradients, type(self).__name__))

    def __str__(self) -> str:
        return f"elastic.Steps, {self.sync.algorithm}"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Leave. Catches `LeftError`."""
        self._attached.close()
        return kind is not None and issubclass(kind, LeftError)

    def _watch_loop(self, attached: ExitStack) -> None:
        owned = set(map(id, self.module.parameters()))

        @closure_not_compiled
        def refuse(optimizer: torch.optim.Optimizer, _: object, options: Any) -> None:
            is_own = self._contributor.is_committing or makes_state(optimizer, options)
            if not is_own and trains(optimizer, owned):
                raise StepError(
                    f"{type(optimizer).__name__} was stepped by itself, so this member's model would differ "
                    "from the others'; call step() of elastic.Steps, which averages and steps"
                )

        attached.enter_context(register_optimizer_step_pre_hook(refuse))
        self._model.note_loads(attached)

    def step(self, work: float = 1.0) -> None:
        """Average the gradients with all present members, and take the optimizer's step. Collective.

        Afterwards the gradients are the means. A missing gradient counts as zeros.

        Args:
            work: The weight of this member's gradients, such as the number of tokens that their mean is over.
                0 contributes nothing; the members' weights must not all be 0.

        Raises:
            StepError: Outside the context; or this member's gradients are not finite, or its optimizer
                settings differ from the others', and it has left; or all members' weights are 0, and no step
                was taken.
            LeftError: This member has left, after this step, as requested; the context catches it.
            CommunicationError: No averaging has succeeded in the group's `wait_seconds`.
            ConfigError: `work` is not a number, or negative.
        """
        self._check_inside("step()")
        check_owned(self._optimizers, set(map(id, self.module.parameters())))
        self._model.check_loads()
        self._contributor.work = float(number("work", work, minimum=0))
        with self._observed(), full_precision(self._model.device):  # the step may run under autocast
            self._membership.average()


class Gradients(ElasticContributor):
    """Contributes a model's gradients, and steps its optimizers with their means."""

    def __init__(self, model: AveragedModel, algorithm: Algorithm, group: Group) -> None:
        self.model, self.group = model, group
        self.steps = self.averaged_steps = self.steps_here = 0
        tensors = model.tensors()
        self._buckets = Buckets(tensors)
        specs = [parameter.spec for parameter in tensors]
        self.engine = Engine(algorithm, group.transport, specs, Settings(health_group=model.replica.inside))
        self.work: float | None = None  # the gradients' weight; None once they are applied
        self.is_committing = False  # whether the optimizers step with the means

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients by bucket, flat; zeros for missing ones."""
        # Copies: an averaging that fails is repeated with the same gradients.
        flats = self._buckets.empty()
        for parameter, part in self._parts(flats):
            part.zero_() if parameter.tensor.grad is None else part.copy_(local_tensor(parameter.tensor.grad))
        return flats

    def _parts(self, flats: Sequence[torch.Tensor]) -> Iterator[tuple[Averaged, torch.Tensor]]:
        """Yield each parameter with its part of the flat tensors, in the parameter's dtype."""
        for parameter, part in self._buckets.parts(flats):
            yield parameter, torch.view_as_complex(part) if parameter.tensor.is_complex() else part

    def contribution(self) -> tuple[float, Values]:
        return self.work or 0.0, {self._buckets: self._gradients()}

    def start(self, known: Values, scale: float, step: int, *, is_last: bool) -> PendingAverage[Buckets]:
        flats = known[self._buckets] if known else self._gradients()
        for flat in flats:
            flat.mul_(scale)
        return PendingAverage({self._buckets: flats}, self.engine, subject="gradient")

    def commit_empty(self, *, may_be_empty: bool) -> None:
        if self.work is not None and not may_be_empty:
            raise StepError(
                "all members passed work=0, so the mean is undefined; no step was taken. Pass the work "
                "of the gradients, or skip the step on all members"
            )

    def commit(self, pending: PendingAverage[Buckets], step: int, num_members: int) -> None:
        for parameter, mean in self._parts(pending.changes[self._buckets]):
            parameter.tensor.grad = as_sharded(parameter.tensor, mean)
        # Step in `commit`: a member that joins, or learns late that a step was committed, must take it too.
        self.is_committing = True
        try:
            for optimizer in self.model.optimizers:
                optimizer.step()
        finally:
            self.is_committing = False
        self.work = None
        self.steps = self.averaged_steps = step + 1
        self.steps_here += 1

    def shared_tensors(self) -> dict[str, torch.Tensor]:
        return {parameter.name: parameter.value for parameter in self._buckets}

    def reset(self, step: int, turns: int) -> None:
        self.steps = self.averaged_steps = step
        self.work = None
