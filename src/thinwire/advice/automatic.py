"""`thinwire.auto`: the algorithm follows from the run's own first steps, and again when its link changes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.advice.loss import (
    Training,
    checked_budget,
    optimizer_name,
    optimizer_notes,
    unwrapped_optimizer,
)
from thinwire.advice.trials import (
    Candidate,
    Candidates,
    Trial,
    best_of,
    candidates_for,
    has_changed,
    nothing_to_win,
    quartiles_of,
    why,
    worst_of,
)
from thinwire.algorithms import AllReduce
from thinwire.channel import CALL, agree, gather_numbers
from thinwire.checks import number, true_or_false, whole_count, whole_number
from thinwire.errors import ConfigError
from thinwire.fronts.attach import attach
from thinwire.fronts.local_sgd.validation import check_trains
from thinwire.sync import GradientSync, engine_of

logger = logging.getLogger(__name__)

# The first step with an algorithm compares the processes, and sends what the one before has left; DDP
# arranges its buckets anew behind its own first one.
UNTIMED_STEPS = 2
# Below, there are no quartiles.
MIN_STEPS = 2

PURPOSE = "auto: what the processes have measured"


@dataclass(frozen=True)
class Reading:
    """What a clock shows at the end of a step.

    Attributes:
        seconds: Since any point.
        waited_seconds: Of these, waited for messages; NaN where the host can't see it.
    """

    seconds: float
    waited_seconds: float


# Receives one committed step after the other, as the time since the step before.
Course = Generator[None, Reading, None]


def auto(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | str,
    *,
    budget_loss: float = 0.01,
    least_gain: float = 0.05,
    probe_steps: int = 5,
    every_steps: int | None = 500,
    enabled: bool = True,
    log: Callable[[str], object] | None = None,
    **settings: Any,
) -> Auto:
    """Attach to a DDP or FSDP2 model, and choose the algorithm by what the run's own steps take.

    The first steps are made with exact averaging, the next ones with 16 bits, then with each algorithm that
    is expected to lose no more than the budget, which loses least first. All of them train the model, and
    are timed from end to end. Where exact averaging or 16 bits wait for messages at most `least_gain` of a
    step, nothing rougher is tried. Then the run goes on with the best by the rule of `thinwire.advise`, on
    all processes alike. Its link is looked at every `every_steps`: if a step takes, or waits, for sure a
    fifth of a step more or less than in the trial, all are tried again. While messages are rougher than 16
    bits, a look makes a few steps with these, and compares those, for small messages hardly tell a fast link
    from a slow one; all are tried again as well where the rougher ones no longer win. What an algorithm has
    not sent yet, the next one sends: nothing is lost by switching. What averages models now and then
    (`LocalSGD`) is named where it would help, and never switched to.

    To be called on every process, in place of `attach`. Leave `sync.use` alone meanwhile. A state that is
    saved is that of the algorithm in use; a run that resumes chooses anew.

    Args:
        model: As of `attach`.
        optimizer: What trains the model, or its name: loss gaps depend on it. With another one than was
            measured with, the largest gap of those counts, and it is said.
        budget_loss: The largest expected gap to exact averaging's loss, as a share of it: 0.01 is 1 %; at
            most 0.2. `math.inf` for any, known or not. Gaps were measured with small models; yours may
            differ.
        least_gain: What an approximation must win over the faster of exact and 16-bit averaging, as a share
            of the step.
        probe_steps: Timed steps with each algorithm; two more come before them.
        every_steps: From one look at the link to the next; None for a single choice.
        enabled: False for exact averaging, as of `attach(model, AllReduce())`, with nothing chosen.
        log: Gets what was chosen and why, on the first process; None for the logger "thinwire", level INFO.
            If it raises, that is a warning in the log, and training goes on.
        settings: All else that `attach` takes.

    Returns:
        What chooses: `sync` is the handle, and printing it tells the choice.

    Cost: (2 + `probe_steps`) steps with each candidate, of which slow ones take their time, and as many with
    16 bits at a look; a message of 48 bytes from each process after each trial and each look.

    Raises:
        ConfigError: An argument is out of range, or the optimizer is of a different model. Nothing was
            changed.
        AgreementError: The processes were given different arguments.
        ThinwireError: As of `attach`.

    Examples:
        >>> import thinwire
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> ddp_model = DistributedDataParallel(torch.nn.Linear(8, 4))  # in a process group
        >>> optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
        >>> chooser = thinwire.auto(ddp_model, optimizer, budget_loss=0.005)
        >>> ddp_model(torch.ones(1, 8)).sum().backward()
        >>> chooser.is_choosing, chooser.sync.algorithm  # the first of its trials
        (True, AllReduce())
    """
    name = optimizer_name(optimizer)
    budget_loss = checked_budget(budget_loss)
    if not number("least_gain", least_gain, minimum=0) < 1:
        raise ConfigError(f"least_gain must be a share below 1, such as 0.05 for 5 %, got {least_gain}")
    probe_steps = whole_number("probe_steps", probe_steps, minimum=MIN_STEPS)
    if every_steps is not None:
        every_steps = whole_count("every_steps", every_steps, minimum=MIN_STEPS)
    if log is not None and not callable(log):
        raise ConfigError(f"log must be a function that takes a text, such as print, or None, got {log!r}")
    enabled = true_or_false("enabled", enabled)
    trainer = unwrapped_optimizer(optimizer)
    # What is no model, `attach` refuses.
    if isinstance(trainer, torch.optim.Optimizer) and isinstance(model, torch.nn.Module):
        check_trains(trainer, (each for each in model.parameters() if each.requires_grad))
    sync = attach(model, AllReduce(), **settings)
    trained = [each for each in model.parameters() if each.requires_grad]
    training = Training.of(model, name, engine_of(sync).transport.size)
    candidates = candidates_for(training, budget_loss, optimizer_notes(optimizer))
    return Auto(
        sync,
        candidates,
        least_gain=least_gain,
        probe_steps=probe_steps,
        every_steps=every_steps,
        enabled=enabled,
        log=logger.info if log is None else log,
        # An accelerator's messages travel while the host has gone on.
        sees_waiting=all(each.device.type == "cpu" for each in trained),
    )


class Auto:
    """Chooses the algorithm of a handle; `thinwire.auto` makes one. Printing it tells the choice and why.

    Args:
        sync: The handle.
        candidates: What may be chosen.
        least_gain: As of `auto`.
        probe_steps: As of `auto`.
        every_steps: As of `auto`.
        enabled: As of `auto`.
        log: Gets what was chosen and why, on the first process.
        sees_waiting: Whether the host waits for messages where the device does.
        clock: Is read at the end of each step; None for that of the machine.

    Attributes:
        sync: The handle: what `attach` would have returned.
        trials: What was measured in the choice under way, or the last one, in the order of the trials.
        chosen: What the run goes on with; None while the first choice is under way, and if not enabled.

    Raises:
        AgreementError: The processes were given different arguments.
    """

    def __init__(
        self,
        sync: GradientSync,
        candidates: Candidates,
        *,
        least_gain: float,
        probe_steps: int,
        every_steps: int | None,
        enabled: bool,
        log: Callable[[str], object],
        sees_waiting: bool,
        clock: Callable[[], Reading] | None = None,
    ) -> None:
        self.sync = sync
        self.trials: tuple[Trial, ...] = ()
        self.chosen: Trial | None = None
        self._engine = engine_of(sync)
        self._least_gain, self._log = least_gain, log
        self._probe_steps, self._every_steps = probe_steps, every_steps
        self._sees_waiting = sees_waiting
        traffic = self._engine.traffic
        self._clock = clock or (lambda: Reading(time.perf_counter(), traffic.waiting_seconds))
        self._candidates = candidates
        self._why = ["off: exact averaging"]
        self._is_trying = False
        # The replicas' group, and the shards' group if the model is sharded.
        together = self._engine.settings.together
        self._groups = [self._engine.transport, *([] if together is None else [together])]
        # All must make the same steps with the same algorithms, or they would wait for each other for ever.
        described = {
            CALL: "auto()",
            "enabled": str(enabled),
            "probe_steps": str(probe_steps),
            "every_steps": str(every_steps),
            "least_gain": str(least_gain),
            "budget_loss": str(candidates.budget_loss),
            "optimizer": str(candidates.optimizer),
            "candidates": "; ".join(each.name for each in candidates.within),
        }
        for group in self._groups:
            agree(group, described, "auto()")
        self._course: Course | None = None
        if enabled:
            self._why = ["no choice yet"]
            self._course = self._follow()
            # To its first `yield`, which receives the first step.
            next(self._course)
            self._last = self._clock()
            self._engine.observers.append(self._after_step)

    def __str__(self) -> str:
        """Return what was chosen and why, in lines."""
        return "\n".join(self._why)

    @property
    def is_choosing(self) -> bool:
        """Whether trials are under way."""
        return self._course is not None and self._is_trying

    def stop(self) -> None:
        """Choose no more, and go on with the algorithm in use; call it on all processes after the same step.

        May be called twice.
        """
        if self._course is not None:
            self._engine.observers.remove(self._after_step)
            self._course = None

    # As a generator: trials and looks read from top to bottom, and each `yield` is a step of the run.
    def _follow(self) -> Course:
        while True:
            self._is_trying, self.trials = True, ()
            for candidate in self._candidates.within:
                self.sync.use(candidate.algorithm)
                self.trials += ((yield from self._tried(candidate, self._probe_steps)),)
                if nothing_to_win(self.trials, self._least_gain):
                    break
            self.chosen = chosen = best_of(self.trials, self._least_gain)
            self.sync.use(chosen.candidate.algorithm)
            self._is_trying = False
            self._why = why(chosen, self.trials, self._candidates, self._least_gain)
            self._tell(f"from step {self.sync.steps} on, {self}")
            if self._every_steps is None:
                return
            before, now = yield from self._until_changed(chosen, self._every_steps)
            self._tell(
                f"a step with {now.candidate.name} takes {now.in_words}, in its trial {before.in_words}: "
                "choosing again"
            )

    def _until_changed(
        self, chosen: Trial, every_steps: int
    ) -> Generator[None, Reading, tuple[Trial, Trial]]:
        """Go on with what was chosen until the link is another one; return a trial of then and one of now."""
        careful = [each for each in self.trials if not each.candidate.is_lossy][-1]
        while True:
            now = yield from self._tried(chosen.candidate, every_steps)
            if not chosen.candidate.is_lossy:
                if has_changed(chosen, now):
                    return chosen, now
                continue
            # Small messages hardly wait, whatever the link, and what their arithmetic takes is no news of it:
            # large ones tell.
            self.sync.use(careful.candidate.algorithm)
            careful_now = yield from self._tried(careful.candidate, self._probe_steps)
            if has_changed(careful, careful_now):
                return careful, careful_now
            if best_of([careful_now, now], self._least_gain) is not now:
                return chosen, now
            self.sync.use(chosen.candidate.algorithm)

    def _tried(self, candidate: Candidate, num_steps: int) -> Generator[None, Reading, Trial]:
        """Make steps with the algorithm in use; return what all processes have measured."""
        for _ in range(UNTIMED_STEPS):
            yield
        bytes_before, steps_before = self._engine.traffic.message_bytes, self.sync.steps
        readings = []
        for _ in range(num_steps):
            readings.append((yield))
        sent = (self._engine.traffic.message_bytes - bytes_before) / (self.sync.steps - steps_before)
        # The slowest sets the pace. Who waits least waits for the network alone, the others for it as well:
        # its is the largest of the negative ones.
        numbers = [
            *quartiles_of([each.seconds for each in readings]),
            *(-each for each in quartiles_of([each.waited_seconds for each in readings])),
        ]
        for group in self._groups:
            numbers = worst_of(gather_numbers(numbers, group, PURPOSE))
        step_seconds, low_seconds, high_seconds, *negative = numbers
        waited, low_waited, high_waited = (-each if self._sees_waiting else math.nan for each in negative)
        return Trial(
            candidate, step_seconds, low_seconds, high_seconds, waited, low_waited, high_waited, sent
        )

    def _after_step(self, committed: bool) -> None:
        now = self._clock()
        step = Reading(now.seconds - self._last.seconds, now.waited_seconds - self._last.waited_seconds)
        # A step that was dropped tells nothing, and is dropped on all processes alike.
        if committed and self._course is not None:
            try:
                self._course.send(step)
            except StopIteration:
                self.stop()
        # Read again: what was compared in between is no part of the next step.
        self._last = self._clock()

    def _tell(self, text: str) -> None:
        if all(group.rank == 0 for group in self._groups):
            try:
                self._log(f"thinwire.auto: {text}")
            except Exception as error:
                # It is called in the backward pass, where the other processes go on.
                logger.warning("log raised %r, training goes on; it was given: %s", error, text)
