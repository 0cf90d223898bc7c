"""Advice without a model: the step time if only the number of parameters is known.

Nothing is timed, and torch is not imported: messages are those of a model of typical shapes, compute time is
given by the user, and Thinwire's arithmetic adds a constant time per element. docs/calculator.js does the
same sum in the browser.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

from thinwire.advice.advice_page import Advice
from thinwire.advice.losses import Training, name_in_table
from thinwire.advice.notes import notes_on_link, notes_on_losses
from thinwire.advice.prediction import checked_budget, checked_steps
from thinwire.advice.priced import ARITHMETIC_SOURCE, InBlocks, Shape
from thinwire.advice.priced_steps import PricedSteps, Sent, TimedSteps, Timeline
from thinwire.probe.measured_link import MeasuredLink
from thinwire.wire import Collective

FORWARD_SHARE = 1 / 3  # share of compute time: a backward pass takes about twice as long
BLOCKS_SHARE = 0.85  # share of the parameters; the rest is the embedding
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's defaults
LEAST_GAIN = 0.05  # the default of `thinwire.advise`
MAX_PARAMETERS = 10**12
MOMENT = 1e-9  # added to order simultaneous events

Rounds: TypeAlias = Sequence[Sequence[int]]  # the bytes of each bucket's messages


def advise_by_size(
    parameters: int,
    compute_seconds: float,
    link: MeasuredLink,
    *,
    budget_loss: float = 0.01,
    optimizer: str | None = None,
    total_steps: int | None = None,
) -> Advice:
    """Return the advice for a model with this many parameters and this forward and backward time."""
    total_steps, name = checked_steps(total_steps), name_in_table(optimizer)
    steps = planned_steps(compute_seconds, Training(name, link.members, parameters, total_steps))
    is_free_inside = link.processes > 1 and not link.inside_seconds(steps.gradient_bytes)
    # No step was timed, so the probe's machines do not matter.
    unnamed = replace(link, probe=replace(link.probe, hosts=[]))
    notes = (
        *notes_on_losses(name, total_steps),
        "Predicted for a transformer of typical shapes, gradients in fp32, in DDP's buckets of 25 MB, "
        f"and the arithmetic of {ARITHMETIC_SOURCE}. On CPUs compression takes many times as long.",
        *notes_on_link(unnamed, 1, link.probe.device),
        *(["Averaging inside a machine is taken to cost nothing."] if is_free_inside else []),
        "thinwire.advise(model, one_step, probe) makes the same table from timed steps of your own model.",
    )
    return steps.advice(link, LEAST_GAIN, checked_budget(budget_loss), notes)


def gradient_shapes(parameters: int) -> list[Shape]:
    """Return shapes of exactly this many parameters, from the last to the first, as gradients become ready.

    They are those of an embedding and of torch's `TransformerEncoderLayer`.
    """
    # Depth is about width / 64, as in GPT-2 and GPT-3; a block has 12 width² + 13 width parameters.
    width = max(1, round((BLOCKS_SHARE * parameters / 12 * 64) ** (1 / 3) / 64)) * 64
    num_blocks = int(BLOCKS_SHARE * parameters / (12 * width**2 + 13 * width))
    rows, rest = divmod(parameters - num_blocks * (12 * width**2 + 13 * width), width)
    norms: list[Shape] = [(width,)] * 4
    feed_forward: list[Shape] = [(width,), (width, 4 * width), (4 * width,), (4 * width, width)]
    attention: list[Shape] = [(width,), (width, width), (3 * width,), (3 * width, width)]
    shapes = [*norms, *feed_forward, *attention] * num_blocks
    return [*shapes, (rows, width), *([(rest,)] if rest else [])]


def planned_steps(compute_seconds: float, training: Training) -> PricedSteps:
    """Return steps planned with DDP's buckets; gradients become ready at an even rate."""
    buckets = in_buckets(gradient_shapes(training.parameters))
    gradient_bytes = 4 * training.parameters
    steps = PricedSteps(training, gradient_bytes, list)
    steps.alone.timelines.append(Timeline((), compute_seconds))
    for name, row in steps.variants.items():
        arithmetic_seconds = training.parameters * row.arithmetic_seconds
        sent = [row.format.sent(bucket, training.members) for bucket in buckets]
        # Half of the arithmetic comes before a bucket's message, the rest after all means have arrived.
        backward_seconds = (1 - FORWARD_SHARE) * compute_seconds + arithmetic_seconds / 2
        done = accumulate(map(bytes_of, buckets))
        shares = [num_bytes / gradient_bytes for num_bytes in done]
        ready = [FORWARD_SHARE * compute_seconds + backward_seconds * share for share in shares]
        rounds = [bucket.handed_bytes for bucket in sent]
        plan = together
        if isinstance(row.format, InBlocks):
            plan = at_once if training.members == 2 else in_turn
        messages = sorted(plan(rounds, ready, row.format.collectives))
        residual_bytes = sum(bucket.residual_bytes for bucket in sent)
        timeline = Timeline(tuple(messages), compute_seconds + arithmetic_seconds)
        steps.timed[name] = TimedSteps([timeline], residual_bytes, residual_bytes)
    return steps


def bytes_of(bucket: Sequence[Shape]) -> int:
    """Return the bytes of a bucket's gradients, in fp32."""
    return 4 * sum(map(math.prod, bucket))


def in_buckets(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Return DDP's buckets: each is closed when it has enough bytes, and the first is smaller."""
    buckets, missing_bytes = [list[Shape]()], FIRST_BUCKET_BYTES
    for shape in shapes:
        if missing_bytes <= 0:
            buckets.append([])
            missing_bytes = BUCKET_BYTES
        buckets[-1].append(shape)
        missing_bytes -= bytes_of([shape])
    return buckets


def together(rounds: Rounds, ready: Sequence[float], kinds: Sequence[Collective]) -> Iterator[Sent]:
    """Yield each bucket's first message when it is ready, and the second ones of all at the end, as one."""
    end = ready[-1] + MOMENT
    for (first, *_), seconds in zip(rounds, ready, strict=True):
        yield Sent(seconds, first, end, kinds[0])
    if second := sum(sum(later) for _, *later in rounds):
        yield Sent(end + 2 * MOMENT, second, end + 3 * MOMENT, kinds[1])


def in_turn(rounds: Rounds, ready: Sequence[float], kinds: Sequence[Collective]) -> Iterator[Sent]:
    """Yield the two messages of each bucket: the second is sent when the next bucket has sent its first."""
    end = ready[-1] + 3 * MOMENT
    waits = [*(seconds + MOMENT for seconds in ready[1:]), end, end, end + 2 * MOMENT]
    for index, (first, second) in enumerate(rounds):
        yield Sent(ready[index], first, waits[index], kinds[0])
        # It is awaited together with the first message sent after it.
        yield Sent(waits[index] + MOMENT, second, waits[index + 2], kinds[1])


def at_once(rounds: Rounds, ready: Sequence[float], kinds: Sequence[Collective]) -> Iterator[Sent]:
    """Yield the two messages of each bucket, when it is ready."""
    end = ready[-1] + MOMENT
    for seconds, both in zip(ready, rounds, strict=True):
        for num_bytes, kind in zip(both, kinds, strict=True):
            yield Sent(seconds, num_bytes, end, kind)
