"""`thinwire.auto`: choose the algorithm by the run's own first steps, and again when the link changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from statistics import quantiles
from typing import Any, NamedTuple

import torch

from thinwire.adapters.attach import attach
from thinwire.advice.advice_page import none_within
from thinwire.advice.losses import BASELINE, EXACT, Training, expected_losses
from thinwire.advice.notes import notes_on_losses
from thinwire.advice.prediction import (
    Prediction,
    checked_budget,
    checked_gain,
    checked_steps,
    choose,
    contenders,
)
from thinwire.advice.priced import priced
from thinwire.advice.trained import notes_on_optimizer, optimizer_name, training_of
from thinwire.algorithms import AllReduce
from thinwire.checks import whole_count, whole_number
from thinwire.comm import CALL, agree, gather_numbers
from thinwire.sync import GradientSync, engine_of
from thinwire.wire import wire_bytes

logger = logging.getLogger(__name__)

# The first step with an algorithm compares the processes, and sends the last algorithm's residual. DDP
# rebuilds its buckets after its first step.
UNTIMED_STEPS = 2
CHANGE = 0.2  # if a step's time changes by more than this share, the link has changed


def auto(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | str,
    *,
    total_steps: int | None = None,
    budget_loss: float = 0.01,
    least_gain: float = 0.05,
    probe_steps: int = 5,
    every_steps: int | None = 500,
    **settings: Any,
) -> Auto:
    """Attach to a DDP or FSDP2 model, and choose the algorithm by the times of the run's own steps.

    Steps are timed with exact averaging, with 16 bits, and with each algorithm whose expected loss is within
    the budget. The run continues with the best one by the rule of `thinwire.advise`. Every `every_steps` it
    makes some steps with 16 bits again: if they clearly take a fifth more or less time than before, all are
    tried again. All steps train the model, and each algorithm sends what the one before has not sent yet.

    Call it on every process, in place of `attach`, and do not call `sync.use`. A run that resumes chooses
    again. The result's `sync` is the handle. Printing the result shows the choice, and the first process
    logs it with logger "thinwire" at level INFO.

    Args:
        model: As in `attach`.
        optimizer: As in `advise`, like the next three.
        total_steps: Lightning and the Trainer provide it.
        budget_loss: The largest accepted loss gap.
        least_gain: The least time that an approximation must save.
        probe_steps: Timed steps with each algorithm; two untimed ones come before them.
        every_steps: Steps from one check of the link to the next; None to choose only once.
        settings: All other arguments of `attach`.

    ConfigError if an argument is out of range, AgreementError if the processes were given different ones.
    """
    name = optimizer_name(optimizer)
    total_steps = checked_steps(total_steps)
    if every_steps is not None:
        every_steps = whole_count("every_steps", every_steps, minimum=2)
    probe_steps = whole_number("probe_steps", probe_steps, minimum=2)  # there are no quartiles of one
    rules = Rules(checked_budget(budget_loss), checked_gain(least_gain), probe_steps, every_steps)
    sync = attach(model, AllReduce(), **settings)
    training = training_of(model, name, engine_of(sync).inter_node.size, total_steps)
    notes = [*notes_on_losses(name, total_steps), *notes_on_optimizer(optimizer)]
    return Auto(sync, training, rules, notes)


class Rules(NamedTuple):
    """Checked arguments of `auto`."""

    budget_loss: float
    least_gain: float
    probe_steps: int
    every_steps: int | None


class Auto:
    """Chooses a handle's algorithm; `thinwire.auto` makes one. Printing it shows the choice and why.

    Attributes:
        sync: The handle, as `attach` would have returned it.
        trials: The measurements of the current or last choice, in the order of the trials.
        chosen: The algorithm that the run continues with; None during the first choice.
        is_choosing: Whether trials are in progress.
    """

    def __init__(
        self,
        sync: GradientSync,
        training: Training,
        rules: Rules,
        notes: list[str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.sync, self.is_choosing = sync, True
        self.trials: tuple[Prediction, ...] = ()
        self.chosen: Prediction | None = None
        self._engine, self._rules, self._notes, self._clock = engine_of(sync), rules, notes, clock
        variants, self._losses = priced(), expected_losses(training)
        self._rough = {name: self._losses[name] for name in variants if not variants[name].keeps_16_bits}
        within = [name for name, loss in self._rough.items() if loss.order <= 100 * rules.budget_loss]
        names = [EXACT, BASELINE, *sorted(within, key=lambda name: self._losses[name].order)]
        self._candidates = {name: variants[name] for name in names}
        # The replicas' group, and the shards' group if the model is sharded.
        self._shards = self._engine.settings.health_group
        self._groups = [self._engine.transport, *([] if self._shards is None else [self._shards])]
        # All must make the same steps with the same algorithms, or they would wait for one another forever.
        described = {name: str(value) for name, value in rules._asdict().items()}
        described |= {CALL: "auto()", "optimizer": str(training.optimizer), "candidates": "; ".join(names)}
        described |= {"total_steps": str(training.steps)}
        for group in self._groups:
            agree(group, described, "auto()")
        self._course, self._last = self._follow(), clock()
        next(self._course)  # to its first `yield`, which receives the first step
        self._engine.reporter.observers.append(self._after_step)

    def __str__(self) -> str:
        if self.chosen is None or self.is_choosing:
            return "no choice yet"
        why = f"No approximation within the budget is certainly at least {self._rules.least_gain:.0%} faster."
        if self.chosen.is_lossy:
            why = self.chosen.loss.in_words
        elif len(self.trials) == 2:
            why = none_within(self._rough, self._rules.budget_loss)
        tried = ", ".join(map(_timed, self.trials))
        return "\n".join([f"Chosen: {_timed(self.chosen)} a step. {why}", *self._notes, f"Tried: {tried}."])

    # A generator, so that trials and checks read from top to bottom: each `yield` is a step of the run.
    def _follow(self) -> Generator[None, float, None]:
        rules = self._rules
        while True:
            self.is_choosing, self.trials = True, ()
            for name in self._candidates:
                self.trials += ((yield from self._try_out(name)),)
            self.chosen, self.is_choosing = choose(contenders(self.trials, rules.least_gain)), False
            self._use(self.chosen.name)
            self._tell(f"from step {self.sync.steps} on: {self}")
            if rules.every_steps is None:
                return
            # Small messages hardly show how fast a link is: checks are steps with 16 bits.
            now = before = self.trials[1]
            while not _differs(now, before):
                self._use(self.chosen.name)
                for _ in range(rules.every_steps):
                    yield
                now = yield from self._try_out(BASELINE)
            self._tell(f"{_timed(now)}, in its trial {_timed(before)}: choosing again")

    def _use(self, name: str) -> None:
        # A switch makes processes compare again, so switch only if needed.
        if self.sync.algorithm != self._candidates[name].algorithm:
            self.sync.use(self._candidates[name].algorithm)

    def _try_out(self, name: str) -> Generator[None, float, Prediction]:
        counts = self._engine.reporter.counts
        self._use(name)
        for _ in range(UNTIMED_STEPS):
            yield
        before, seconds = counts(), list[float]()
        for _ in range(self._rules.probe_steps):
            seconds.append((yield))
        now = counts()
        handed_bytes = now.message_bytes - before.message_bytes
        sent_bytes = wire_bytes("all_reduce", handed_bytes, self._engine.inter_node.size)
        # The slowest process sets the pace. The choice depends on the bytes, too, and shards differ in them.
        numbers = [*quantiles(seconds, n=4, method="inclusive"), sent_bytes / (now.steps - before.steps)]
        for group in self._groups:
            everyone = gather_numbers(numbers, group, "auto: what the processes have measured")
            numbers = [max(column) for column in zip(*everyone, strict=True)]
        low_seconds, step_seconds, high_seconds, process_bytes = numbers
        return Prediction(
            name,
            f"thinwire.attach(model, thinwire.{name})",
            *(step_seconds, low_seconds, high_seconds),
            sent_bytes=process_bytes * (1 if self._shards is None else self._shards.size),
            memory_bytes=self._engine.state.memory_bytes(),
            is_lossy=not self._candidates[name].keeps_16_bits,
            loss=self._losses[name],
        )

    def _after_step(self, committed: bool) -> None:
        seconds = self._clock() - self._last
        # A dropped step measures nothing; all processes drop the same ones.
        if committed:
            with suppress(StopIteration):
                self._course.send(seconds)
        # Read the clock again: comparing trials is not part of the next step.
        self._last = self._clock()

    def _tell(self, text: str) -> None:
        if all(group.rank == 0 for group in self._groups):
            logger.info("thinwire.auto: %s", text)


def _timed(trial: Prediction) -> str:
    return f"{trial.name} {1e3 * trial.step_seconds:.3g} ms"


def _differs(now: Prediction, before: Prediction) -> bool:
    """Return whether steps clearly take a different time than before."""
    # If the quartiles overlap, other work on the machine may be the cause.
    is_apart = now.low_seconds > before.high_seconds or now.high_seconds < before.low_seconds
    return is_apart and abs(now.step_seconds - before.step_seconds) > CHANGE * before.step_seconds
