"""Predictions, and the one rule by which `thinwire.advise` and `thinwire.auto` choose among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from thinwire.advice.loss import UNKNOWN_LOSS, ExpectedLoss, LossGap
from thinwire.checks import number
from thinwire.errors import ConfigError

MAX_BUDGET_LOSS = 0.2  # more was probably meant in percent
COMPUTING = "computing alone"
MAX_SLOWDOWN = 1.1  # of what ties with the fastest


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one way of averaging.

    Attributes:
        name: As it is written in code.
        code: The line to add.
        step_seconds: Predicted.
        low_seconds: A quarter of the steps would be faster; of averaging less often, of the means of the
            steps from one averaging to the next.
        high_seconds: A quarter of them would be slower.
        message_bytes: What a process sends per step, counted as of an all-reduce.
        memory_bytes: What it keeps between steps.
        is_lossy: Whether the mean is rougher than 16 bits, or the models drift apart for some steps.
        averages_less_often: Whether whole models are averaged now and then, in place of gradients.
        sent_bytes: What leaves a process on the wire, mean per step; of a sharded model, all processes of a
            replica together.
        received_bytes: What reaches it, or them.
        residual_bytes: What a process averages exactly when the state is saved.
        loss: The gap to exact averaging's loss that is to be expected.
        published: What others have measured of it; None if nothing.
        rounds: Messages of a step that wait for each other, as a mean over steps.
        seconds_at: `step_seconds` by the link's round trip in ms, at the rate that was probed. Empty if it
            is not known how many round trips a message takes: other backends than Gloo.
    """

    name: str
    code: str
    step_seconds: float
    low_seconds: float
    high_seconds: float
    message_bytes: float
    memory_bytes: int
    is_lossy: bool
    averages_less_often: bool = False
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    residual_bytes: int = 0
    loss: ExpectedLoss = UNKNOWN_LOSS
    published: LossGap | None = None
    rounds: float = 0.0
    seconds_at: Mapping[int, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As a table has it."""
        return f"{self.name}, as without Thinwire" if self.loss.kind == "exact" else self.name

    @property
    def compresses(self) -> bool:
        """Whether gradients travel rougher than in 16 bits."""
        return self.is_lossy and not self.averages_less_often

    def is_within(self, budget_loss: float) -> bool:
        """Return whether it may be advised: without a bound, also what has no known gap."""
        return not self.is_lossy or self.loss.order <= 100 * budget_loss


# Predicted, or measured in the run.
AnyPrediction = TypeVar("AnyPrediction", bound=Prediction)


@dataclass(frozen=True)
class Advice:
    """All predictions, fastest first, and what follows.

    Attributes:
        predictions: Of everything that was considered.
        baseline: Averaging in 16 bits, to compare with.
        best: What is advised. Never fp16, whose range large gradients leave: bf16 sends the same.
        tied: What `best` was chosen from: within the loss budget the fastest that wins enough, and what is
            as fast as it, as far as can be told.
        break_even_bits_per_second: The link rate below which the fastest compression within the loss budget
            wins so much over the baseline; 0 if never, infinite if always. If none is within it, of any
            compression.
        compute_seconds: A step without any averaging, predicted as the others.
        least_gain: What an approximation must win at least, as a share of the baseline's step.
        budget_loss: The largest loss gap that is accepted, as a share of exact averaging's loss.
        optimizer: With which losses were looked up; None for the worst of all.
        shards: Processes that hold a replica of a sharded model together; None of any other model.
        processes: Of a machine that average inside of it first; bytes are those that leave it.
        notes: What should be known besides, in words.
        others_share: Of the machine's processors, what other programs took while it measured; None if the
            system does not tell.
    """

    predictions: tuple[Prediction, ...]
    baseline: Prediction
    best: Prediction
    tied: tuple[Prediction, ...]
    break_even_bits_per_second: float
    compute_seconds: float
    least_gain: float
    budget_loss: float = math.inf
    optimizer: str | None = None
    shards: int | None = None
    processes: int = 1
    notes: tuple[str, ...] = ()
    others_share: float | None = None

    @property
    def headline(self) -> tuple[str, str, str]:
        """The action to take, how long a step takes then, and what it may lose, in a sentence each."""
        do = "leave DDP as it is" if self.adds_nothing else self.best.code.splitlines()[-1]
        plain, ms = self.plain, 1e3 * self.best.step_seconds
        name = "DDP as it is" if plain.loss.kind == "exact" else plain.name
        others = "" if plain is self.best else f", with {name} {1e3 * plain.step_seconds:.1f} ms"
        return (
            f"Do this: {do}",
            f"A step takes {ms:.1f} ms{others}, without any averaging {1e3 * self.compute_seconds:.1f} ms.",
            self.best.loss.in_words,
        )

    @property
    def plain(self) -> Prediction:
        """The way without Thinwire: DDP as it is, or native HSDP for a sharded model."""
        plain = (
            prediction
            for prediction in self.predictions
            if prediction.loss.kind == "exact" and self.shards is None
        )
        return next(plain, self.baseline)

    def __str__(self) -> str:
        """Return the headline, the predicted steps, fastest first, and notes."""
        rows = [
            (prediction.label, f"{1e3 * prediction.step_seconds:.1f}", prediction.loss.short)
            for prediction in self.predictions
        ]
        rows.insert(0, (COMPUTING, f"{1e3 * self.compute_seconds:.1f}", ""))
        table = [("predicted, fastest first", "ms a step", "loss, %"), *rows]
        width = max(len(name) for name, *_ in table)
        lines = [f"{name:<{width}}  {ms:>9}  {loss:>7}" for name, ms, loss in table]
        return "\n".join([*self.headline, "", *lines, *self.notes])

    @property
    def adds_nothing(self) -> bool:
        """Whether exact averaging is advised, which DDP does by itself."""
        return self.best.loss.kind == "exact" and self.shards is None

    @property
    def compress(self) -> bool:
        """Whether compressed messages are advised."""
        return self.best.compresses

    @property
    def nothing_to_win(self) -> bool:
        """Whether no averaging at all would win less than `least_gain`, or no message would be smaller."""
        return not self.best.is_lossy and (
            self.compute_seconds > (1 - self.least_gain) * self.best.step_seconds
            or self.compressed_bytes >= self.baseline.message_bytes
        )

    @property
    def compressed_bytes(self) -> float:
        """Bytes that a process hands over per step with the smallest compressed messages."""
        return min(prediction.message_bytes for prediction in self.predictions if prediction.compresses)

    @property
    def frontier(self) -> tuple[Prediction, ...]:
        """Time against loss, fastest first: what loses less than all that are faster, if it is known."""
        known = [prediction for prediction in self.predictions if prediction.loss.percent is not None]
        frontier: list[Prediction] = []
        for prediction in sorted(known, key=lambda one: (one.step_seconds, one.loss.order)):
            if not frontier or prediction.loss.order < frontier[-1].loss.order:
                frontier.append(prediction)
        return tuple(frontier)

    def is_within_budget(self, prediction: Prediction) -> bool:
        """Return whether a way of averaging is exact or 16 bits, or its expected gap is no larger."""
        return prediction.is_within(self.budget_loss)

    def ties_of(self, prediction: Prediction) -> list[Prediction]:
        """Return the others that neither time nor loss tells apart from it."""
        return [
            other
            for other in self.predictions
            if other is not prediction
            and other.low_seconds <= prediction.high_seconds
            and prediction.low_seconds <= other.high_seconds
            and other.loss.is_tied_with(prediction.loss)
        ]


def checked_budget(budget_loss: object) -> float:
    """Return a loss budget as a share; `math.inf` for any."""
    budget = number("budget_loss", budget_loss, minimum=0)
    if MAX_BUDGET_LOSS < budget < math.inf:
        most = f"a share of at most {MAX_BUDGET_LOSS}, or math.inf for any"
        meant = "if that is meant as percent, write 0.01 for one percent"
        raise ConfigError(f"budget_loss must be {most}, got {budget_loss}; {meant}")
    return budget


def checked_gain(least_gain: object) -> float:
    """Return the least that an approximation must win, as a share of a step."""
    gain = number("least_gain", least_gain, minimum=0)
    if gain >= 1:
        raise ConfigError(f"least_gain must be a share below 1, such as 0.05 for 5 %, got {least_gain}")
    return gain


def choose(
    found: Sequence[AnyPrediction],
    least_gain: float,
    budget_loss: float = math.inf,
    compute_seconds: float = 0.0,
) -> AnyPrediction:
    """Choose a way of averaging by the one rule of `thinwire.advise`, `thinwire.auto` and docs/choosing.md.

    Of the contenders, take the one that loses least; of equal losses the one that sends the most bits.
    """
    return min(
        contenders(found, least_gain, budget_loss, compute_seconds),
        key=lambda prediction: (
            prediction.is_lossy and prediction.loss.order,
            prediction.loss.kind != "exact",
            -prediction.message_bytes,
        ),
    )


def contenders(
    found: Sequence[AnyPrediction],
    least_gain: float,
    budget_loss: float = math.inf,
    compute_seconds: float = 0.0,
) -> list[AnyPrediction]:
    """Return the fastest within the budget (the first), and what is as fast as it, as far as can be told.

    Exact and 16-bit averaging lose nothing. What is rougher must win more than `least_gain` over both, and
    for sure: quartiles do not overlap. Where no averaging at all would win no more than that over exact
    averaging, what seems faster is chance.
    """
    exact = [prediction for prediction in found if prediction.loss.kind == "exact"]
    if exact and compute_seconds > (1 - least_gain) * exact[0].step_seconds:
        return exact
    careful = tied([prediction for prediction in found if not prediction.is_lossy], least_gain)
    rough = [prediction for prediction in worth(found, least_gain) if prediction.is_within(budget_loss)]
    return tied(rough, least_gain) if rough else careful


def worth(found: Sequence[AnyPrediction], least_gain: float) -> list[AnyPrediction]:
    """Return the rougher ways that win more than `least_gain` over 16 bits and exact averaging."""
    careful = min(
        (prediction for prediction in found if not prediction.is_lossy),
        key=lambda prediction: prediction.step_seconds,
    )
    max_seconds = (1 - least_gain) * careful.step_seconds
    return [
        prediction
        for prediction in found
        if prediction.is_lossy
        and prediction.step_seconds < max_seconds
        and prediction.high_seconds < careful.low_seconds
    ]


def tied(found: Sequence[AnyPrediction], least_gain: float) -> list[AnyPrediction]:
    """Return the fastest (the first) and those over which it wins at most `least_gain`, or not for sure.

    None of them takes more than a tenth longer.
    """
    ranked = sorted(found, key=lambda prediction: prediction.step_seconds)
    fastest = ranked[0]
    return [
        prediction
        for prediction in ranked
        if fastest.step_seconds >= (1 - least_gain) * prediction.step_seconds
        # If steps are noisy, quartiles overlap with those of half the speed: no gap is worth so much time.
        or (
            prediction.low_seconds <= fastest.high_seconds
            and prediction.step_seconds <= MAX_SLOWDOWN * fastest.step_seconds
        )
    ]
