"""The loss that each priced algorithm costs: gaps to exact averaging, from `loss_gaps.json`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

from thinwire.advice.priced import priced
from thinwire.errors import ConfigError

# 16 bits have no measurable loss, and every backend supports them: compression must beat that.
EXACT, BASELINE = "AllReduce()", 'Cast("bf16")'
# Bf16 and 8 bits, which lose nothing, moved single runs by this much (docs/optimizers.md).
NOISE_PERCENT = 0.5
MAX_NAME_LENGTH = 100  # it is printed
# A matrix rank is a smaller share of a wider matrix: rank 16 makes gradients of 0.67 M parameters 6 times
# smaller, of 350 M parameters 54 times. With AdamW, the rank that gives 54 in the small model lost 17 %. So
# low rank's gaps say nothing about a model more than this many times larger, except with SGD, with which
# published runs of larger models lost nothing (docs/powersgd.md).
LOW_RANK, MAX_TIMES_LARGER = "PowerSGD(", 10

Kind = Literal["exact", "measured", "between", "above", "unknown"]


@dataclass(frozen=True)
class LossGap:
    """How much more held-out loss than exact averaging an algorithm had, after the same number of steps.

    `percent` is the mean over trainings with `seeds` seeds; `low_percent` to `high_percent` is its 95 %
    interval (Student's t); `source` is a file of this project. A model is an LSTM or else a transformer.
    """

    name: str  # the algorithm's, as it prints
    optimizer: str
    members: int
    parameters: int
    steps: int
    seeds: int
    percent: float
    low_percent: float
    high_percent: float
    source: str
    is_recurrent: bool = False

    @property
    def training(self) -> str:
        """The training in which it was measured, and the file that documents it."""
        kind = "an LSTM" if self.is_recurrent else "a transformer"
        model = f"{kind} of {self.parameters / 1e6:.3g} M parameters, {self.steps:,} steps"
        return f"measured with {self.optimizer}, {self.members} members, {model} ({self.source})"


@dataclass(frozen=True)
class Training:
    """The training for which a loss gap is looked up."""

    optimizer: str | None  # None for the worst of all
    members: int
    parameters: int
    steps: int | None = None  # None for as few as were measured
    is_recurrent: bool = False


@dataclass(frozen=True)
class ExpectedLoss:
    """A gap to the loss of exact averaging, as far as it is known.

    Attributes:
        kind: "exact": there is none. "measured": `gaps` has it. "between": not measured; `gaps` has a lower
            and an upper bound. "above": only the lower one. "unknown": nothing was measured, or only in
            longer runs, or (low rank) in far smaller models.
        percent: The gap to expect: the mean, or the upper bound, from low_percent to high_percent; None if
            there is none.
        gaps: The measurements behind it.
    """

    kind: Kind
    percent: float | None = None
    low_percent: float | None = None
    high_percent: float | None = None
    gaps: tuple[LossGap, ...] = ()

    @property
    def order(self) -> float:
        """The percent by which losses are ranked: 0 for a gap within the table's noise."""
        if self.percent is None:
            return math.inf
        return self.percent if self.percent > NOISE_PERCENT else 0.0

    @property
    def short(self) -> str:
        """A short form, in percent."""
        if self.percent is not None:
            return ("≤ " if self.kind == "between" else "") + signed(self.percent)
        return "?" if self.low_percent is None else f"> {signed(self.low_percent)}"

    @property
    def in_words(self) -> str:
        """A sentence about the loss to expect."""
        if self.kind == "exact":
            return "It loses nothing: it is exact averaging."
        if self.percent is None:
            least = "" if self.low_percent is None else f", but more than {self.low_percent:.1f} %"
            return f"What it loses is not known{least}: compare losses."
        if self.order == 0:
            interval = f"between {signed(self.low_percent)} and {signed(self.high_percent)} %"
            return f"We could measure no loss: {interval}."
        most = "up to " if self.kind == "between" else ""
        return f"It may lose {most}{self.percent:.1f} %: compare losses."


EXACT_LOSS = ExpectedLoss("exact", 0.0, 0.0, 0.0)
UNKNOWN_LOSS = ExpectedLoss("unknown")


@cache
def loss_gaps() -> tuple[LossGap, ...]:
    """Return all gaps of `loss_gaps.json`."""
    text = files("thinwire.advice").joinpath("loss_gaps.json").read_text(encoding="utf-8")
    return tuple(LossGap(**row) for row in json.loads(text)["gaps"])


def known_optimizers() -> list[str]:
    """Return the optimizers of the table."""
    return sorted({gap.optimizer for gap in loss_gaps()})


def name_in_table(name: object) -> str | None:
    """Return an optimizer's name as the table spells it, if it is there; None for the worst of all."""
    if name is None:
        return None
    text = name.strip() if isinstance(name, str) else ""
    if not 0 < len(text) <= MAX_NAME_LENGTH:
        raise ConfigError(
            f'optimizer must be a torch optimizer, or the name of one such as "AdamW", got {name!r:.200}'
        )
    plain = text.rpartition(".")[2].lower()  # it may be written torch.optim.AdamW
    return next((known for known in known_optimizers() if known.lower() == plain), text)


def expected_losses(training: Training) -> dict[str, ExpectedLoss]:
    """Return the loss gap of every priced algorithm, by its code."""
    losses = {}
    for code, variant in priced().items():
        # 16 bits changed nothing in runs of any length.
        asked = replace(training, steps=None) if variant.keeps_16_bits else training
        bounds = variant.loses_more_than, variant.loses_less_than
        losses[code] = expected_loss(variant.measured_as, asked, *bounds)
    return losses | {EXACT: EXACT_LOSS}


def expected_loss(
    name: str, training: Training, loses_more_than: str = "", loses_less_than: str = ""
) -> ExpectedLoss:
    """Return an algorithm's known loss: measured, or else bounded by two other algorithms."""
    gap = nearest_gap(name, training)
    if gap is not None and _is_as_short(gap, training):
        return ExpectedLoss("measured", gap.percent, gap.low_percent, gap.high_percent, (gap,))
    less, more = nearest_gap(loses_more_than, training), nearest_gap(loses_less_than, training)
    if less is not None and more is not None and _is_as_short(more, training):
        # The larger one counts, so that an algorithm within the budget certainly is.
        return ExpectedLoss("between", more.percent, less.percent, more.percent, (less, more))
    if less is not None:
        return ExpectedLoss("above", low_percent=less.percent, gaps=(less,))
    return UNKNOWN_LOSS


def nearest_gap(name: str, training: Training) -> LossGap | None:
    """Return the gap of the nearest training; for an unknown optimizer, the largest of each optimizer's."""
    # The loss with a different optimizer would say nothing, even if this one was not measured.
    known, nearest = known_optimizers(), list[LossGap]()
    for optimizer in [training.optimizer] if training.optimizer in known else known:
        gaps = [gap for gap in loss_gaps() if (gap.name, gap.optimizer) == (name, optimizer)]
        if name.startswith(LOW_RANK) and training.optimizer != "SGD":
            gaps = [gap for gap in gaps if training.parameters <= MAX_TIMES_LARGER * gap.parameters]
        # Prefer the same kind of model: an LSTM lost several percent where transformers lost nothing.
        gaps = [gap for gap in gaps if gap.is_recurrent == training.is_recurrent] or gaps
        if gaps:
            # Longer runs lose less, and say nothing about a shorter one.
            most_steps = max(min(gap.steps for gap in gaps), training.steps or 0)
            short = [gap for gap in gaps if gap.steps <= most_steps]
            nearest.append(min(short, key=lambda gap: (_distance(gap, training), -gap.seeds)))
    # For an optimizer without measurements, assume the worst.
    return max(nearest, key=lambda gap: (not _is_as_short(gap, training), gap.percent), default=None)


def _is_as_short(gap: LossGap, training: Training) -> bool:
    # Longer runs lose less.
    return training.steps is None or gap.steps <= training.steps


def _distance(gap: LossGap, training: Training) -> float:
    ratios = [training.parameters / gap.parameters, training.members / gap.members]
    if training.steps is not None:
        ratios.append(training.steps / gap.steps)
    return sum(abs(math.log(ratio)) for ratio in ratios)


def signed(percent: float | None) -> str:
    """Return a gap with its sign; zero has none."""
    assert percent is not None
    return f"{percent:+.1f}" if f"{abs(percent):.1f}" != "0.0" else "0.0"
