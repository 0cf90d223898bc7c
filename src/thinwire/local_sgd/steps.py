"""`elastic.Steps`: gradients averaged at every step, with all members that are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from thinwire.algorithms import Algorithm, all_finite
from thinwire.checks import number
from thinwire.errors import ConfigError, LeftError, StepError
from thinwire.local_sgd.fragment import Averaged, Buckets
from thinwire.local_sgd.groups.averageable import Part
from thinwire.local_sgd.groups.group import Group
from thinwire.local_sgd.member import Member
from thinwire.local_sgd.model import Optimizers, as_sharded
from thinwire.local_sgd.pending_average import PendingAverage
from thinwire.local_sgd.settings import Streaming
from thinwire.local_sgd.state import LoadedState
from thinwire.sync.state import digest_of
from thinwire.tensors.layout import local_tensor


class Steps(Member):
    """Average the gradients of every step with all who are there, and take the optimizer's step.

    What `thinwire.attach` does for a DDP model, on a group whose members change; call `step()` in place of
    `optimizer.step()`. If a member is lost meanwhile, the others average the same gradients again and take
    the same step: after each, parameters and optimizer are the same on all members to the bit. A member that
    joins receives model, optimizer and counters, and then takes the others' step with them. Residuals,
    leaving, and members that vanish: as `elastic.DiLoCo`.

    Each step asks the lighthouse who is there, and needs a round trip more over the slow link than
    `thinwire.attach`; all is sent after the backward pass. `elastic.DiLoCo` asks only every few steps.

    Args:
        model: A module; of a member of several processes a DDP model, or one in parts. Buffers are not
            averaged.
        optimizer: Trains the whole model; or several that do together, which step in this order. A schedule
            of a learning rate should go by `steps`: a member that joins takes over the optimizers' settings,
            and not the scheduler's count. Without a `GradScaler`, which would let some members skip a step.
        algorithm: How the gradients become their mean over the group.
        group: Who is there; None for `TorchftGroup()`.

    Cost: a copy of the gradients; what the algorithm sends; a quorum, 112 bytes from each member before it
    and 8 bytes after it. When members change, as of `elastic.LocalSGD`.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: A model that is not on all processes of this member, or is all frozen.
        GradientError: A parameter can't be averaged by the algorithm.

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

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, algorithm: Algorithm, *, group: Group | None = None
    ) -> None:
        super().__init__(model, optimizer, algorithm, group, Streaming(average_buffers=False))
        # All of the optimizers step here, for a member that joins does so on entry, before its loop.
        if not self._group.send_optimizer:
            raise ConfigError("elastic.Steps needs a group with send_optimizer=True, got False")
        self._buckets = Buckets(self._model.tensors())
        self._work = 0.0  # that this member's gradients are of; 0 once they are applied

    def __str__(self) -> str:
        return f"elastic.Steps, {self.sync.algorithm}"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Leave. Swallows `LeftError`."""
        self._attached.close()
        return kind is not None and issubclass(kind, LeftError)

    def _in_loop(self) -> AbstractContextManager[None]:
        # Looked at in `step`: the optimizers' own steps come when an averaging is committed.
        return self._model.loads.noted(self.module, (), lambda: digest_of(list(self._held().values())))

    def step(self, work: float = 1.0) -> None:
        """Average the gradients with all who are there, and let the optimizer step. Collective.

        The gradients are the means afterwards. A parameter without one counts as zeros.

        Args:
            work: What this member's gradients weigh: such as the tokens that their mean is over. 0 to add
                nothing to the step of the others, of whom one at least must weigh something.

        Raises:
            StepError: Outside the context; or this member's gradients are not finite, or its optimizers are
                set otherwise than the others', and it has left; or the gradients of all members weigh 0, and
                no step was taken.
            LeftError: This member has left, after this step, as it was asked to; the context swallows it.
            CommunicationError: No averaging has succeeded in the group's `wait_seconds`.
            ConfigError: `work` is not a number, or negative.
        """
        self._check_inside("step()")
        self._model.loads.check()
        self._work = float(number("work", work, minimum=0))
        self._transact(self._membership.average)
        self._tell_observers()

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients by bucket, flat; zeros for missing ones."""
        # Copies: an averaging that fails is repeated with the same gradients.
        flats = self._buckets.empty()
        for parameter, part in self._parts(flats):
            part.zero_() if parameter.tensor.grad is None else part.copy_(local_tensor(parameter.tensor.grad))
        return flats

    def _parts(self, flats: Sequence[torch.Tensor]) -> Iterator[tuple[Averaged, torch.Tensor]]:
        """Yield each parameter with its part of what is flat, in the parameter's type."""
        for parameter, part in self._buckets.parts(flats):
            yield parameter, torch.view_as_complex(part) if parameter.tensor.is_complex() else part

    # The members' view.

    def _part(self, turns_ahead: int = 0) -> Part:
        flats = self._gradients()
        return Part(0.0 if turns_ahead else self._work, bool(all_finite(*flats)), flats)

    def _held(self) -> dict[str, torch.Tensor]:
        return {parameter.name: parameter.value for parameter in self._buckets}

    def _start_from(self, loaded: LoadedState) -> None:
        super()._start_from(loaded)
        self._work = 0.0

    def _start(self, tensors: list[torch.Tensor] | None, scale: float, step: int) -> PendingAverage[Buckets]:
        flats = tensors or self._gradients()
        for flat in flats:
            flat.mul_(scale)
        return PendingAverage({self._buckets: flats}, self._engine, what="gradient")

    def _committed(
        self,
        pending_average: PendingAverage[Buckets] | None,
        step: int,
        num_members: int,
        *,
        may_be_empty: bool,
    ) -> None:
        if pending_average is None:
            # No mistake while this member, or a newcomer, joins: next time it puts something in.
            if self._is_inside and not may_be_empty:
                raise StepError(
                    "no member's gradients weigh anything: step(work=0) on all of them, so there is no mean, "
                    "and no step was taken; give the work that they are of, or leave the step out on all"
                )
            return
        for parameter, mean in self._parts(pending_average.changes[self._buckets]):
            parameter.tensor.grad = as_sharded(parameter.tensor, mean)
        # Here, for a member that joins, or learns late that a step was committed, takes it as well.
        for optimizer in self._optimizers:
            optimizer.step()
        self._work = 0.0
        self._steps = step + 1
        self._steps_here += 1
