"""`elastic.Steps`: gradients averaged at every step, with whoever is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from thinwire.algorithms import Algorithm, all_finite
from thinwire.checks import number
from thinwire.errors import LeftError, StepError
from thinwire.localsgd.fragment import Averaged, Buckets
from thinwire.localsgd.member import Member, MemberFront
from thinwire.localsgd.members.front import Prepared
from thinwire.localsgd.members.group import Group
from thinwire.sync.step import Step


class Steps(Member):
    """Average the gradients of every step with whoever is there, and take the optimizer's step.

    What `thinwire.attach` does for a DDP model, on a group whose members change. `step()` stands in the
    place of `optimizer.step()`. If a member is lost meanwhile, the averaging is done again among those who
    are left, with the same gradients, and then all take the same step: parameters and optimizer are the same
    on all members to the bit, after each. A member that joins receives model, optimizer and counters, and
    then takes the step of the others with them. Residuals, leaving, and members that vanish: as
    `elastic.DiLoCo`.

    Each step asks the lighthouse who is there, which takes milliseconds near it, and a round trip more over
    the slow link than `thinwire.attach` needs; all is sent after the backward pass. Where that is too much,
    `elastic.DiLoCo` asks every so many steps.

    Args:
        model: A module; not a DDP model, whose group can't change. Buffers are not averaged.
        optimizer: Trains the whole model; or several that do together, which step in this order. A schedule
            of a learning rate should go by `steps`: a member that joins takes over the optimizers' settings,
            and not the scheduler's count. Without a `GradScaler`, which would let some members skip a step.
        algorithm: How the gradients become their mean over the group.
        group: Who is there; None for `TorchftGroup()`.

    Cost: a copy of the gradients; what the algorithm sends; a quorum, 88 bytes from each member before it and
    8 bytes behind it. When members change, as of `elastic.LocalSGD`.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: A DDP or a sharded model, or one that is all frozen.
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
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        *,
        group: Group | None = None,
    ) -> None:
        # All of the optimizers step here, for a member that joins does so on entry, before its loop.
        super().__init__(
            model, optimizer, algorithm, group, _Front(self), average_buffers=False, send_optimizer=True
        )
        self._buckets = Buckets(self._averaged.tensors())
        self._work = 0.0  # that this member's gradients are of; 0 once they are applied

    def __str__(self) -> str:
        return f"elastic.Steps, {self.sync.algorithm}"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Leave. Swallows `LeftError`."""
        self._attached.close()
        return kind is not None and issubclass(kind, LeftError)

    def step(self, work: float = 1.0) -> None:
        """Average the gradients with whoever is there, and let the optimizer step. Collective.

        The gradients are the means afterwards. A parameter without one counts as zeros.

        Args:
            work: What this member's gradients weigh: such as the tokens that their mean is over. 0 to add
                nothing to the step of the others, of whom one at least must weigh something.

        Raises:
            StepError: Outside the context; or this member's gradients are not finite, and it has left; or
                those of all members weigh 0, and no step was taken.
            LeftError: This member has left, after this step, as it was asked to; the context swallows it.
            CommunicationError: No averaging has succeeded in the group's `wait_seconds`.
            ConfigError: `work` is not a number, or negative.
        """
        self._check_inside("step()")
        self._work = float(number("work", work, minimum=0))
        self._average()
        for observer in tuple(self.observers):  # a copy: one may leave while it is called
            observer(True)

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients by bucket, flat; zeros where there is none."""
        # Copies: an averaging that fails is repeated with the same gradients.
        flats = self._buckets.empty()
        for each, part in self._parts(flats):
            part.zero_() if each.tensor.grad is None else part.copy_(each.tensor.grad)
        return flats

    def _parts(self, flats: Sequence[torch.Tensor]) -> Iterator[tuple[Averaged, torch.Tensor]]:
        """Yield each parameter with its part of what is flat, of its own type."""
        for each, part in self._buckets.parts(flats):
            yield each, torch.view_as_complex(part) if each.tensor.is_complex() else part


class _Front(MemberFront):
    """What `Membership` sees of `Steps`."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps, "a step")
        self._steps = steps
        self._flats: list[torch.Tensor] = []  # the gradients as last looked at, until they are sent

    def weight(self, turns_ahead: int = 0) -> float:
        """As `Front.weight`."""
        return 0.0 if turns_ahead else self._steps._work

    def is_finite(self, turns_ahead: int = 0) -> bool:
        """As `Front.is_finite`."""
        self._flats = self._steps._gradients()
        return bool(all_finite(*self._flats))

    def held(self) -> dict[str, torch.Tensor]:
        """As `MemberFront.held`."""
        return {each.name: each.tensor.detach() for each in self._steps._buckets}

    def adopted(self) -> None:
        """As `MemberFront.adopted`."""
        self._flats, self._steps._work = [], 0.0

    def prepare(self, scale: float) -> Prepared:
        """As `Front.prepare`."""
        steps = self._steps
        engine, flats = steps._engine, self._flats or steps._gradients()
        self._flats = []
        for flat in flats:
            flat.mul_(scale)
        engine.agree(steps._device)
        buckets = zip(steps._buckets.layout, flats, strict=True)
        step = engine.start(buckets, pipelined=True, is_agreed=True)
        with engine.clock.inside(engine.traffic):
            while step.advance():
                pass
        return Prepared(lambda: self._commit(step, flats), step.abandon)

    def _commit(self, step: Step, flats: list[torch.Tensor]) -> None:
        committed = step.finish()
        # An algorithm without memory commits whatever has come: nobody has looked at its means.
        if not committed or not all_finite(*flats):
            raise StepError(
                "the mean gradient is not finite though that of each member is: it has left the range of the "
                "type it travels in, on all members alike, and no step was taken. Average in another one"
            )
        for each, mean in self._steps._parts(flats):
            each.tensor.grad = mean

    def committed(self, step: int, *, was_averaged: bool, has_newcomers: bool) -> None:
        """As `Front.committed`."""
        steps = self._steps
        self._flats = []
        if not was_averaged:
            # Not while this member joins, and not for a newcomer's sake: next time it puts something in.
            if steps._is_inside and not has_newcomers:
                raise StepError(
                    "no member's gradients weigh anything: step(work=0) on all of them, so there is no mean, "
                    "and no step was taken; give the work that they are of, or leave the step out on all"
                )
            return
        # Here and not in `step()`: who joins, or learns late that a step was committed, takes it as well.
        for optimizer in steps._optimizers:
            optimizer.step()
        steps._work = 0.0
        steps._steps = step + 1
        steps._steps_here += 1
