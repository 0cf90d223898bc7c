"""Probes, loss gaps, predictions and advice that are made up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from thinwire.advice import Advice, ExpectedLoss, LossGap, Prediction, losses, priced_steps
from thinwire.advice.losses import EXACT_LOSS
from thinwire.advice.priced import priced
from thinwire.probe import Probe, Timing
from thinwire.probe.link_timings import ring_share


def network(
    bits_per_second: float,
    latency_seconds: float = 0.001,
    world_size: int = 2,
    nodes: list[list[int]] | None = None,
) -> Probe:
    """What a probe would have found."""
    timings = [
        Timing(size, [latency_seconds + ring_share(world_size) * 8 * size / bits_per_second])
        for size in (4, 1 << 20, 1 << 24)
    ]
    return Probe(world_size, "gloo", "cpu", timings, [], nodes or [list(range(world_size))])


@contextmanager
def only_priced(*names: str) -> Iterator[None]:
    """Few algorithms are priced, which takes less time."""
    few = {name: variant for name, variant in priced().items() if name in names}
    with patch.object(priced_steps, "priced", few.copy), patch.object(losses, "priced", few.copy):
        yield


def row(name: str, optimizer: str, members: int, percent: float, **others: Any) -> LossGap:
    interval = percent - 0.2, percent + 0.2
    plain = LossGap(name, optimizer, members, 1_000_000, 2000, 3, percent, *interval, "here")
    return replace(plain, **others)


def measured(percent: float) -> ExpectedLoss:
    gap = row("it", "AdamW", 4, percent)
    return ExpectedLoss("measured", percent, gap.low_percent, gap.high_percent, (gap,))


def way(name: str, low_ms: float, high_ms: float, loss: ExpectedLoss, **others: Any) -> Prediction:
    plain = Prediction(
        name,
        f"thinwire.attach(ddp_model, thinwire.{name})",
        step_seconds=(low_ms + high_ms) / 2000,
        low_seconds=low_ms / 1000,
        high_seconds=high_ms / 1000,
        sent_bytes=10,
        memory_bytes=0,
        is_lossy=True,
        loss=loss,
    )
    return replace(plain, **others)


EXACT = way("AllReduce()", 180, 190, EXACT_LOSS, is_lossy=False, sent_bytes=1000)
SIXTEEN = way('Cast("bf16")', 99, 101, measured(-0.1), is_lossy=False, sent_bytes=500)
FOUR = way("Quantize(bits=4)", 60, 62, measured(0.1))
TWO = way("Quantize(bits=2)", 50, 52, measured(0.3))
ONE = way("Quantize(bits=1)", 40, 42, measured(4.5))
ROUGH = way("PowerSGD(matrix_rank=1)", 30, 31, measured(12.0))
UNKNOWN = way("TopK()", 20, 21, ExpectedLoss("unknown"))
EVERYTHING = (FOUR, TWO, ONE, ROUGH, UNKNOWN)


def advice_of(
    *predictions: Prediction,
    budget: float = math.inf,
    careful: tuple[Prediction, ...] = (EXACT, SIXTEEN),
    compute_ms: float = 10,
) -> Advice:
    """By the rule; the last of `careful` is the baseline."""
    ranked = sorted([*careful, *predictions], key=lambda prediction: prediction.step_seconds)
    budget_of = {"budget_loss": budget, "optimizer": "AdamW"}
    return Advice(tuple(ranked), careful[-1], compute_ms / 1000, 0.05, **budget_of)  # type: ignore[arg-type]
