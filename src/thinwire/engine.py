"""Engine: an algorithm, its memory and a channel, as fronts drive them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from thinwire.algorithms import Algorithm, Bucket, Memory
from thinwire.arithmetic import exact_arithmetic
from thinwire.channel import Channel
from thinwire.checks import true_or_false
from thinwire.clock import StepClock
from thinwire.errors import ConfigError, NonfiniteError, StateError, StepError
from thinwire.exchange import Exchange
from thinwire.factors import fit_factors, forget_stale_factors
from thinwire.loss_scale import LossScale
from thinwire.missed import Missed, missed
from thinwire.nonfinite import OnNonfinite, checked_on_nonfinite
from thinwire.plan import ParameterSpec, Plan
from thinwire.state import (
    LoadedState,
    check_model,
    checked_state,
    fitting,
    laid_out,
    packed_state,
    warn_of_cuts,
)
from thinwire.stats import Stats
from thinwire.told import told_of
from thinwire.unused import keep_owed, used_flags

__all__ = ["Engine", "drained"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Engine:
    """Averages gradients over a group: an algorithm, its memory, and the channel they use.

    A front starts and finishes its steps; the user's `GradientSync` stands before it.

    Args:
        algorithm: How gradients become their mean.
        channel: Over which group.
        specs: The model's parameters; may be left out where they become known bucket by bucket.
        loss_scale: Tells, for a device, what the loss is multiplied by; None if it is not.
        may_be_unused: Whether a step may leave parameters out on all processes, whose gradients are
            then not applied. If it may and error is owed, each step finds out which.
        host_check: Whether the host learns in each step if all means were finite; see `attach`.
        on_nonfinite: What becomes of a step where they are not; see `attach`.

    Attributes:
        observers: Are called after every step, with whether it was committed; see `thinwire.Watch`.
        clock: Where the time of steps went.

    Raises:
        ConfigError: `algorithm` is not an algorithm; or `may_be_unused` or `on_nonfinite="raise"` is given
            without `host_check`.
        GradientError: A parameter's gradient can't be averaged by it.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        channel: Channel,
        specs: Iterable[ParameterSpec] = (),
        *,
        loss_scale: LossScale | None = None,
        may_be_unused: bool = False,
        host_check: bool = True,
        on_nonfinite: OnNonfinite = "nan",
    ) -> None:
        if may_be_unused and not true_or_false("host_check", host_check):
            raise ConfigError(
                "host_check=False does not go with find_unused_parameters=True: which parameters nobody used "
                "is the host's to find out; leave out one of them"
            )
        if checked_on_nonfinite(on_nonfinite) == "raise" and not host_check:
            raise ConfigError(
                'host_check=False does not go with on_nonfinite="raise": the host can\'t raise what it does '
                "not learn; leave out one of them"
            )
        self._may_be_unused = may_be_unused
        self._specs = {spec.name: spec for spec in specs}
        self._all_specs_known = bool(self._specs)
        self._algorithm = self._checked(algorithm)
        self._loss_scale = loss_scale
        self._on_nonfinite = on_nonfinite
        self._exchange = Exchange(
            channel, host_check=true_or_false("host_check", host_check), on_nonfinite=on_nonfinite
        )
        self._memory = Memory()
        self._loaded_error: dict[str, torch.Tensor] = {}
        self._unchecked: LoadedState | None = None
        self._loaded_checksum: str | None = None
        self._error_is_mean = True  # nothing is owed yet
        self._device = torch.device("cpu")
        self._told_missed: Missed | None = None
        self.observers: list[Callable[[bool], None]] = []
        self.clock = StepClock()
        self._started: list[Bucket] = []
        self._held: list[Bucket] = []
        self._layout: tuple[tuple[str, ...], ...] = ()  # of the next step, where results depend on it
        self._is_resumed = False  # there was no step since a state was loaded
        self._used: list[torch.Tensor] = []
        self._agreed: set[tuple[ParameterSpec, ...]] = set()
        self._last_buckets: list[tuple[ParameterSpec, ...]] = []
        self._nonfinite_steps = 0
        self._has_warned = False
        self._gradient_bytes = 0

    def __str__(self) -> str:
        """Some lines to read: the algorithm, the plan's compression ratio, and what was done. Cost: none."""
        channel, plan = self.channel, self.plan
        lines = [f"{self._algorithm} over {channel.size} processes, of which this is {channel.process_rank}"]
        if plan.routes:
            compressed = [name for r in plan.routes if r.matrix_rank is not None for name in r.names]
            lines.append(
                f"plan: {len(compressed)} of {len(self._specs)} parameters compressed, "
                f"{plan.gradient_bytes:,} bytes a step become {plan.message_bytes:,}: "
                f"compression ratio {plan.compression_ratio:.1f}"
            )
        return "\n".join([*lines, f"so far: {self.counts()}"])

    @property
    def channel(self) -> Channel:
        """As given; `thinwire.testing` puts another one in its place between steps."""
        return self._exchange.channel

    @channel.setter
    def channel(self, channel: Channel) -> None:
        self._exchange.channel = channel

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in use."""
        return self._algorithm

    def use(self, algorithm: Algorithm) -> None:
        """As `GradientSync.use`."""
        self._check_between_steps("use()")
        self._algorithm = self._checked(algorithm)
        self._agreed.clear()
        if self._last_buckets:  # before the first step it is not known what is stale
            forget_stale_factors(self._memory, self.plan)
            fit_factors(self._memory, self.plan)

    def _checked(self, algorithm: Algorithm) -> Algorithm:
        if not isinstance(algorithm, Algorithm):
            raise ConfigError(
                f"expected an algorithm such as thinwire.PowerSGD(matrix_rank=4), got {algorithm!r}"
            )
        specs = tuple(self._specs.values())
        if specs:
            algorithm.check_model(specs)
        return algorithm.starting(specs)

    @property
    def plan(self) -> Plan:
        """As of `GradientSync`."""
        order = {name: position for position, name in enumerate(self._specs)}
        buckets = self._last_buckets or [tuple(self._specs.values())]
        routes = [route for bucket in buckets for route in self._algorithm.plan(bucket).routes]
        return Plan(tuple(sorted(routes, key=lambda route: order[route.names[0]])))

    @property
    def buckets(self) -> tuple[tuple[ParameterSpec, ...], ...]:
        """Those of the last step; none before the first."""
        return tuple(self._last_buckets)

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """All parameters that are known, in the order of the model."""
        return tuple(self._specs.values())

    @property
    def steps(self) -> int:
        """Steps so far, those that were not finite included."""
        return self._memory.step + self._nonfinite_steps

    @property
    def num_started(self) -> int:
        """Parameters in the buckets that were started and are not finished yet."""
        return sum(len(bucket.specs) for bucket in self._started)

    def stats(self) -> Stats:
        """What has been done so far. Cost: one norm a compressed parameter and one host synchronisation."""
        relative_error, error_norm = self._missed()
        unseen_steps = self._unseen_nonfinite()
        if unseen_steps:
            self.warn_of_nonfinite()
        return replace(
            self.counts(),
            nonfinite_steps=self._nonfinite_steps + unseen_steps,
            relative_error=relative_error,
            error_norm=error_norm,
        )

    def counts(self) -> Stats:
        """`stats()` without what must be computed: no errors, nor the non-finite steps the host has not seen.

        Cost: none.
        """
        traffic = self.channel.traffic
        return Stats(
            steps=self.steps,
            nonfinite_steps=self._nonfinite_steps,
            messages=traffic.messages,
            message_bytes=traffic.message_bytes,
            gradient_bytes=self._gradient_bytes,
            waiting_seconds=traffic.waiting_seconds,
            arithmetic_seconds=self.clock.arithmetic_seconds,
            exposed_seconds=self.clock.exposed_seconds,
        )

    def _unseen_nonfinite(self) -> int:
        unseen = self._exchange.unseen_nonfinite
        return 0 if unseen is None else int(unseen)

    def _missed(self) -> Missed:
        return missed(self.plan, self._memory) or self._told_missed or Missed({}, {})

    def start(self, specs: tuple[ParameterSpec, ...], flat: torch.Tensor, *, is_agreed: bool = False) -> None:
        """A bucket's gradients are ready. Sends the first message and returns.

        Args:
            specs: The bucket's parameters.
            flat: Their gradients, shape (sum of elements,), averaged in place by `finish`.
            is_agreed: Whether all processes are known to have this very bucket, and have called `agree`.

        Raises:
            StepError: The bucket was started already: the last backward pass was interrupted.
            GradientError: A gradient of a kind that can't be averaged.
            AgreementError: The processes have other algorithms, parameters, buckets or loaded states.
            CommunicationError: The message could not be sent.
        """
        with self.clock.inside(self.channel.traffic):
            self._start(specs, flat, is_agreed=is_agreed)

    def _start(self, specs: tuple[ParameterSpec, ...], flat: torch.Tensor, *, is_agreed: bool) -> None:
        if any(bucket.specs == specs for bucket in [*self._started, *self._held]):
            self.abandon()
            raise StepError(
                f"the bucket of {specs[0].name} was started twice: the last backward pass did not finish on "
                "this process; restart all processes from a checkpoint"
            )
        with exact_arithmetic(flat.device):
            self._device = flat.device
            self._admit(specs, flat.device)
            if self._is_to_be_held(specs):
                self._held.append(Bucket(specs, flat))
            else:
                self._send(specs, flat, is_agreed=is_agreed)
        self._gradient_bytes += flat.numel() * flat.element_size()

    def _send(self, specs: tuple[ParameterSpec, ...], flat: torch.Tensor, *, is_agreed: bool = False) -> None:
        """Send a bucket's first message."""
        owes = bool(self._memory.error or self._loaded_error)
        if not is_agreed:
            self.agree(specs)
        bucket = Bucket(specs, flat, None if self._loss_scale is None else self._loss_scale(flat.device))
        used = [used_flags(bucket)] if self._may_be_unused and owes else []
        self._exchange.start(self._algorithm, bucket, self._memory, step=self.steps)
        self._used += used
        self._started.append(bucket)

    def _is_to_be_held(self, specs: tuple[ParameterSpec, ...]) -> bool:
        """Whether a step is to be made with other buckets than those that come, from this one on.

        DDP makes its buckets anew after the first step of a process. So that a run which resumes is the run
        that went on, the first step after a load has the buckets that the state tells, and the second step of
        a run those of the first: DDP's new ones are not yet known to a run that resumes there.
        """
        if not self._algorithm.sees_buckets or not (self._is_resumed or self.steps < 2):
            return False
        expected = self._layout[len(self._started) : len(self._started) + 1]
        return bool(self._layout) and (bool(self._held) or expected != _names_of([specs]))

    def _send_held(self) -> list[Bucket]:
        """Send what was held in the buckets it is to be sent in, or as it came if the parameters are others.

        Returns:
            The buckets that came, if their gradients were copied into others.
        """
        held, self._held = self._held, []
        came = {
            spec.name: gradient
            for bucket in held
            for spec, gradient in zip(bucket.specs, bucket.gradients(), strict=True)
        }
        planned = self._layout[len(self._started) :]
        fits = sorted(came) == sorted(name for names in planned for name in names) and all(
            len({(came[name].dtype, came[name].device) for name in names}) == 1 for names in planned
        )
        if not fits:
            for bucket in held:
                self._send(bucket.specs, bucket.flat)
            return []
        for names in planned:
            self._send(tuple(self._specs[name] for name in names), torch.cat([came[name] for name in names]))
        return held

    def agree(self, bucket: tuple[ParameterSpec, ...] = ()) -> None:
        """Collective, where this bucket is new since the start, `use` or `load_state_dict`.

        Args:
            bucket: What is about to be averaged together.

        Cost: where it is new, a gather of 32 bytes a process and a host synchronisation.

        Raises:
            AgreementError: The processes have other algorithms, parameters, buckets or loaded states.
            CommunicationError: The collective failed.
        """
        if bucket in self._agreed:
            return
        told = self._told("a step") | {"bucket": ", ".join(spec.name for spec in bucket)}
        start = time.perf_counter()
        self.channel.agree(told, f"step {self.steps}")
        self.channel.traffic.waiting_seconds += time.perf_counter() - start
        self._agreed.add(bucket)

    def _told(self, call: str) -> dict[str, str]:
        return told_of(
            call,
            self._algorithm,
            self._specs.values(),
            step=self._memory.step,
            nonfinite_steps=self._nonfinite_steps,
            loaded=self._loaded_checksum,
            error_is_mean=self._error_is_mean,
            knows_loss_scale=self._loss_scale is not None,
            may_be_unused=self._may_be_unused,
            host_check=self._exchange.host_check,
            on_nonfinite=self._on_nonfinite,
        )

    def finish(self) -> bool:
        """All buckets have been started. Blocks until every gradient is the mean.

        Returns:
            Whether the step was committed. False if a mean was not finite: memory is as it was, and all
            gradients are NaN, so that a `GradScaler` skips the step, or zeros (`on_nonfinite`). Without
            `host_check` it is not known: True.

        Raises:
            NonfiniteError: A mean was not finite, and `on_nonfinite` is "raise"; memory is as it was.
            StepError: No bucket was started.
            StateError: The loaded state turns out to be of another model.
            CommunicationError: A collective failed; memory is as it was.
        """
        buckets = [*self._started, *self._held]
        device = buckets[0].flat.device if buckets else torch.device("cpu")
        with exact_arithmetic(device):
            committed = drained(self.finishing())
        self.raise_unless(committed)
        return committed

    def raise_unless(self, committed: bool) -> None:
        """What `finish` does at the end; for simulated workers, when all of them are there.

        Raises:
            NonfiniteError: The step was not committed, and `on_nonfinite` is "raise".
        """
        if not committed and self._on_nonfinite == "raise":
            raise NonfiniteError(
                f"step {self.steps - 1}: the mean gradients are not finite; the error memory is as before, "
                "on all processes alike. Take no optimizer step; go on with the next batch, or end the run"
            )

    def warn_of_nonfinite(self) -> None:
        """For fronts whose gradients the user applies: say once what becomes of a step that was not finite.

        Not where the loss is known to be scaled: what scales it tries out how far it can go.
        """
        if self._has_warned or self._loss_scale is not None:
            return
        self._has_warned = True
        if self._on_nonfinite == "zero":
            logger.warning(
                "within %d steps, the mean gradients of one were not finite, and became zeros on all "
                "processes; the error memory stayed as it was. stats().nonfinite_steps counts such steps. "
                "This is not said again",
                self.steps,
            )
        else:
            logger.warning(
                "within %d steps, the mean gradients of one were not finite, and became NaN on all "
                "processes; the error memory stayed as it was. A GradScaler skips such a step; without one "
                "the optimizer makes the model NaN. If you use one, pass it as grad_scaler=; if not, choose "
                'on_nonfinite="zero" or "raise". This is not said again',
                self.steps,
            )

    def finishing(self) -> Generator[None, None, bool]:
        """`finish` for simulated workers: yields whenever messages are under way; see `lockstep`."""
        if not self._started and not self._held:
            raise StepError("finish() was called without start(): there are no gradients to average")
        with self.clock.inside(self.channel.traffic, are_ready=False):
            committed = yield from self._finishing()
        self.clock.end_step()
        for observer in tuple(self.observers):
            observer(committed)
        return committed

    def _finishing(self) -> Generator[None, None, bool]:
        self._check_loaded()
        came = [bucket.specs for bucket in [*self._started, *self._held]]
        copied = self._send_held()
        buckets, used = self._started, self._used
        self._started, self._used = [], []
        closing = keep_owed(buckets, used, self._memory) if used else None
        committed = yield from self._exchange.finish(closing)
        _copy_back(buckets, copied)
        if not (copied and self._is_resumed and self.steps >= 2):
            self._layout = _names_of(came)
        self._is_resumed = False
        self._told_missed = None
        if committed:
            self._memory.step += 1
            self._error_is_mean = False
        else:
            self._nonfinite_steps += 1
        self._note_layout([bucket.specs for bucket in buckets])
        if committed:
            yield from self._replan()
        return committed

    def _replan(self) -> Generator[None, None, None]:
        """Let the algorithm change its settings by what it measured, on all processes alike."""
        if not self._algorithm.replans_after(self._memory.step):
            return
        before, rounds = self.plan, self._algorithm.replanning(self._specs, self._memory)
        try:
            pending = self.channel.average(next(rounds), f"step {self.steps}, what the plan is made by")
            yield
            rounds.send(pending.wait())
        except StopIteration as end:
            self._algorithm = end.value
        if self.plan != before:
            self._agreed.clear()
            fit_factors(self._memory, self.plan)
            logger.info("step %d: a new plan\n%s", self.steps, self.plan)

    def _check_loaded(self) -> None:
        """At the first step after a load, once all parameters are known."""
        if self._unchecked is not None:
            try:
                check_model(self._unchecked, self._specs, by_position=True)
            except StateError:
                self.abandon()
                raise
            warn_of_cuts(self._unchecked, self.plan)
        self._unchecked = None

    def _note_layout(self, layout: list[tuple[ParameterSpec, ...]]) -> None:
        if layout != self._last_buckets:
            self._last_buckets = layout
            forget_stale_factors(self._memory, self.plan)

    @property
    def tells_nonfinite(self) -> bool:
        """Whether the host learns in each step if it was finite."""
        return self._exchange.host_check

    def abandon(self) -> None:
        """Forget a step that can't be finished. Memory is as it was before the step."""
        self._exchange.abandon()
        self._started, self._held, self._used = [], [], []

    def take_error(self, name: str) -> torch.Tensor | None:
        """What is owed on a parameter, which is the caller's from now on; None if nothing is.

        Returns:
            fp32 (fp64 of fp64 gradients), shape (elements,), in the parameter's order of memory, in units
            of the unscaled loss.
        """
        self._error_is_mean = False
        self._memory.sent.pop(name, None)
        return self._memory.error.pop(name, None)

    def owe(self, name: str, error: torch.Tensor) -> None:
        """From now on this is owed on a parameter; as from `take_error`."""
        self._error_is_mean = False
        self._memory.error[name] = error

    def _admit(self, specs: tuple[ParameterSpec, ...], device: torch.device) -> None:
        """Take note of a bucket's parameters, and lay out what was loaded for them."""
        if any(spec.name not in self._specs for spec in specs):
            self._algorithm.plan(specs)
            self._specs.update((spec.name, spec) for spec in specs)
        for spec in specs if self._loaded_error else ():
            if spec.name in self._loaded_error:
                self._memory.error[spec.name] = laid_out(self._loaded_error[spec.name], spec, device)
                del self._loaded_error[spec.name]

    def state_dict(self) -> dict[str, Any]:
        """As `GradientSync.state_dict`."""
        with exact_arithmetic(torch.device("cpu")):
            return drained(self.saving())

    def saving(self) -> Generator[None, None, dict[str, Any]]:
        """`state_dict` for simulated workers: yields while messages are under way; see `lockstep`."""
        self._check_between_steps("state_dict()")
        purpose = f"state_dict() after {self.steps} steps"
        self.channel.agree(self._told("state_dict()"), purpose)
        self._told_missed = self._missed()
        self._memory.sent.clear()
        if not self._error_is_mean:
            yield from self._average_error(purpose)
            self._error_is_mean = True
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        if self._unchecked is not None:
            shapes = self._unchecked.shapes | shapes
        unclaimed = self._loaded_error
        return packed_state(
            self._algorithm,
            self._memory,
            self._specs,
            shapes,
            unclaimed,
            skipped_steps=self._nonfinite_steps,
            buckets=self._layout if self._algorithm.sees_buckets else (),
        )

    def _average_error(self, purpose: str) -> Generator[None, None, None]:
        """Replace the error by its mean. A process may owe nothing on a parameter where others do."""
        error, specs = self._memory.error, sorted(self._specs.values())
        if not specs:
            return
        owes = torch.tensor([float(spec.name in error) for spec in specs], device=self._device)
        shares = self.channel.average(owes, f"{purpose}, who owes", is_gradient=False)
        yield
        owed = [spec for spec, share in zip(specs, shares.wait().tolist(), strict=True) if share > 0]
        pending = {}
        for spec in owed:
            own = error.get(spec.name)
            message = (
                torch.zeros(spec.numel, dtype=spec.memory_dtype, device=self._device)
                if own is None
                else own.clone()
            )
            pending[spec.name] = self.channel.average(message, f"{purpose}, {spec.name}", is_gradient=False)
        yield
        means = {name: each.wait() for name, each in pending.items()}
        for name, mean in means.items():
            error[name] = error[name].copy_(mean) if name in error else mean

    def _check_between_steps(self, call: str) -> None:
        if self._started or self._held:
            raise StepError(
                f"{call} was called during a backward pass; call it between steps. If an exception has ended "
                "the pass on all processes, call abandon() first"
            )

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """As `GradientSync.load_state_dict`."""
        loaded = self.check_state_dict(state, strict=strict)
        if self._all_specs_known:
            loaded = fitting(loaded, self._specs)
        self._algorithm = self._algorithm.resumed(loaded.factor, self._specs)
        if self._all_specs_known:
            warn_of_cuts(loaded, self.plan)
        self._unchecked = None if self._all_specs_known else loaded
        self._loaded_checksum, self._error_is_mean = loaded.checksum, True
        self._agreed.clear()
        self._memory = Memory(step=loaded.step, factor=loaded.factor)
        self._loaded_error, self._nonfinite_steps = loaded.error, loaded.skipped_steps
        self._layout, self._is_resumed = loaded.buckets, True
        self._told_missed = None
        self._exchange.unseen_nonfinite = None

    def check_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> LoadedState:
        """What `load_state_dict` would load; raises as it does, and changes nothing."""
        self._check_between_steps("load_state_dict()")
        return checked_state(state, self._specs if self._all_specs_known else None, strict=strict)


def _names_of(buckets: Iterable[tuple[ParameterSpec, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(spec.name for spec in bucket) for bucket in buckets)


def _copy_back(sent: Iterable[Bucket], came: Sequence[Bucket]) -> None:
    """Copy means to the buckets that their gradients came in."""
    means = {
        spec.name: mean
        for bucket in (sent if came else ())
        for spec, mean in zip(bucket.specs, bucket.gradients(), strict=True)
    }
    for bucket in came:
        for spec, gradient in zip(bucket.specs, bucket.gradients(), strict=True):
            gradient.copy_(means[spec.name])


def drained(generator: Generator[None, None, Result]) -> Result:
    """Run a generator to its end; its value."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return cast(Result, end.value)
