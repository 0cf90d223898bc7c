"""What a way of averaging costs in loss: measured gaps to exact averaging, from `loss_gaps.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import torch
from torch import nn

from thinwire.errors import ConfigError

# Bf16 and 8 bits, which change nothing, moved single runs by as much (docs/optimizers.md).
NOISE_PERCENT = 0.5
# All of the project's trainings with SGD had it.
SGD_MOMENTUM = 0.9
MAX_NAME_LENGTH = 100  # it is printed

Kind = Literal["exact", "measured", "between", "published", "above", "unknown"]


@dataclass(frozen=True)
class LossGap:
    """How much more held-out loss than exact averaging, after equally many steps.

    Attributes:
        name: What lost it, as it is written in code.
        optimizer: With which.
        members: That trained together.
        parameters: Of the model.
        steps: Of each training; None if a paper counts differently.
        seeds: Trainings of each kind, compared seed by seed.
        percent: Mean.
        low_percent: Of the 95 % interval of the mean (Student's t); None of a single seed.
        high_percent: Likewise.
        source: File of this project, or paper.
        is_published: Whether others have measured it.
        is_recurrent: Whether the model was an LSTM; else it was a transformer.
    """

    name: str
    optimizer: str
    members: int
    parameters: int
    steps: int | None
    seeds: int
    percent: float
    low_percent: float | None
    high_percent: float | None
    source: str
    is_published: bool
    is_recurrent: bool = False

    def __str__(self) -> str:
        has_interval = self.low_percent is not None
        spread = f" ({signed(self.low_percent)} to {signed(self.high_percent)})" if has_interval else ""
        return f"{signed(self.percent)} %{spread}, {self.training}"

    @property
    def is_single(self) -> bool:
        """Whether the project has it of one seed only."""
        return self.seeds == 1 and not self.is_published

    @property
    def training(self) -> str:
        """What was trained when it was measured, and which file or paper tells it."""
        steps = "" if self.steps is None else f", {self.steps:,} steps"
        how = "published" if self.is_published else "measured once" if self.is_single else "measured"
        unit, letter = (10**9, "B") if self.parameters >= 10**9 else (10**6, "M")
        model = f"{'an LSTM of ' * self.is_recurrent}{self.parameters / unit:.3g} {letter} parameters"
        return f"{how} with {self.optimizer}, {self.members} members, {model}{steps} ({self.source})"


@dataclass(frozen=True)
class Training:
    """For which a loss gap is looked up."""

    optimizer: str | None  # None for the worst of all
    members: int
    parameters: int
    is_recurrent: bool = False

    @classmethod
    def of(cls, model: nn.Module, optimizer: str | None, members: int) -> Training:
        """Return that of a model."""
        numel = sum(each.numel() for each in model.parameters() if each.requires_grad)
        is_recurrent = any(isinstance(each, (nn.RNNBase, nn.RNNCellBase)) for each in model.modules())
        return cls(optimizer, members, numel, is_recurrent)


@dataclass(frozen=True)
class ExpectedLoss:
    """What is known of a gap to the loss of exact averaging.

    Attributes:
        kind: "exact": there is none. "measured", "published": `gaps` has it. "between": not measured;
            `gaps` holds a lower and an upper bound. "above": only the lower one. "unknown": nothing was
            measured.
        percent: To be counted with: the mean, or of what is between the larger one; None if there is no
            upper bound.
        low_percent: The least that it may be, as far as known.
        high_percent: The most.
        gaps: What it is made of.
    """

    kind: Kind
    percent: float | None = None
    low_percent: float | None = None
    high_percent: float | None = None
    gaps: tuple[LossGap, ...] = ()

    @property
    def order(self) -> float:
        """Percent that losses are ranked by: 0 for a gap that the table can't tell from none."""
        if self.percent is None:
            return math.inf
        return self.percent if self.percent > NOISE_PERCENT else 0.0

    @property
    def short(self) -> str:
        """A few letters, in percent."""
        if self.percent is not None:
            return {"between": "≤ ", "published": "p "}.get(self.kind, "") + signed(self.percent)
        return f"> {signed(self.low_percent)}" if self.low_percent is not None else "?"

    @property
    def in_words(self) -> str:
        """What may be lost, in a sentence."""
        if self.kind == "exact":
            return "It loses nothing: it is exact averaging."
        if self.percent is None:
            least = "" if self.low_percent is None else f", but more than {self.low_percent:.1f} %"
            return f"What it loses is not known{least}: compare losses."
        if self.order == 0:
            return f"It may lose {max(0.0, self._interval[1]):.1f} %, though no loss could be measured."
        most = "up to " if self.kind == "between" else ""
        who = ", as others have published" if self.kind == "published" else ""
        return f"It may lose {most}{self.percent:.1f} %{who}: compare losses."

    def is_tied_with(self, other: ExpectedLoss) -> bool:
        """Return whether two losses can't be distinguished: their intervals overlap."""
        low, high = self._interval
        other_low, other_high = other._interval
        return low <= other_high and other_low <= high

    @property
    def _interval(self) -> tuple[float, float]:
        if self.percent is None:
            return math.inf, -math.inf  # overlaps with nothing
        if self.low_percent is None or self.high_percent is None:
            # A single training has no interval; harmless changes move it by so much.
            return self.percent - NOISE_PERCENT, self.percent + NOISE_PERCENT
        return self.low_percent, self.high_percent


EXACT_LOSS = ExpectedLoss("exact", 0.0, 0.0, 0.0)
UNKNOWN_LOSS = ExpectedLoss("unknown")


@cache
def loss_gaps() -> tuple[LossGap, ...]:
    """Return all gaps that are shipped."""
    text = files("thinwire.advice").joinpath("loss_gaps.json").read_text(encoding="utf-8")
    return tuple(LossGap(**row) for row in json.loads(text)["gaps"])


def known_optimizers() -> list[str]:
    """Return the optimizers that this project has measured with."""
    return sorted({each.optimizer for each in loss_gaps() if not each.is_published})


def optimizer_name(optimizer: object) -> str:
    """Return under which name an optimizer's loss gaps are looked up."""
    optimizer = unwrapped_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        # A subclass of SGD counts as SGD.
        names = [kind.__name__ for kind in type(optimizer).__mro__]
        return next((each for each in names if each in known_optimizers()), names[0])
    given = optimizer.strip() if isinstance(optimizer, str) else ""
    if not 0 < len(given) <= MAX_NAME_LENGTH:
        such = 'a torch optimizer, or the name of one such as "AdamW"'
        raise ConfigError(f"optimizer must be {such}, got {optimizer!r:.200}")
    plain = given.rpartition(".")[2].lower()  # it may be written torch.optim.AdamW
    return next((each for each in known_optimizers() if each.lower() == plain), given)


def optimizer_notes(optimizer: object) -> list[str]:
    """Return how what the user trains with differs from what gaps were measured with, in words."""
    known = ", ".join(known_optimizers())
    if optimizer is None:
        return [f"Loss gaps are the largest of {known}; name your optimizer for its own."]
    name, given, notes = optimizer_name(optimizer), unwrapped_optimizer(optimizer), []
    not_measured = "No loss gap was measured with"
    if name not in known_optimizers():
        return [f"{not_measured} {name}, only with {known}: the largest of them counts."]
    if isinstance(given, torch.optim.Optimizer):
        if (own := type(given).__name__) != name:
            notes.append(f"{not_measured} {own}: those of {name}, from which it derives, count.")
        if name == "SGD" and not any(group.get("momentum") for group in given.param_groups):
            notes.append(f"Loss gaps of SGD were measured with momentum {SGD_MOMENTUM}; yours has none.")
    return notes


def unwrapped_optimizer(optimizer: object) -> object:
    """Return the optimizer inside of frameworks' wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def expected_loss(
    name: str, training: Training, loses_more_than: str = "", loses_less_than: str = ""
) -> ExpectedLoss:
    """Return what is known of a way of averaging: measured here, else between others, else published."""
    # The project's own come first: how they were made is known, and none was chosen to look well.
    if own := _own_gaps(name, training):
        return ExpectedLoss("measured", own[0].percent, own[0].low_percent, own[0].high_percent, own)
    less = next(iter(_own_gaps(loses_more_than, training)), None)
    more = next(iter(_own_gaps(loses_less_than, training)), None)
    if less is not None and more is not None:
        # The larger one counts, so that what is within a budget is so for sure.
        return ExpectedLoss("between", more.percent, less.percent, more.percent, (less, more))
    published = published_gap(name, training)
    if published is not None:
        return ExpectedLoss("published", published.percent, gaps=(published,))
    if less is not None:
        return ExpectedLoss("above", low_percent=less.percent, gaps=(less,))
    return UNKNOWN_LOSS


def published_gap(name: str, training: Training) -> LossGap | None:
    """Return what others have measured, nearest in members and then in the model's size; None if nothing."""
    rows = [each for each in loss_gaps() if each.name == name and each.is_published]
    return _worst_of_optimizers(rows, training)


def _own_gaps(name: str, training: Training) -> tuple[LossGap, ...]:
    """Return what the project has measured: first what counts, then what is told beside it."""
    # What others measured has other baselines, and never mixes with the project's own.
    rows = [each for each in loss_gaps() if each.name == name and not each.is_published]
    found = _worst_of_optimizers([each for each in rows if not each.is_single], training)
    if found is None:
        return ()
    # Gaps grow with members, so those come first. But two bits lost nothing in small models, and lost at 85 M
    # parameters. So a model nearer in size counts if its mean is half a percent higher. A single seed must be
    # above the interval.
    alike = [each for each in rows if each.is_recurrent == found.is_recurrent]
    nearer = [each for each in alike if _apart(each, training) < _apart(found, training)]
    nearest = _worst_of_optimizers(nearer, training, by_size=True)
    if nearest is None:
        return (found,)
    high_percent = found.percent + NOISE_PERCENT if found.high_percent is None else found.high_percent
    most_percent = high_percent if nearest.is_single else found.percent
    return (nearest, found) if nearest.percent - NOISE_PERCENT > most_percent else (found, nearest)


def _apart(gap: LossGap, training: Training) -> float:
    """Return how far the sizes of two models are apart."""
    return abs(math.log(max(1, training.parameters) / gap.parameters))


def _worst_of_optimizers(
    rows: Sequence[LossGap], training: Training, *, by_size: bool = False
) -> LossGap | None:
    """Return the row nearest to a training; for an unknown optimizer, the largest of each optimizer's."""

    def distance(gap: LossGap) -> tuple[float, ...]:
        # Gaps grow with members. Of one size, the longest training is the most like a user's.
        members_apart = abs(math.log(training.members / gap.members))
        apart = (_apart(gap, training), members_apart) if by_size else (members_apart, _apart(gap, training))
        return *apart, -(gap.steps or 0), -gap.seeds

    # The same kind of model comes first: an LSTM lost several percent by what cost transformers nothing.
    of_kind = [each for each in rows if each.is_recurrent == training.is_recurrent]
    nearest: dict[str, LossGap] = {}
    for gap in sorted(of_kind or rows, key=distance):
        nearest.setdefault(gap.optimizer, gap)
    if training.optimizer in known_optimizers():
        # What a different optimizer lost would tell nothing, even if this one was not measured.
        return nearest.get(training.optimizer)
    # For an optimizer that no one has measured with, the worst is the honest guess.
    return max(nearest.values(), key=lambda gap: gap.percent, default=None)


def signed(percent: float | None) -> str:
    """Return a gap with its sign; zero has none."""
    assert percent is not None
    return f"{percent:+.1f}" if f"{abs(percent):.1f}" != "0.0" else "0.0"
