"""`elastic.LocalSGD`: what users enter around a training loop whose other members may come and go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from thinwire.algorithms import Algorithm, AllReduce
from thinwire.channel import Description
from thinwire.checks import checked_scaler, number, true_or_false
from thinwire.elastic.group import Group
from thinwire.elastic.member import (
    Member,
    check_like,
    check_received,
    checked_optimizers,
    group_of_environment,
    load_optimizers,
    plain_module,
)
from thinwire.errors import ConfigError, LeftError, StepError
from thinwire.fronts.local_sgd.division import fragments_of
from thinwire.fronts.local_sgd.flight import Flight, are_finite
from thinwire.fronts.local_sgd.fragment import Buckets, Fragment, Fragments
from thinwire.fronts.local_sgd.loop import after_each_step
from thinwire.fronts.local_sgd.model import AveragedModel
from thinwire.fronts.local_sgd.outer import Outer, check_outer, described_outer, new_outer, warn_of_momentum
from thinwire.fronts.local_sgd.schedule import Schedule
from thinwire.fronts.local_sgd.validation import checked_device
from thinwire.sync import Engine
from thinwire.sync.checksum import with_checksum

EXACT = AllReduce()
STATE_VERSION = 3
KEYS = {
    "version", "lineage", "step", "turns", "last_average", "not_averaged", "sync", "residual_of", "outer",
    "optimizers", "checksum",
}  # fmt: skip


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
        outer: As of `thinwire.LocalSGD`.
        average_buffers: Whether to average floating buffers that the model saves.
        grad_scaler: The `GradScaler`, if there is one.
        fragments: Into how many parts the model is divided, averaged in turn.
        outer_device: Where the last averages and the outer optimizer's state are kept.
        weigh_by: What a member's change weighs: "steps" that it made, or "work", as given to `count_work`.
        send_optimizer: Whether a member that joins gets the state and settings of all of `optimizer` as one
            of the others has them; then these must hold every trainable parameter. Else it starts with its
            own.
        leave_on_sigterm: Whether SIGTERM lets this member leave, after its next averaging. Only on the main
            thread.
        delay_steps: 0; of `thinwire.LocalSGD` only, and so is `warmup_steps`: an averaging can be repeated
            without the member that was lost as long as nobody has gone on from it.
        warmup_steps: 0.

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
        average_buffers: bool = True,
        grad_scaler: GradScaler | None = None,
        fragments: int = 1,
        outer_device: torch.device | str | None = None,
        weigh_by: Literal["steps", "work"] = "steps",
        send_optimizer: bool = True,
        leave_on_sigterm: bool = True,
        delay_steps: int = 0,
        warmup_steps: int = 0,
    ) -> None:
        _check_meets_at_once(delay_steps, warmup_steps)
        self._schedule = Schedule(every_steps, num_fragments=fragments)
        check_outer(outer)
        if weigh_by not in ("steps", "work"):
            raise ConfigError(f'weigh_by must be "steps" or "work", got {weigh_by!r}')
        module = plain_module(model)
        buffers = true_or_false("average_buffers", average_buffers)
        averaged_model = AveragedModel(module, buffers=buffers)
        self._outer_device = checked_device(outer_device)
        self._grad_scaler = checked_scaler(grad_scaler)
        true_or_false("leave_on_sigterm", leave_on_sigterm)

        averaged = averaged_model.tensors()
        self._weigh_by, self._sends_optimizer = weigh_by, true_or_false("send_optimizer", send_optimizer)
        # Of several whose state each keeps, the one that steps last is enough to count steps.
        self._optimizers = checked_optimizers(
            optimizer, averaged, module, must_hold_all=self._sends_optimizer
        )
        self._make_outer = outer
        parts = [Buckets(part).layout for part in fragments_of(averaged, self._schedule.num_fragments)]
        group = group_of_environment() if group is None else group
        engine = Engine(algorithm, group.transport, [each.spec for each in averaged], parts=parts)
        super().__init__(averaged_model, engine, group, _Front(self), leave_on_sigterm=leave_on_sigterm)
        self._fragments = Fragments()
        self._outer: torch.optim.Optimizer | None = None
        self._turns = self._pending_steps = 0
        self._work: list[float] = []  # of this member since each fragment's last averaging

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimizer, from entry on."""
        return self._outer

    def __str__(self) -> str:
        schedule = self._schedule
        fragments = f", fragments={schedule.num_fragments}" if schedule.num_fragments > 1 else ""
        settings = f"every_steps={schedule.every_steps}{fragments}"
        return f"elastic.{type(self).__name__}({settings}), {self.sync.algorithm}"

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

    def __enter__(self) -> LocalSGD:
        """Join: wait until the others, and enough of them, are there, and start from what they hold.

        Raises:
            StepError: It was entered before.
            ConfigError: `outer` does not make an optimizer of the tensors it is given.
            AgreementError: This member is configured otherwise than the others; they go on.
            StateError: What the others have sent is damaged, or does not fit; or the optimizer that members
                have in common has settings or state that can't be sent.
            CommunicationError: Nobody, or too few, came in `wait_seconds`.
        """
        if self._fragments:
            raise StepError("this context has been entered before; make a new one")
        averaged = self._averaged.tensors()
        parts = fragments_of(averaged, self._schedule.num_fragments)
        self._fragments = Fragments(Fragment(part, self._outer_device) for part in parts)
        for fragment in self._fragments:
            fragment.take()
        self._work = [0.0] * len(self._fragments)
        self._outer = new_outer(self._make_outer, self._fragments.outer_parameters(averaged))
        warn_of_momentum(self._outer, self._engine.algorithm, stacklevel=2)
        with ExitStack() as attached:
            attached.enter_context(self._joined())
            counted = self._optimizers[-1]
            attached.enter_context(after_each_step(counted, self._grad_scaler, self._after_own_step))
            self._attached = attached.pop_all()
        return self

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

    def _outer_lr_for(self, num_members: int) -> float | None:
        """Return the outer learning rate for so many members; None to leave it alone."""
        return None

    @property
    def _sent_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return self._optimizers if self._sends_optimizer else ()

    @property
    def _due(self) -> int:
        return self._turns % self._schedule.num_fragments

    def _check_inside(self, call: str) -> None:
        super()._check_inside(call)
        self._fragments.check_own(call)


class _Flying:
    """A flight whose messages have all come; its fragments move when it commits."""

    def __init__(self, flight: Flight, outer: torch.optim.Optimizer | None, outer_lr: float | None) -> None:
        self._flight, self._outer, self._outer_lr = flight, outer, outer_lr

    def commit(self) -> None:
        """As `Prepared.commit`."""
        # What can raise comes first: where a mean is not finite, nothing has moved.
        self._flight.land()
        if self._outer is not None and self._outer_lr is not None:
            for group in self._outer.param_groups:
                group["lr"] = self._outer_lr
        for fragment, means in self._flight.changes.items():
            fragment.move(means, self._outer)

    def abandon(self) -> None:
        """As `Prepared.abandon`."""
        self._flight.abandon()


class _Front:
    """What `Membership` sees of a `LocalSGD`."""

    def __init__(self, local: LocalSGD) -> None:
        self._local = local
        self._changes: dict[Fragment, list[torch.Tensor]] = {}  # as last looked at, until they are sent

    @property
    def step(self) -> int:
        """As `Front.step`."""
        return self._local._steps

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
            **local._engine.described("an averaging", local._device),
            "torch": torch.__version__.partition("+")[0],
            "group": local._group.kind,
            "kind": type(local).__name__,
            "every_steps": str(local._schedule.every_steps),
            "fragments": str(local._schedule.num_fragments),
            "average_buffers": str(local._averaged.buffers),
            "weigh_by": local._weigh_by,
            "optimizer": ", ".join(type(each).__name__ for each in local._optimizers)
            if local._sends_optimizer
            else "each its own",
            "outer optimizer": described_outer(local._outer),
        }

    def state(self) -> Mapping[str, Any]:
        """As `Front.state`."""
        local = self._local
        outer = local._outer
        return with_checksum(
            {
                "version": STATE_VERSION,
                "lineage": local._membership.lineage,
                # As of the last average, which is what a newcomer gets: later steps are in no model but this
                # one's.
                "step": local._steps - local._pending_steps,
                "turns": local._turns,
                "last_average": {each.name: last for each, last in local._fragments.lasts},
                "not_averaged": local._not_averaged(),
                "sync": local._engine.common_state(),
                "residual_of": local._residual_of(),
                "outer": None if outer is None else outer.state_dict(),
                "optimizers": [each.state_dict() for each in local._sent_optimizers],
            }
        )

    def adopt(self, state: Mapping[str, Any]) -> None:
        """As `Front.adopt`."""
        local = self._local
        self._changes = {}
        check_received(state, KEYS, STATE_VERSION)
        lasts = {each.name: last for each, last in local._fragments.lasts}
        others = local._not_averaged()
        check_like("last_average", state["last_average"], lasts)
        check_like("not_averaged", state["not_averaged"], others)
        loaded = local._engine.check_state_dict(state["sync"])
        outers = [] if local._outer is None else [local._outer]
        sent = [*[state["outer"]] * len(outers), *state["optimizers"]]
        load_optimizers([*outers, *local._sent_optimizers], sent)
        local._load(loaded, state["residual_of"])
        for fragment in local._fragments:
            fragment.take(state["last_average"])
        for each, last in local._fragments.lasts:
            each.value.copy_(last)
        for name, tensor in others.items():
            tensor.copy_(state["not_averaged"][name])
        local._steps, local._turns = int(state["step"]), int(state["turns"])
        local._pending_steps = 0
        local._work = [0.0] * len(local._fragments)

    def prepare(self, scale: float) -> _Flying:
        """As `Front.prepare`."""
        local = self._local
        fragment = local._fragments[local._due]
        changes = self._changes.pop(fragment, None) or fragment.changes()
        # Before it is sent: scaled afterwards, the residual would be in another unit than the next change.
        for flat in changes:
            flat.mul_(scale)
        flight = Flight({fragment: changes}, local._engine)
        with local._engine.clock.inside(local._engine.traffic):
            while flight.advance():
                pass
        return _Flying(flight, local._outer, local._outer_lr_for(local._group.transport.size))

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


def _check_meets_at_once(delay_steps: object, warmup_steps: object) -> None:
    """Refuse averagings that members go on from before they know that all have them, and a warm-up.

    Raises:
        ConfigError: They are not 0.
    """
    if delay_steps != 0:
        raise ConfigError(
            f"delay_steps must be 0 where members come and go, got {delay_steps!r}: an averaging in which a "
            "member is lost is repeated with what the others have learnt until then, so they wait for its "
            "end; take a larger every_steps, or fragments, to send less at a time"
        )
    if warmup_steps != 0:
        raise ConfigError(
            f"warmup_steps must be 0 where members come and go, got {warmup_steps!r}: members that join "
            "later would skip it; train on one machine first, and start members from what it has saved"
        )
