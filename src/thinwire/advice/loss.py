"""The loss that a way of averaging costs: measured gaps to exact averaging, from `loss_gaps.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.torch_private import Convolution

# Bf16 and 8 bits, which change nothing, moved single runs by as much (docs/optimizers.md).
NOISE_PERCENT = 0.5
# All of the project's trainings with SGD had it.
SGD_MOMENTUM = 0.9
MAX_NAME_LENGTH = 100  # it is printed

Kind = Literal["exact", "measured", "between", "published", "above", "shorter", "unknown"]


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
        """The training in which it was measured, and the file or paper that tells it."""
        steps = "" if self.steps is None else f", {self.steps:,} steps"
        how = "published" if self.is_published else "measured once" if self.is_single else "measured"
        unit, letter = (10**9, "B") if self.parameters >= 10**9 else (10**6, "M")
        kind = "an LSTM" if self.is_recurrent else "a transformer"
        model = f"{kind} of {self.parameters / unit:.3g} {letter} parameters"
        return f"{how} with {self.optimizer}, {self.members} members, {model}{steps} ({self.source})"


@dataclass(frozen=True)
class Training:
    """For which a loss gap is looked up."""

    optimizer: str | None  # None for the worst of all
    members: int
    parameters: int
    steps: int | None = None  # None for as few as were measured
    is_recurrent: bool = False
    has_convolutions: bool = False

    @classmethod
    def of(cls, model: nn.Module, optimizer: str | None, members: int, steps: int | None = None) -> Training:
        """Return that of a model."""
        numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        kinds = {type(module) for module in model.modules()}
        is_recurrent = any(issubclass(kind, nn.RNNBase | nn.RNNCellBase) for kind in kinds)
        has_convolutions = any(issubclass(kind, Convolution) for kind in kinds)
        return cls(optimizer, members, numel, steps, is_recurrent, has_convolutions)

    def notes(self) -> Iterator[str]:
        """Yield what its gaps hold for, as far as the model and the length of the run go."""
        if self.steps is None:
            yield (
                "The length of the run decides what few bits lose: without it (--steps, total_steps=) the "
                "gaps of the shortest runs that were measured count."
            )
        if self.is_recurrent:
            transformers = "what no LSTM was tried with has the gap of transformers, perhaps less"
            yield f"The model has an RNN: {transformers}."
        if self.has_convolutions:
            yield (
                "The model has convolutions, and all gaps are of models of text. With CNNs accuracies alone "
                "were measured, at 26 thousand parameters (docs/optimizers.md): compare yours."
            )


@dataclass(frozen=True)
class ExpectedLoss:
    """A gap to the loss of exact averaging, as far as it is known.

    Attributes:
        kind: "exact": there is none. "measured", "published": `gaps` has it. "between": not measured;
            `gaps` holds a lower and an upper bound. "above": only the lower one. "shorter": measured in
            longer runs only, which promise nothing for this one. "unknown": nothing was measured.
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
        """The possible loss, in a sentence."""
        if self.kind == "exact":
            return "It loses nothing: it is exact averaging."
        if self.kind == "shorter":
            return "What it loses in so short a run is not known: compare losses."
        if self.percent is None:
            least = "" if self.low_percent is None else f", but more than {self.low_percent:.1f} %"
            return f"What it loses is not known{least}: compare losses."
        if self.order == 0:
            low, high = self._interval
            return f"We could measure no loss: between {signed(low)} and {signed(high)} %."
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
    return sorted({gap.optimizer for gap in loss_gaps() if not gap.is_published})


def optimizer_name(optimizer: object) -> str:
    """Return under which name an optimizer's loss gaps are looked up."""
    optimizer = unwrapped_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        # A subclass of SGD counts as SGD.
        names = [kind.__name__ for kind in type(optimizer).__mro__]
        return next((name for name in names if name in known_optimizers()), names[0])
    text = optimizer.strip() if isinstance(optimizer, str) else ""
    if not 0 < len(text) <= MAX_NAME_LENGTH:
        such = 'a torch optimizer, or the name of one such as "AdamW"'
        raise ConfigError(f"optimizer must be {such}, got {optimizer!r:.200}")
    plain = text.rpartition(".")[2].lower()  # it may be written torch.optim.AdamW
    return next((name for name in known_optimizers() if name.lower() == plain), text)


def optimizer_notes(optimizer: object) -> list[str]:
    """Return how what the user trains with differs from what gaps were measured with, in words."""
    known = ", ".join(known_optimizers())
    if optimizer is None:
        return [f"Loss gaps are the largest of {known}; name your optimizer for its own."]
    name, unwrapped, notes = optimizer_name(optimizer), unwrapped_optimizer(optimizer), []
    not_measured = "No loss gap was measured with"
    if name not in known_optimizers():
        return [f"{not_measured} {name}, only with {known}: the largest of them counts."]
    if isinstance(unwrapped, torch.optim.Optimizer):
        if (class_name := type(unwrapped).__name__) != name:
            notes.append(f"{not_measured} {class_name}: those of {name}, from which it derives, count.")
        if name == "SGD" and not any(group.get("momentum") for group in unwrapped.param_groups):
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
    """Return the loss known of a way of averaging: measured here, else between others, else published."""
    # The project's own come first: how they were made is known, and none was chosen to look well.
    gaps = _own_gaps(name, training)
    if gaps and _is_as_short(gaps[0], training):
        return ExpectedLoss("measured", gaps[0].percent, gaps[0].low_percent, gaps[0].high_percent, gaps)
    less = next(iter(_own_gaps(loses_more_than, training)), None)
    more = next(iter(_own_gaps(loses_less_than, training)), None)
    if less is not None and more is not None and _is_as_short(more, training):
        # The larger one counts, so that what is within a budget is so for sure.
        return ExpectedLoss("between", more.percent, less.percent, more.percent, (less, more))
    if gaps:
        return ExpectedLoss("shorter", gaps=gaps)
    published = published_gap(name, training)
    if published is not None:
        return ExpectedLoss("published", published.percent, gaps=(published,))
    if less is not None:
        return ExpectedLoss("above", low_percent=less.percent, gaps=(less,))
    return UNKNOWN_LOSS


def published_gap(name: str, training: Training) -> LossGap | None:
    """Return the published gap nearest in members and then in the model's size; None if there is none."""
    rows = [gap for gap in loss_gaps() if gap.name == name and gap.is_published]
    return _worst_of_optimizers(rows, training)


def _own_gaps(name: str, training: Training) -> tuple[LossGap, ...]:
    """Return the gaps that the project has measured: first the one that counts, then any told beside it."""
    # Gaps that others measured have other baselines, and never mix with the project's own.
    rows = [gap for gap in loss_gaps() if gap.name == name and not gap.is_published]
    several = _worst_of_optimizers([gap for gap in rows if not gap.is_single], training)
    if several is None:
        return ()
    # A single seed is no proof that there is no harm. It counts if it is nearer, and above the interval.
    single = _worst_of_optimizers([gap for gap in rows if gap.is_single], training)
    if single is None or _apart(single, training) > _apart(several, training):
        return (several,)
    assert several.high_percent is not None
    return (single, several) if single.percent - NOISE_PERCENT > several.high_percent else (several, single)


def _is_as_short(gap: LossGap, training: Training) -> bool:
    """Return whether a measured run was no longer than a training: longer ones lose less."""
    return gap.steps is None or training.steps is None or gap.steps <= training.steps


def _apart(gap: LossGap, training: Training) -> float:
    """Return how far two trainings are apart in the size of the model, the length and the members."""
    ratios = [training.parameters / gap.parameters, training.members / gap.members]
    if gap.steps is not None and training.steps is not None:
        ratios.append(training.steps / gap.steps)
    return sum(abs(math.log(ratio)) for ratio in ratios)


def _worst_of_optimizers(rows: Sequence[LossGap], training: Training) -> LossGap | None:
    """Return the row nearest to a training; for an unknown optimizer, the largest of each optimizer's."""
    nearest: dict[str, LossGap] = {}
    for optimizer in dict.fromkeys(gap.optimizer for gap in rows):
        # The same kind of model comes first: an LSTM lost several percent by what cost transformers nothing.
        candidates = [gap for gap in rows if gap.optimizer == optimizer]
        candidates = [gap for gap in candidates if gap.is_recurrent == training.is_recurrent] or candidates
        shortest = min(gap.steps or 0 for gap in candidates)
        # Longer runs lose less, and promise nothing for a shorter one.
        most_steps = max(shortest, training.steps or 0)
        short = [gap for gap in candidates if (gap.steps or 0) <= most_steps]
        nearest[optimizer] = min(short, key=lambda gap: (_apart(gap, training), -gap.seeds))
    if training.optimizer in known_optimizers():
        # The loss with a different optimizer would tell nothing, even if this one was not measured.
        return nearest.get(training.optimizer)
    # For an optimizer that no one has measured with, the worst is the honest guess.
    return max(nearest.values(), key=lambda gap: (not _is_as_short(gap, training), gap.percent), default=None)


def signed(percent: float | None) -> str:
    """Return a gap with its sign; zero has none."""
    assert percent is not None
    return f"{percent:+.1f}" if f"{abs(percent):.1f}" != "0.0" else "0.0"
