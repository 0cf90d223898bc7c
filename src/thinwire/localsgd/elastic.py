"""`elastic.LocalSGD`: what users enter around a training loop whose other members may come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm, AllReduce, Quantize
from thinwire.channel import Description
from thinwire.checks import checked_scaler, number, true_or_false
from thinwire.errors import ConfigError, LeftError, StepError
from thinwire.localsgd.flight import Flight, are_finite
from thinwire.localsgd.fragment import Fragment, Fragments, fragments_of
from thinwire.localsgd.loop import after_each_step
from thinwire.localsgd.member import Member, MemberFront
from thinwire.localsgd.members.front import Prepared
from thinwire.localsgd.members.group import Group
from thinwire.localsgd.outer import (
    Outer,
    check_outer,
    described_outer,
    device_of,
    new_outer,
    warn_of_momentum,
)
from thinwire.localsgd.schedule import WHOLE, Schedule
from thinwire.localsgd.settings import Nesterov, Streaming

EXACT = AllReduce()


class LocalSGD(Member):
    """Train each process on its own for some steps, then average with whoever is there.

    As `thinwire.LocalSGD`, on a group whose members change: see there what is averaged. A member that dies,
    stands still for too long or leaves is missing at the next averaging, and one in which it was missed is
    repeated by the others, at once and with all they have learnt since the last one. A member that joins, or
    comes back, waits on entry for the next averaging of the others; with it, it takes their model, outer
    optimizer and counters, and holds the same parameters to the bit; and the state of one member's
    optimizers inside, as of their last steps.

    Each member's change weighs as much as it has worked: `weigh_by`. What it has not transmitted (the
    residual) stays when others come or go. A member that leaves on purpose (SIGTERM, or `leave()`) hands it
    over at its last averaging, after which the context ends: `LeftError` is raised in the loop, from
    the optimizer's step, and swallowed at the end of the context. What a member that vanishes has not
    transmitted is lost, and `membership()` and a warning say how much.

    Write the loop by `local.steps`, which a member that joins takes over: `while local.steps < 1000: …`

    Args:
        model: A module; not a DDP model, whose group can't change.
        optimizer: Trains the model; or several that train it together (Muon and AdamW), in the order of their
            steps: the last one's are counted. Their state is never averaged.
        every_steps: Steps from one averaging of a parameter to the next.
        group: Who is there; None for `TorchftGroup()`.
        algorithm: How the changes become their mean over the group.
        outer: As of `thinwire.LocalSGD`. A `Nesterov` without a learning rate chooses one at every averaging
            by the number of members.
        streaming: As of `thinwire.LocalSGD`, without a delay: an averaging can be repeated without the member
            that was lost as long as nobody has gone on from it.
        grad_scaler: The `GradScaler`, if there is one.
        weigh_by: What a member's change weighs: "steps" that it made, or "work", as given to `count_work`.
        send_optimizer: Whether a member that joins gets the state and settings of all of `optimizer` as one
            of the others has them; then these must hold every trainable parameter. Else it starts with its
            own.

    Cost: as of `thinwire.LocalSGD`. Beyond that an averaging takes a quorum (a request to the lighthouse),
    88 bytes from each member before it and 8 bytes behind it. When members change, each sends some kilobytes,
    and a newcomer receives the model, the outer optimizer's state, what the algorithm remembers, and with
    `send_optimizer` the optimizers' state (of AdamW twice the model's bytes).

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model, or not all of it though
            its state is sent.
        AttachError: A DDP or a sharded model, or one that is all frozen.
        GradientError: A parameter can't be averaged by the algorithm.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        every_steps: int,
        group: Group | None = None,
        algorithm: Algorithm = EXACT,
        outer: Outer | None = None,
        streaming: Streaming = WHOLE,
        grad_scaler: GradScaler | None = None,
        weigh_by: Literal["steps", "work"] = "steps",
        send_optimizer: bool = True,
    ) -> None:
        self._schedule = Schedule(every_steps, streaming=streaming)
        if streaming.delay_steps:
            raise ConfigError(
                f"delay_steps must be 0 where members come and go, got {streaming.delay_steps}: an averaging "
                "in which a member is lost is repeated with what the others have learnt until then, so they "
                "wait for its end; take a larger every_steps, or fragments, to send less at a time"
            )
        check_outer(outer)
        if weigh_by not in ("steps", "work"):
            raise ConfigError(f'weigh_by must be "steps" or "work", got {weigh_by!r}')
        self._weigh_by, self._make_outer = weigh_by, outer
        self._grad_scaler = checked_scaler(grad_scaler)
        super().__init__(
            model,
            optimizer,
            algorithm,
            group,
            _Front(self),
            average_buffers=streaming.average_buffers,
            send_optimizer=true_or_false("send_optimizer", send_optimizer),
            fragments=streaming.fragments,
        )
        self._fragments = Fragments()
        self._work: list[float] = []  # of this member since each fragment's last averaging

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, from entry on."""
        return self._outer

    def __str__(self) -> str:
        return f"elastic.{type(self).__name__}({self._schedule}), {self.sync.algorithm}"

    def count_work(self, amount: float) -> None:
        """Add to what this member's change weighs in the next averaging, with `weigh_by="work"`.

        Args:
            amount: Of what this member has learnt from: tokens, say.

        Raises:
            ConfigError: It is not a number, or negative, or steps are what counts.
            StepError: Outside the context.
        """
        if self._weigh_by != "work":
            raise ConfigError('count_work() is for weigh_by="work"; here each step counts the same')
        self._check_inside("count_work()")
        added = float(number("amount", amount, minimum=0))
        self._work = [work + added for work in self._work]

    # The context.

    def _begin(self) -> None:
        averaged = self._averaged.tensors()
        parts = fragments_of(averaged, self._schedule.num_fragments)
        self._fragments = Fragments(Fragment(part, device_of(self._make_outer)) for part in parts)
        for fragment in self._fragments:
            fragment.take()
        self._work = [0.0] * len(self._fragments)
        # The learning rate that goes by the number of members is chosen at every averaging.
        parameters = self._fragments.outer_parameters(averaged)
        every_steps, algorithm = self._schedule.every_steps, self._engine.algorithm
        self._outer = new_outer(self._make_outer, parameters, 1, every_steps, algorithm)
        warn_of_momentum(self._outer, self._engine.algorithm, stacklevel=3)

    def _in_loop(self) -> AbstractContextManager[None]:
        return after_each_step(self._optimizers[-1], self._grad_scaler, self._after_own_step)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """End: average what is left, unless an exception is under way, and leave. Swallows `LeftError`."""
        with self._attached:
            # Inside: the end of this block leaves the group, and the last averaging must come before.
            if kind is None and self._pending_steps and not self.has_left:
                self.leave()
                with suppress(LeftError):
                    self._average()
        return kind is not None and issubclass(kind, LeftError) and self.has_left

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model hold the last averages, the same on all members, while this is open: to evaluate.

        Raises:
            StepError: Outside the context; or, from the optimizer's step, if one is taken inside.
        """
        self._check_inside("averaged()")
        with self._fragments.holding_average():
            yield

    # What happens after a step.

    def _after_own_step(self) -> None:
        self._check_inside("a step")
        self._steps += 1
        self._steps_here += 1
        self._pending_steps += 1
        if self._weigh_by == "steps":
            self._work = [work + 1 for work in self._work]
        # As many steps lie between two averagings as spread the fragments evenly.
        every_steps, num_fragments = self._schedule.every_steps, self._schedule.num_fragments
        ends = [-(-place * every_steps // num_fragments) for place in (self._due, self._due + 1)]
        if self._pending_steps >= ends[1] - ends[0]:
            self._average()
        for observer in tuple(self.observers):  # a copy: one may leave while it is called
            observer(True)

    @property
    def _due(self) -> int:
        return self._turns % self._schedule.num_fragments

    def _check_inside(self, call: str) -> None:
        super()._check_inside(call)
        self._fragments.check_own(call)


class DiLoCo(LocalSGD):
    """Train each process on its own for many steps, then take an outer step along the mean of their changes.

    `elastic.LocalSGD`, which it is, with the outer step and the defaults of `thinwire.DiLoCo`.

    Args:
        model: As of `elastic.LocalSGD`.
        optimizer: Trains the model; or several, as of `elastic.LocalSGD`.
        every_steps: Steps from one averaging of a parameter to the next.
        algorithm: How the changes become their mean over the group.
        outer: The outer step; as of `elastic.LocalSGD`.
        settings: All others, as of `elastic.LocalSGD`.

    Raises:
        ConfigError: An argument is wrong, or the optimizer does not train this model.
        AttachError: A DDP or a sharded model, or one that is all frozen.
        GradientError: A parameter can't be averaged by the algorithm.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        every_steps: int = 30,
        algorithm: Algorithm = Quantize(bits=4),  # noqa: B008
        outer: Outer | None = Nesterov(),  # noqa: B008
        **settings: Any,
    ) -> None:
        super().__init__(
            model, optimizer, every_steps=every_steps, algorithm=algorithm, outer=outer, **settings
        )


class _Front(MemberFront):
    """What `Membership` sees of a `LocalSGD`."""

    def __init__(self, local: LocalSGD) -> None:
        super().__init__(local, "an averaging")
        self._local = local
        self._changes: dict[Fragment, list[torch.Tensor]] = {}  # as last looked at, until they are sent

    def weight(self, turns_ahead: int = 0) -> float:
        """As `Front.weight`."""
        # Of one fragment the averaging in doubt has taken all that there was.
        is_taken = turns_ahead > 0 and len(self._local._fragments) == 1
        return 0.0 if is_taken else self._local._work[self._turn(turns_ahead)]

    def is_finite(self, turns_ahead: int = 0) -> bool:
        """As `Front.is_finite`."""
        fragment = self._local._fragments[self._turn(turns_ahead)]
        self._changes = {fragment: fragment.changes()}
        return are_finite(self._changes, None)

    def _turn(self, turns_ahead: int) -> int:
        return (self._local._turns + turns_ahead) % len(self._local._fragments)

    def described(self) -> Description:
        """As `Front.described`."""
        local = self._local
        return {
            **super().described(),
            "every_steps": str(local._schedule.every_steps),
            "streaming": str(local._schedule.streaming),
            "weigh_by": local._weigh_by,
            "outer optimizer": described_outer(local._outer),
        }

    def held(self) -> dict[str, torch.Tensor]:
        """As `MemberFront.held`."""
        return {each.name: last for each, last in self._local._fragments.lasts}

    def adopted(self) -> None:
        """As `MemberFront.adopted`."""
        self._changes = {}
        for each, last in self._local._fragments.lasts:
            each.value.copy_(last)
        self._local._work = [0.0] * len(self._local._fragments)

    def prepare(self, scale: float) -> Prepared:
        """As `Front.prepare`."""
        local = self._local
        fragment = local._fragments[local._due]
        changes = self._changes.pop(fragment, None) or fragment.changes()
        # Before it is sent: scaled afterwards, the residual would be in another unit than the next change.
        for flat in changes:
            flat.mul_(scale)
        flight = Flight({fragment: changes}, local._engine)
        with local._engine.clock.inside(local._engine.traffic):
            flight.send()
        num_members = local._group.transport.size
        return Prepared(lambda: self._commit(flight, num_members), flight.abandon)

    def _commit(self, flight: Flight, num_members: int) -> None:
        local = self._local
        # Whatever can raise comes first: if a mean is not finite, nothing has moved.
        flight.land()
        if local._outer is not None and isinstance(local._make_outer, Nesterov):
            for group in local._outer.param_groups:
                group["lr"] = local._make_outer.lr_for(num_members, local._engine.algorithm)
        for fragment, means in flight.changes.items():
            fragment.move(means, local._outer)

    def committed(self, step: int, *, was_averaged: bool, has_newcomers: bool) -> None:
        """As `Front.committed`."""
        local = self._local
        self._changes = {}
        if not was_averaged:
            # Not while this member joins, and not for a newcomer's sake: next time it puts something in.
            if local._pending_steps and not has_newcomers:
                raise StepError(
                    "no member has counted any work since the last averaging, so nothing was averaged: call "
                    "count_work() before optimizer.step()"
                )
            return
        local._work[local._due] = 0.0
        local._steps, local._pending_steps = step, 0
        local._turns += 1
