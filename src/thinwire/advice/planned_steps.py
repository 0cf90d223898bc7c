"""Advice without a model: the step time if only the number of parameters is known.

Nothing is timed: messages come from the algorithms' own plans for a model of typical shapes, compute time is
given by the user, and Thinwire's arithmetic adds a constant time per element.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn

from thinwire.advice.advice_page import Advice
from thinwire.advice.forecast import notes_on_link
from thinwire.advice.losses import Training, notes_on_losses, optimizer_name
from thinwire.advice.prediction import checked_budget, checked_steps
from thinwire.advice.priced_steps import PricedSteps, TimedSteps
from thinwire.advice.timeline import Sent, Timeline
from thinwire.algorithms import Algorithm, BucketPlan, Quantize, TopK
from thinwire.comm import Collective, InProcessTransport
from thinwire.plan import ParameterSpec
from thinwire.probe.measured_link import MeasuredLink

# Time that arithmetic adds to a step on one H100, in seconds per element: the larger of the extra time of
# whole steps with 163 M parameters, and the device's own time for 124 M. Settings that were not timed get the
# time of the next rougher or larger one. From benchmarks/results/2026-11-26-gpu-h100.md, see docs/results.md.
ARITHMETIC_SOURCE = "one H100 (docs/results.md)"
ARITHMETIC_SECONDS = {
    "AllReduce()": 0.0,
    'Cast("bf16")': 1.21e-3 / 163e6,
    "Quantize(bits=8)": 1.96e-3 / 163e6,
    "Quantize(bits=6)": 1.96e-3 / 163e6,
    "Quantize(bits=4)": 1.94e-3 / 163e6,
    "Quantize(bits=2)": 2.07e-3 / 163e6,
    "PowerSGD(matrix_rank=1)": 1.54e-3 / 124e6,
    "PowerSGD(matrix_rank=2)": 1.80e-3 / 124e6,
    "PowerSGD(matrix_rank=4)": 1.80e-3 / 124e6,
    "PowerSGD(matrix_rank=4, alternating=True)": 1.80e-3 / 124e6,
    "PowerSGD(matrix_rank=8)": 2.37e-3 / 124e6,
    "PowerSGD(matrix_rank=16)": 5.86e-3 / 124e6,
    "TopK(density=1 / 32)": 2.12e-3 / 124e6,
}
COLLECTIVES: dict[type[Algorithm], tuple[Collective, ...]] = {
    Quantize: ("all_to_all", "all_gather"),
    TopK: ("all_gather",),
}
FORWARD_SHARE = 1 / 3  # share of compute time: a backward pass takes about twice as long
BLOCKS_SHARE = 0.85  # share of the parameters; the rest is the embedding
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's defaults
LEAST_GAIN = 0.05  # the default of `thinwire.advise`
MAX_PARAMETERS = 10**12
MOMENT = 1e-9  # added to order simultaneous events


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
    total_steps, model = checked_steps(total_steps), stand_in(parameters)
    training = Training.of(model, optimizer_name(optimizer), link.members, total_steps)
    steps = planned_steps(model, compute_seconds, training)
    is_free_inside = link.processes > 1 and not link.inside_seconds(steps.gradient_bytes)
    # No step was timed, so the probe's machines do not matter.
    unnamed = replace(link, probe=replace(link.probe, hosts=[]))
    notes = (
        *notes_on_losses(optimizer, total_steps),
        "Predicted for a transformer of typical shapes, gradients in fp32, in DDP's buckets of 25 MB, "
        f"and the arithmetic of {ARITHMETIC_SOURCE}. On CPUs compression takes many times as long.",
        *notes_on_link(unnamed, 1, torch.device(link.probe.device)),
        *(["Averaging inside of a machine is taken to cost nothing."] if is_free_inside else []),
        "thinwire.advise(model, one_step, probe) makes the same table from timed steps of your own model.",
    )
    return steps.advice(link, LEAST_GAIN, checked_budget(budget_loss), notes)


def stand_in(parameters: int, device: str = "meta") -> nn.Module:
    """Return a model with exactly this many parameters: an embedding and torch's transformer blocks."""
    # Depth is about width / 64, as in GPT-2 and GPT-3; a block has 12 width² + 13 width parameters.
    width = max(1, round((BLOCKS_SHARE * parameters / 12 * 64) ** (1 / 3) / 64)) * 64
    num_blocks = int(BLOCKS_SHARE * parameters / (12 * width**2 + 13 * width))
    rows, rest = divmod(parameters - num_blocks * (12 * width**2 + 13 * width), width)
    # Drawing normal numbers on the meta device would import torch's compiler, which takes a second.
    table = torch.zeros(rows, width, device=device)
    layers: dict[str, nn.Module] = {}
    layers["embedding"] = nn.Embedding.from_pretrained(table, freeze=False)  # type: ignore[no-untyped-call]
    for index in range(num_blocks):
        layers[f"block{index}"] = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, device=device
        )
    model = nn.Sequential(OrderedDict(layers))
    if rest:
        model.register_parameter("rest", nn.Parameter(torch.zeros(rest, device=device)))
    return model


def planned_steps(model: nn.Module, compute_seconds: float, training: Training) -> PricedSteps:
    """Return steps planned with DDP's buckets; gradients become ready at an even rate."""
    # Gradients are ready from the last layer to the first.
    specs = [ParameterSpec.of(name, parameter) for name, parameter in model.named_parameters()][::-1]
    gradient_bytes = sum(spec.gradient_bytes for spec in specs)
    steps, buckets = PricedSteps(training, InProcessTransport.group(1)[0], gradient_bytes), in_buckets(specs)
    steps.alone.timelines.append(Timeline((), compute_seconds))
    for name, variant in steps.variants.items():
        algorithm, arithmetic_seconds = variant.algorithm, training.parameters * ARITHMETIC_SECONDS[name]
        plans = [algorithm.prepare(bucket, num_members=training.members) for bucket in buckets]
        # Half of the arithmetic comes before a bucket's message, the rest after all means have arrived.
        backward_seconds = (1 - FORWARD_SHARE) * compute_seconds + arithmetic_seconds / 2
        done = accumulate(sum(spec.gradient_bytes for spec in bucket) for bucket in buckets)
        shares = [num_bytes / gradient_bytes for num_bytes in done]
        ready = [FORWARD_SHARE * compute_seconds + backward_seconds * share for share in shares]
        sent = in_turn(plans, ready) if algorithm.pipelines_buckets else together(plans, ready)
        kinds = COLLECTIVES.get(type(algorithm), ("all_reduce", "all_reduce"))
        messages = tuple(
            Sent(at, handed_bytes(kinds[which], num_bytes, training.members), waited, kinds[which])
            for at, num_bytes, waited, which in sorted(sent)
        )
        compressed = [route for plan in plans for route in plan.routes if route.is_compressed]
        residual_bytes = algorithm.remembers * sum(route.gradient_bytes for route in compressed)
        timeline = Timeline(messages, compute_seconds + arithmetic_seconds)
        steps.timed[name] = TimedSteps([timeline], residual_bytes, residual_bytes)
    return steps


def handed_bytes(collective: Collective, message_bytes: int, members: int) -> int:
    """Return the bytes that a process contributes, from bytes counted as for an all-reduce."""
    if collective == "all_gather":
        return 2 * message_bytes // members
    return 2 * message_bytes if collective == "all_to_all" else message_bytes


def in_buckets(specs: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Return DDP's buckets: each is closed when it has enough bytes, and the first is smaller."""
    buckets, enough = [list[ParameterSpec]()], FIRST_BUCKET_BYTES
    for spec in specs:
        if sum(member.gradient_bytes for member in buckets[-1]) >= enough:
            buckets.append([])
            enough = BUCKET_BYTES
        buckets[-1].append(spec)
    return buckets


# A message: when it is sent, its bytes, when its mean is needed, and its number in its bucket.
Planned = tuple[float, int, float, int]


def round_bytes(plan: BucketPlan, which: int) -> int:
    """Return the bytes of one of a bucket's rounds; routes with fewer rounds use the first ones."""
    return sum(route.message_bytes // route.rounds for route in plan.routes if route.rounds > which)


def together(plans: Sequence[BucketPlan], ready: Sequence[float]) -> Iterator[Planned]:
    """Yield each bucket's first message when it is ready, and the later ones of all at the end."""
    end = ready[-1] + MOMENT
    for plan, seconds in zip(plans, ready, strict=True):
        yield seconds, round_bytes(plan, 0), end, 0
    for later in range(1, max(route.rounds for plan in plans for route in plan.routes)):
        at = end + 2 * later * MOMENT
        yield at, sum(round_bytes(plan, later) for plan in plans), at + MOMENT, later


def in_turn(plans: Sequence[BucketPlan], ready: Sequence[float]) -> Iterator[Planned]:
    """Yield the two messages of each bucket: the second is sent when the next bucket has sent its first."""
    end = ready[-1] + 3 * MOMENT
    waits = [*(seconds + MOMENT for seconds in ready[1:]), end, end, end + 2 * MOMENT]
    for index, plan in enumerate(plans):
        yield ready[index], round_bytes(plan, 0), waits[index], 0
        # It is awaited together with the first message sent after it.
        yield waits[index] + MOMENT, round_bytes(plan, 1), waits[index + 2], 1
