"""What `thinwire.auto` chooses, and why: plain numbers in, the same choice out on every process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from thinwire.advice.loss import EXACT_LOSS, ExpectedLoss, Training, expected_loss
from thinwire.advice.replicated import BASELINE, EXACT, priced
from thinwire.advice.result import Prediction, choose
from thinwire.advice.variants import LOCAL_VARIANTS
from thinwire.advice.words import losses_of
from thinwire.algorithms import Algorithm

# A step that takes so much longer or shorter, as a share, or waits so much more or less, is of another link.
CHANGE = 0.2


@dataclass(frozen=True)
class Candidate:
    """An algorithm that may be tried.

    Attributes:
        name: As it is written in code.
        algorithm: The same.
        loss: The gap to exact averaging's loss that is to be expected.
        is_lossy: Whether it is rougher than 16 bits.
    """

    name: str
    algorithm: Algorithm
    loss: ExpectedLoss
    is_lossy: bool = True


@dataclass(frozen=True)
class Candidates:
    """What is tried, and what is not.

    Attributes:
        within: Exact averaging, 16 bits, and what is expected to lose no more than the budget; what loses
            least comes first.
        nearest: Of what is rougher than 16 bits and has a known gap, the one that loses least; None if there
            is none.
        nearest_local: The same, of averaging models less often.
        budget_loss: As of `auto`.
        optimizer: As of `Training`.
        notes: How it differs from what losses were measured with, in words.
    """

    within: tuple[Candidate, ...]
    nearest: tuple[str, ExpectedLoss] | None
    nearest_local: tuple[str, ExpectedLoss] | None
    budget_loss: float
    optimizer: str | None
    notes: tuple[str, ...] = ()


def candidates_for(training: Training, budget_loss: float, notes: tuple[str, ...] = ()) -> Candidates:
    """Return what may be tried within a loss budget.

    Args:
        training: That of the user.
        budget_loss: The largest expected gap to exact averaging's loss, as a share of it.
        notes: As of `Candidates`.
    """
    variants = priced()
    lossy = {
        code: expected_loss(
            # In the table, algorithms have the names that they print.
            str(variant.algorithm),
            training,
            loses_more_than=variant.loses_more_than,
            loses_less_than=variant.loses_less_than,
        )
        for code, variant in variants.items()
        if not variant.keeps_16_bits
    }
    local = {
        each.name: expected_loss(each.name, training, loses_more_than=each.loses_more_than)
        for each in LOCAL_VARIANTS
    }
    within = [
        Candidate(EXACT, variants[EXACT].algorithm, EXACT_LOSS, is_lossy=False),
        # Of the two kinds of 16 bits the one that no gradient is too large for.
        Candidate(BASELINE, variants[BASELINE].algorithm, EXACT_LOSS, is_lossy=False),
        *(
            Candidate(code, variants[code].algorithm, lossy[code])
            for code in sorted(lossy, key=lambda code: lossy[code].order)
            # Of what is unknown the order is infinite, as a budget without bound is.
            if lossy[code].order <= 100 * budget_loss
        ),
    ]
    return Candidates(tuple(within), _nearest(lossy), _nearest(local), budget_loss, training.optimizer, notes)


def _nearest(losses: dict[str, ExpectedLoss]) -> tuple[str, ExpectedLoss] | None:
    known = [(name, loss) for name, loss in losses.items() if loss.percent is not None]
    return min(known, key=lambda each: each[1].order, default=None)


@dataclass(frozen=True)
class Trial:
    """Steps of the run itself with one algorithm.

    Attributes:
        candidate: What was tried.
        step_seconds: From the end of a step to the end of the next: the middle one, on the slowest process.
        low_seconds: A quarter of the steps were faster.
        high_seconds: A quarter of the steps were slower.
        waited_seconds: What the network took of a step: how long the process waited for messages that
            waited least, because the others waited for it. NaN where the host can't see it.
        low_waited_seconds: A quarter of the steps waited less.
        high_waited_seconds: A quarter of the steps waited more.
        message_bytes: What a process sent per step, counted as of an all-reduce.
    """

    candidate: Candidate
    step_seconds: float
    low_seconds: float
    high_seconds: float
    waited_seconds: float
    low_waited_seconds: float
    high_waited_seconds: float
    message_bytes: float

    @property
    def in_words(self) -> str:
        """What a step took, and how much of it was waiting where that is known, in words."""
        waits = "" if math.isnan(self.waited_seconds) else f" ({_ms(self.waited_seconds)} waiting)"
        return _ms(self.step_seconds) + waits


def worst_of(everyone: Sequence[Sequence[float]]) -> list[float]:
    """Return the largest of each column.

    Args:
        everyone: Rows of equal length.
    """
    return [max(column) for column in zip(*everyone, strict=True)]


def quartiles_of(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the middle of at least two numbers, then the quartiles below and above it."""
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return middle, low, high


def nothing_to_win(trials: Sequence[Trial], least_gain: float) -> bool:
    """Return whether exact averaging, or 16 bits, tell already that rougher messages would not pay.

    Args:
        trials: So far; one at least.
        least_gain: As of `auto`.
    """
    fastest = min(trials[:2], key=lambda each: each.step_seconds)
    # A message of no bytes at all would save no more than that. NaN is no such case.
    return fastest.waited_seconds <= least_gain * fastest.step_seconds


def best_of(trials: Sequence[Trial], least_gain: float) -> Trial:
    """Return what to go on with: by `choose`, the rule of `thinwire.advise`, on measured steps.

    Args:
        trials: Of exact and 16-bit averaging at least.
        least_gain: As of `auto`.
    """
    predictions = {_as_prediction(each): each for each in trials}
    return predictions[choose(sorted(predictions, key=lambda each: each.step_seconds), least_gain)]


def has_changed(before: Trial, now: Trial) -> bool:
    """Return whether steps take another time, or wait for another, than when the algorithm was chosen.

    For sure: where the quartiles of then and now overlap, it may be what else the machine does.

    Args:
        before: When it was chosen.
        now: Since.
    """
    # Where the host can't see waiting, it is NaN, which is never above: then the steps' time decides alone.
    bound = CHANGE * before.step_seconds
    took = now.low_seconds > before.high_seconds or now.high_seconds < before.low_seconds
    waited = (
        now.low_waited_seconds > before.high_waited_seconds
        or now.high_waited_seconds < before.low_waited_seconds
    )
    return (took and abs(now.step_seconds - before.step_seconds) > bound) or (
        waited and abs(now.waited_seconds - before.waited_seconds) > bound
    )


def why(chosen: Trial, trials: Sequence[Trial], candidates: Candidates, least_gain: float) -> list[str]:
    """Return what was chosen and why, in sentences.

    Args:
        chosen: Of `trials`.
        trials: All.
        candidates: That could be tried.
        least_gain: As of `auto`.
    """
    fastest = min(
        (each for each in trials if not each.candidate.is_lossy), key=lambda each: each.step_seconds
    )
    name, budget = chosen.candidate.name, f"{100 * candidates.budget_loss:g} %"
    lines = []
    if chosen.candidate.is_lossy:
        lines.append(
            f"{name}: a step takes {_ms(chosen.step_seconds)}, "
            f"{chosen.step_seconds / fastest.step_seconds:.0%} of the {_ms(fastest.step_seconds)} with "
            f"{fastest.candidate.name}, and sends {chosen.message_bytes:,.0f} bytes in place of "
            f"{fastest.message_bytes:,.0f}."
        )
        lines.append(f"Its loss gap: {losses_of(_as_prediction(chosen))}.")
    elif nothing_to_win(trials, least_gain):
        lines.append(
            f"{name}: nothing to win by rougher messages, for of the {_ms(fastest.step_seconds)} of a step "
            f"with {fastest.candidate.name} it waits {_ms(fastest.waited_seconds)} for messages."
        )
    elif len(trials) > 2:
        lines.append(
            f"{name}: a step takes {_ms(chosen.step_seconds)}, and nothing rougher"
            f"{'' if math.isinf(candidates.budget_loss) else f' within a loss budget of {budget}'} wins more "
            f"than {least_gain:.0%} over {fastest.candidate.name} for sure."
        )
    else:
        lines.append(f"{name}: a step takes {_ms(chosen.step_seconds)}.")
    if not any(each.is_lossy for each in candidates.within):
        nearest = (
            "no gap is known"
            if candidates.nearest is None
            else f"the nearest is {candidates.nearest[0]}, {candidates.nearest[1].short} %"
        )
        lines.append(f"Nothing rougher than 16 bits is known to lose at most {budget}: {nearest}.")
    lines += candidates.notes
    if chosen.waited_seconds > least_gain * chosen.step_seconds and candidates.nearest_local is not None:
        local, loss = candidates.nearest_local
        lines.append(
            f"It still waits {chosen.waited_seconds / chosen.step_seconds:.0%} of a step for messages; "
            f"averaging models less often waits less, which is for you to choose: {local} is expected to "
            f"lose {loss.short} %."
        )
    tried = ", ".join(f"{each.candidate.name} {_ms(each.step_seconds)}" for each in trials)
    return [*lines, f"Tried: {tried}."]


def _as_prediction(trial: Trial) -> Prediction:
    """Return a trial as what the rule of `thinwire.advise` chooses among."""
    candidate = trial.candidate
    return Prediction(
        candidate.name,
        f"thinwire.attach(model, thinwire.{candidate.name})",
        trial.step_seconds,
        trial.low_seconds,
        trial.high_seconds,
        message_bytes=trial.message_bytes,
        memory_bytes=0,
        is_lossy=candidate.is_lossy,
        loss=candidate.loss,
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
