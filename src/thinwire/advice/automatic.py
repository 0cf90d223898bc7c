"""`thinwire.auto`: the algorithm follows from the run's own first steps, and again when its link changes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from thinwire.adapters.attach import attach
from thinwire.advice.loss import Training, optimizer_name, optimizer_notes, unwrapped_optimizer
from thinwire.advice.result import Prediction, checked_budget, checked_gain, choose
from thinwire.advice.variants import BASELINE, EXACT, LOCAL_VARIANTS, expected_losses, priced
from thinwire.advice.words import losses_of, nearest, none_within
from thinwire.algorithms import AllReduce
from thinwire.checks import true_or_false, whole_count, whole_number
from thinwire.comm import CALL, agree, gather_numbers
from thinwire.errors import ConfigError
from thinwire.local_sgd.averaged_model import check_trains
from thinwire.sync import GradientSync, engine_of

logger = logging.getLogger(__name__)

# The first step with an algorithm compares the processes, and sends what the one before has left; DDP
# arranges its buckets again after its own first one.
UNTIMED_STEPS = 2
CHANGE = 0.2  # a step that takes longer or shorter by such a share is of a different link

# Seconds of a step, and how many of them were waited for messages: NaN if the host can't see it.
Reading = tuple[float, float]
Clock = Callable[[], Reading]
Course = Generator[None, Reading, Any]  # receives one committed step after the other
Log = Callable[[str], object]


def auto(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | str,
    *,
    total_steps: int | None = None,
    budget_loss: float = 0.01,
    least_gain: float = 0.05,
    probe_steps: int = 5,
    every_steps: int | None = 500,
    enabled: bool = True,
    log: Log | None = None,
    **settings: Any,
) -> Auto:
    """Attach to a DDP or FSDP2 model, and choose the algorithm by what the run's own steps take.

    Steps are timed with exact averaging, then with 16 bits, then with each algorithm that is expected to lose
    no more than the budget, unless the first two wait for messages at most `least_gain` of a step. The run
    goes on with the best by the rule of `thinwire.advise`, on all processes alike. If a step takes for sure a
    fifth more or less at a later look, or rougher messages no longer win, all are tried again; small messages
    hardly tell a fast link from a slow one, so such a look makes steps with 16 bits. All steps train the
    model, and what an algorithm has not sent yet, the next one sends.

    Call it on every process, in place of `attach`, and leave `sync.use` alone. A saved state is that of the
    algorithm in use; a run that resumes chooses again. The result's `sync` is the handle; printing the result
    tells the choice.

    Args:
        model: As of `attach`.
        optimizer: What trains the model, or its name: loss gaps depend on it. With one that was not measured
            with, the largest gap of those that were counts, and it is said.
        total_steps: Of the whole run. Few bits lose more in short ones, so of the runs that were measured
            only those count that were not longer; with None, the shortest. Lightning and the Trainer tell it.
        budget_loss: The largest expected gap to exact averaging's loss, as a share of it, at most 0.2; or
            `math.inf` for any, known or not. Gaps were measured with small models; yours may differ.
        least_gain: What an approximation must win over exact and 16-bit averaging, as a share of the step.
        probe_steps: Timed steps with each algorithm; two more come before them.
        every_steps: From one look at the link to the next; None for a single choice.
        enabled: False for exact averaging, as of `attach(model, AllReduce())`, with nothing chosen.
        log: Gets what was chosen and why, on the first process; None for the logger "thinwire", level INFO.
            If it raises, that is a warning in the log, and training goes on.
        settings: All else that `attach` takes.

    Cost: (2 + `probe_steps`) steps with each candidate, however slow, and as many with 16 bits at a look; a
    message of 32 bytes from each process after each trial and each look.

    Raises:
        ConfigError: An argument is out of range, or the optimizer is of a different model.
        AgreementError: The processes were given different arguments.
        ThinwireError: As of `attach`.
    """
    name, trainer = optimizer_name(optimizer), unwrapped_optimizer(optimizer)
    if total_steps is not None:
        total_steps = whole_count("total_steps", total_steps, minimum=1)
    rules = Rules(
        checked_budget(budget_loss),
        checked_gain(least_gain),
        whole_number("probe_steps", probe_steps, minimum=2),  # there are no quartiles of one
        None if every_steps is None else whole_count("every_steps", every_steps, minimum=2),
        true_or_false("enabled", enabled),
    )
    if log is not None and not callable(log):
        raise ConfigError(f"log must be a function that takes a text, such as print, or None, got {log!r}")
    # `attach` refuses what is no model.
    if isinstance(trainer, torch.optim.Optimizer) and isinstance(model, torch.nn.Module):
        check_trains(trainer, (parameter for parameter in model.parameters() if parameter.requires_grad))
    sync = attach(model, AllReduce(), **settings)
    engine = engine_of(sync)
    training = Training.of(model, name, engine.inter_node.size, total_steps)
    notes = [*optimizer_notes(optimizer), *training.notes()]
    # An accelerator's messages travel while the host has gone on.
    sees_waiting = all(
        parameter.device.type == "cpu" for parameter in model.parameters() if parameter.requires_grad
    )

    def clock() -> Reading:
        return time.perf_counter(), engine.traffic.waiting_seconds if sees_waiting else math.nan

    return Auto(sync, training, rules, notes, log or logger.info, clock)


class Rules(NamedTuple):
    """As of `auto`."""

    budget_loss: float
    least_gain: float
    probe_steps: int
    every_steps: int | None
    enabled: bool


@dataclass(frozen=True)
class Trial(Prediction):
    """Steps of the run itself with one algorithm, on the slowest process."""

    # For the process that waited least, which waits for the network alone; NaN if the host can't see it.
    waited_seconds: float = math.nan

    def __str__(self) -> str:
        waits = "" if math.isnan(self.waited_seconds) else f" ({1e3 * self.waited_seconds:.3g} ms waiting)"
        return f"{1e3 * self.step_seconds:.3g} ms{waits}"

    def differs_from(self, before: Trial) -> bool:
        """Return whether steps take a different time, for sure, than when the algorithm was chosen."""
        # If the quartiles of then and now overlap, it may be what else the machine does.
        is_apart = self.low_seconds > before.high_seconds or self.high_seconds < before.low_seconds
        return is_apart and abs(self.step_seconds - before.step_seconds) > CHANGE * before.step_seconds


class Auto:
    """Chooses the algorithm of a handle; `thinwire.auto` makes one. Printing it tells the choice and why.

    Attributes:
        sync: The handle: what `attach` would have returned.
        trials: What was measured in the choice under way, or the last one, in the order of the trials.
        chosen: What the run goes on with; None while the first choice is under way, and if not enabled.
        is_choosing: Whether trials are under way.
    """

    def __init__(
        self, sync: GradientSync, training: Training, rules: Rules, notes: list[str], log: Log, clock: Clock
    ) -> None:
        self.sync, self.is_choosing = sync, rules.enabled
        self.trials: tuple[Trial, ...] = ()
        self.chosen: Trial | None = None
        self._engine, self._rules, self._notes = engine_of(sync), rules, notes
        self._log, self._clock = log, clock
        variants, self._losses = priced(), expected_losses(training)
        self._rough = {
            code: self._losses[code] for code, variant in variants.items() if not variant.keeps_16_bits
        }
        within = [code for code, loss in self._rough.items() if loss.order <= 100 * rules.budget_loss]
        # Only the 16-bit type that no gradient is too large for; then what loses least.
        names = [EXACT, BASELINE, *sorted(within, key=lambda code: self._losses[code].order)]
        self._candidates = {name: variants[name] for name in names}
        # The replicas' group, and the shards' group if the model is sharded.
        together = self._engine.settings.health_group
        self._groups = [self._engine.transport, *([] if together is None else [together])]
        # All must make the same steps with the same algorithms, or they would wait for each other forever.
        described = {name: str(value) for name, value in rules._asdict().items()}
        described |= {CALL: "auto()", "optimizer": str(training.optimizer), "candidates": "; ".join(names)}
        described["total_steps"] = str(training.steps)
        for group in self._groups:
            agree(group, described, "auto()")
        if rules.enabled:
            self._course, self._last = self._follow(), clock()
            next(self._course)  # to its first `yield`, which receives the first step
            self._engine.reporter.observers.append(self._after_step)

    def __str__(self) -> str:
        """Return the choice and the reason for it, in lines."""
        if self.chosen is None or self.is_choosing:
            return "no choice yet" if self.is_choosing else "off: exact averaging"
        chosen, least_gain = self.chosen, self._rules.least_gain
        why = f"Nothing rougher within the budget wins more than {least_gain:.0%} for sure."
        if chosen.is_lossy:
            why = f"Its loss gap: {losses_of(chosen)}."
        elif self._can_win_nothing():
            why = "Rougher messages can win nothing."
        elif len(self.trials) == 2:
            why = none_within(self._rough, self._rules.budget_loss)
        lines = [f"{chosen.name}: a step takes {chosen}.", why]
        local = nearest({variant.name: self._losses[variant.name] for variant in LOCAL_VARIANTS})
        if local is not None and chosen.waited_seconds > least_gain * chosen.step_seconds:
            waits = f"It still waits {chosen.waited_seconds / chosen.step_seconds:.0%} of a step for messages"
            lines.append(f"{waits}; averaging models less often waits less: {local} is for you to choose.")
        tried = ", ".join(f"{trial.name} {trial}" for trial in self.trials)
        return "\n".join([*lines, *self._notes, f"Tried: {tried}."])

    # A generator, so that trials and looks read from top to bottom: each `yield` is a step of the run.
    def _follow(self) -> Course:
        rules = self._rules
        while True:
            self.is_choosing, self.trials = True, ()
            for name in self._candidates:
                self.trials += ((yield from self._tried(name, rules.probe_steps)),)
                if self._can_win_nothing():
                    break
            self.chosen, self.is_choosing = choose(self.trials, rules.least_gain), False
            self.sync.use(self._candidates[self.chosen.name].algorithm)
            self._tell(f"from step {self.sync.steps} on, {self}")
            if rules.every_steps is None:
                return
            before, now = yield from self._until_changed(self.chosen, rules.every_steps)
            self._tell(f"a step with {now.name} takes {now}, in its trial {before}: choosing again")

    def _can_win_nothing(self) -> bool:
        """Return whether exact averaging, or 16 bits, tell already that rougher messages would not pay."""
        fastest = min(self.trials[:2], key=lambda trial: trial.step_seconds)
        # A message of no bytes at all would save no more than that; NaN is not less than anything.
        return fastest.waited_seconds <= self._rules.least_gain * fastest.step_seconds

    def _until_changed(self, chosen: Trial, every_steps: int) -> Course:
        """Go on with what was chosen until it no longer is; return a trial of then and one of now."""
        careful = [trial for trial in self.trials if not trial.is_lossy][-1]
        while True:
            now = yield from self._tried(chosen.name, every_steps)
            before, seen = chosen, now
            if chosen.is_lossy:
                # Small messages hardly wait, whatever the link: large ones tell.
                before, seen = careful, (yield from self._tried(careful.name, self._rules.probe_steps))
            if seen.differs_from(before):
                return before, seen
            if choose([seen, now], self._rules.least_gain) is not now:
                return chosen, now

    def _tried(self, name: str, num_steps: int) -> Generator[None, Reading, Trial]:
        """Make steps with a candidate; return what all processes have measured."""
        candidate, traffic = self._candidates[name], self._engine.traffic
        # After a switch all processes are compared again.
        if self.sync.algorithm != candidate.algorithm:
            self.sync.use(candidate.algorithm)
        for _ in range(UNTIMED_STEPS):
            yield
        bytes_before, steps_before = traffic.message_bytes, self.sync.steps
        readings = []
        for _ in range(num_steps):
            readings.append((yield))
        message_bytes = (traffic.message_bytes - bytes_before) / (self.sync.steps - steps_before)
        seconds, waited = zip(*readings, strict=True)
        # The slowest process sets the pace, and the one that waits least waits for the network alone: its
        # number is the largest of the negative ones.
        numbers = [*quantiles(seconds, n=4, method="inclusive"), -median(waited)]
        for group in self._groups:
            everyone = gather_numbers(numbers, group, "auto: what the processes have measured")
            numbers = [max(column) for column in zip(*everyone, strict=True)]
        low_seconds, step_seconds, high_seconds, negative = numbers
        return Trial(
            name,
            f"thinwire.attach(model, thinwire.{name})",
            step_seconds,
            low_seconds,
            high_seconds,
            message_bytes,
            self._engine.state.memory_bytes(),
            is_lossy=not candidate.keeps_16_bits,
            loss=self._losses[name],
            waited_seconds=-negative,
        )

    def _after_step(self, committed: bool) -> None:
        now = self._clock()
        # A step that was dropped tells nothing, and is dropped on all processes alike.
        if committed:
            with suppress(StopIteration):
                self._course.send((now[0] - self._last[0], now[1] - self._last[1]))
        # Read again: what was compared in between is no part of the next step.
        self._last = self._clock()

    def _tell(self, text: str) -> None:
        if all(group.rank == 0 for group in self._groups):
            try:
                self._log(f"thinwire.auto: {text}")
            except Exception as error:
                # It is called in the backward pass, where the other processes go on.
                logger.warning("log raised %r, training goes on; it was given: %s", error, text)
