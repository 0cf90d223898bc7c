"""Advice in sentences: what is advised and why, what it may lose, and what makes it less certain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from socket import gethostname

import torch

from thinwire.advice.loss import NOISE_PERCENT, ExpectedLoss, Training, signed
from thinwire.advice.result import MAX_SLOWDOWN, Advice, Prediction, worth
from thinwire.advice.timeline import Network
from thinwire.probe import Probe

# Below, it hardly shows in what is measured.
MIN_SHARE, MIN_SPREAD = 0.1, 0.2

LOSS_LEGEND = (
    "loss: the gap to exact averaging's held-out loss to be expected, in percent; up to "
    f"{NOISE_PERCENT:g} counts as none. p 4.4: published by others. ≤ 4.4: not measured; a rougher setting "
    "lost 4.4. > 12: not measured; a finer setting lost 12. ?: not known, or of longer runs only. Measured "
    "with small models of text; yours may differ."
)


def verdict(advice: Advice) -> list[str]:
    """Return why it is advised, a sentence or two for each item: what follows `Advice.headline`."""
    best = advice.best
    lines = [] if best.is_lossy else [_why_not(advice)]
    if len(advice.tied) > 1:
        # A name has its own commas: LocalSGD(every_steps=10, algorithm=Quantize(bits=4)).
        names = "; ".join(prediction.name for prediction in advice.tied)
        # Said before what follows from it: the one advised may not be the first of the table.
        lines.append(f"These take about the same time, as far as can be told: {names}.")
        least = "is expected to lose the least; of equal gaps the most bits win"
        lines[-1] += f" Of these, {best.name} {least if best.is_lossy else 'is the most exact'}."
    lines += _slower(advice)
    if not advice.nothing_to_win:
        lines.append(_break_even(advice))
    return [*lines, *_about_losses(advice), *advice.notes]


def _break_even(advice: Advice) -> str:
    """Return on which links compressed messages pay."""
    bits = advice.break_even_bits_per_second
    where = f"links below {bits / 1e6:,.0f} Mbit/s" if bits else "no link"
    where = "every link" if math.isinf(bits) else where
    # The rate knows of no spread, and what is advised counts it: said if the two could contradict each other.
    what = "Compressed messages" if advice.best.is_lossy else "Judged by medians alone, compressed messages"
    return f"{what} win more than {advice.least_gain:.0%} over 16 bits on {where}."


def _slower(advice: Advice) -> Iterator[str]:
    """Yield what loses less than what is advised, and is too slow for it; of several the fastest."""
    best, fastest = advice.best, advice.tied[0]
    others = worth(advice.predictions, advice.least_gain) if best.is_lossy else []
    less = [
        prediction
        for prediction in others
        if prediction not in advice.tied and prediction.loss.order < best.loss.order
    ]
    if less:
        first = min(less, key=lambda prediction: prediction.step_seconds)
        longer = f"{first.step_seconds / fastest.step_seconds - 1:.0%} longer than {fastest.name}"
        yield (
            f"{first.name} is expected to lose less ({first.loss.short} %), and takes {longer}: up to "
            f"{MAX_SLOWDOWN - 1:.0%} counts as the same time, if steps vary as much."
        )


def losses_of(prediction: Prediction) -> str:
    """Return the known loss of a way of averaging, and where it is from, in words."""
    loss, gaps = prediction.loss, prediction.loss.gaps
    named = [f"{gap.name}: {gap}" for gap in gaps]
    sentences = {
        "exact": ["none: it is exact averaging"],
        "between": [f"between {' and '.join(named)}"],
        "above": [f"more than {text}" for text in named],
        "shorter": [f"not known of so short a run; {gap}" for gap in gaps],
        "unknown": ["not known"],
    }.get(loss.kind, list(map(str, gaps)))
    # Beside the project's own: of larger models, at other batches, by others.
    if prediction.published is not None and prediction.published not in gaps:
        sentences.append(str(prediction.published))
    return "; ".join(sentences)


def nearest(losses: Mapping[str, ExpectedLoss]) -> str | None:
    """Return the way that is known to lose least, and its gap; None if no gap is known."""
    known = {name: loss for name, loss in losses.items() if loss.percent is not None}
    name = min(known, key=lambda name: known[name].order, default=None)
    return None if name is None else f"{name} ({known[name].short} % loss)"


def none_within(losses: Mapping[str, ExpectedLoss], budget_loss: float) -> str:
    """Return that nothing meets the budget, and what is nearest to it."""
    best = nearest(losses)
    is_short = any(loss.kind == "shorter" for loss in losses.values())
    none = "none was measured in so short a run" if is_short else "no gap is known"
    detail = none if best is None else f"the nearest is {best}"
    return f"Nothing rougher than 16 bits is known to lose at most {100 * budget_loss:g} %: {detail}."


def sources(advice: Advice) -> list[str]:
    """Return a line for each training that losses are known from, with the gaps that it tells."""
    by_training: dict[str, list[str]] = {}
    for prediction in advice.predictions:
        for gap in (*prediction.loss.gaps, *([] if prediction.published is None else [prediction.published])):
            texts = by_training.setdefault(gap.training, [])
            if (words := f"{gap.name} {signed(gap.percent)} %") not in texts:
                texts.append(words)
    return [f"{training}: {'; '.join(texts)}" for training, texts in by_training.items()]


def _why_not(advice: Advice) -> str:
    """Return why nothing rougher than 16 bits is advised."""
    best, least_bytes, bytes_16 = advice.best, advice.compressed_bytes, advice.baseline.message_bytes
    if least_bytes >= bytes_16:
        detail = f"compressed messages of this model are {least_bytes:,.0f} bytes per step"
        return f"Nothing to win by compressing: {detail}, 16 bits {bytes_16:,.0f}."
    if advice.nothing_to_win:
        detail = f"a step takes {1e3 * best.step_seconds:.1f} ms with {best.name}"
        return f"Nothing more to win: {detail}, {1e3 * advice.compute_seconds:.1f} ms without any averaging."
    gain = f"wins more than {advice.least_gain:.0%} over {best.name} for sure"
    return f"Nothing rougher than that: no approximation {gain}."


def _about_losses(advice: Advice) -> Iterator[str]:
    """Yield what the loss budget allows, and what it forbids; without a bound, it forbids nothing."""
    if math.isinf(advice.budget_loss):
        return
    if advice.best.is_lossy:
        yield f"Its loss gap: {losses_of(advice.best)}."
    elif not any(
        prediction.is_lossy and advice.is_within_budget(prediction) for prediction in advice.predictions
    ):
        lossy = {prediction.name: prediction.loss for prediction in advice.predictions if prediction.is_lossy}
        yield none_within(lossy, advice.budget_loss)
    # Worth a word only if it is faster for sure, and by as much as counts.
    max_seconds = (1 - advice.least_gain) * advice.best.low_seconds
    beyond = (prediction for prediction in advice.predictions if not advice.is_within_budget(prediction))
    fastest = next((prediction for prediction in beyond if prediction.high_seconds < max_seconds), None)
    if fastest is not None:
        share = fastest.step_seconds / advice.baseline.step_seconds
        yield (
            f"Beyond a loss budget of {100 * advice.budget_loss:g} %, {fastest.name} takes {share:.0%} of a "
            f"step with 16 bits (loss gap: {losses_of(fastest)})."
        )


def cost_of_saving(best: Prediction, network: Network) -> Iterator[str]:
    """Yield what `state_dict` takes with what is advised, if it keeps a residual."""
    if num_bytes := best.residual_bytes:
        residual = f"the residual of {best.name}, {num_bytes / 1e6:.3g} MB"
        seconds = f"about {network('all_reduce', num_bytes).seconds:.2g} s each time"
        yield f"Saving (state_dict) averages {residual}, over the link: {seconds}."


def disturbance(others: float | None, low_seconds: float, high_seconds: float) -> Iterator[str]:
    """Yield what other programs, and steps that vary, make less certain, in at most one sentence."""
    causes = []
    if others is not None and others > MIN_SHARE:
        causes.append(f"other programs took {others:.0%} of the machine's processors")
    if high_seconds > (1 + MIN_SPREAD) * low_seconds:
        causes.append(
            f"half of the steps without averaging took {1e3 * low_seconds:.1f} to {1e3 * high_seconds:.1f} ms"
        )
    if causes:
        yield f"While it measured, {', and '.join(causes)}: on a quiet machine predictions are surer."


def notes_on(
    training: Training,
    probe: Probe,
    num_processes: int,
    device: torch.device,
    shards: int = 1,
    processes: int = 1,
) -> Iterator[str]:
    """Yield what is uncertain besides the optimizer."""
    members, predicted_processes = training.members, training.members * shards * processes
    if processes > 1:
        yield (
            f"Predicted for {members} machines of {processes} processes, which average inside of each one "
            "first: bytes are those that leave a machine. What stays inside counts as if nothing hid it, and "
            "each process's work on messages as if it had all of them, not a part (docs/machines.md)."
        )
    if shards > 1:
        yield (
            f"Predicted for {members} replicas of {shards} shards, {predicted_processes} processes; the "
            f"{shards} of a replica share one link to the others."
        )
    # One replica alone may ask about any network: that is what the command does.
    if num_processes not in (shards, predicted_processes):
        sizes = f"of {probe.world_size} processes, this job has {num_processes}"
        yield f"The probe is {sizes}: what is predicted is for {predicted_processes}."
    if device.type != "cpu" and shards == 1:
        yield (
            "Each bucket has its own launches: if no message could hide behind the backward pass, "
            "DistributedDataParallel(..., bucket_cap_mb=10_000) makes one bucket of them all."
        )
    yield from _notes_on_probe(probe, num_processes, device)


def _notes_on_probe(probe: Probe, num_processes: int, device: torch.device) -> Iterator[str]:
    if probe.device != device.type:
        yield f"The probe is of messages on {probe.device}; what is timed here runs on {device.type}."
    places, here = list(dict.fromkeys(probe.hosts)), gethostname()
    if places and here not in places:
        few = ", ".join(places[:4]) + (", …" if len(places) > 4 else "")
        yield f"The probe is of other machines ({few}): their links, and the arithmetic of this one, {here}."
    # A network that this very job has just probed is no surprise.
    if len(places) == 1 and num_processes != probe.world_size:
        here_alone = f"All processes of the probe ran on one machine, {places[0]}"
        yield f"{here_alone}; for a training on several, probe between those."
    if probe.doubt:
        yield f"The probe is doubtful: {probe.doubt}."
    if probe.timings and probe.timings[-1].median_seconds < 2 * probe.latency_seconds:
        largest = f"The largest message of the probe, {probe.timings[-1].message_bytes:,} bytes,"
        uncertain = "the link's rate is uncertain; probe with a larger budget_seconds"
        yield f"{largest} took less than twice as long as one of nothing: {uncertain}."
