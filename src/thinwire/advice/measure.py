"""Predicting step times: each algorithm's own work is measured here, the network comes from a probe."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.advice.local import LocalBench, local_benches
from thinwire.advice.loss import (
    EXACT_LOSS,
    Training,
    expected_loss,
    optimizer_name,
    optimizer_note,
    published_gap,
)
from thinwire.advice.result import Advice, Prediction, choose, is_within, tied
from thinwire.advice.timeline import Network, Stopwatch, Timeline
from thinwire.algorithms import registry
from thinwire.algorithms.registry import Variant
from thinwire.channel import (
    Collective,
    ProcessGroupTransport,
    Transport,
    gather_numbers,
    own_subgroup,
    wire_bytes,
)
from thinwire.checks import number
from thinwire.errors import ConfigError
from thinwire.fronts.ddp import BucketFront, front_of, thinwire_hook
from thinwire.fronts.ddp_model import is_sharded, register
from thinwire.probe import Probe
from thinwire.probe import probe as measure_network

__all__ = ["BASELINE", "EXACT", "advise", "priced"]

# 16 bits lose nothing that was measured, and every backend carries them: that is what compression must beat.
EXACT, BASELINE, OVERFLOWING = "AllReduce()", 'Cast("bf16")', 'Cast("fp16")'
# DDP arranges its buckets anew after its first step; fronts agree, plan and compile in theirs.
UNTIMED_ROUNDS = 2
# Below, there are no quartiles.
MIN_ROUNDS = 5

OneStep = Callable[[nn.Module], object]


def priced() -> dict[str, Variant]:
    """Return the algorithms that are priced, as they are written in code."""
    return {variant.code: variant for each in registry.REGISTRY for variant in each.priced}


def advise(
    model: nn.Module,
    one_step: OneStep,
    probe: Probe | None = None,
    *,
    budget_seconds: float = 30.0,
    least_gain: float = 0.05,
    budget_loss: float = 0.01,
    optimizer: torch.optim.Optimizer | str | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Advice:
    """Predict the step time of each algorithm for a model, on the network that was probed, and its loss gap.

    The model is copied (a DDP model's options are not); a step of the copy is timed with every algorithm
    on this process, without any network, noting which message would have been sent when. The probe tells
    how long each would have been under way, and of as many steps as there are processes the slowest sets
    the pace. Loss gaps are those that were measured with small models, by optimizer and number of members
    (`loss_gaps.json` beside this module): yours may be others.

    Args:
        model: A module, or a `DistributedDataParallel` model, whose module is taken.
        one_step: Is called with a DDP model of the copy; to make a batch, run forward and backward. What else
            it does (an optimizer's step) counts in every prediction.
        probe: Of the network; None to probe the default process group now, which is collective.
        budget_seconds: About how long the measuring may take.
        least_gain: What an approximation must win over the fastest of exact and 16-bit averaging to be
            advised, as a share of the step.
        budget_loss: The largest expected gap to exact averaging's loss that is advised, as a share of it:
            0.01 is 1 %. `math.inf` for any, known or not.
        optimizer: What trains the model, or its name, such as "AdamW": loss gaps depend on it. With another
            one than was measured with, and with None, the largest gap of those counts.
        progress: Gets what is being measured, in words.

    To be called on every process of the default process group, or in a group of one; the result is the
    same on all. A module that communicates by itself (SyncBatchNorm) must do so in every process alike.

    Cost: a copy of the model and its gradients, and for each algorithm what it keeps between steps, while it
    runs.

    Raises:
        ConfigError: `one_step` does not run a backward pass, the model is sharded, on several devices or all
            frozen, or an argument is out of range.
        AttachError: There is no process group.
        GradientError: Gradients are sparse.
    """
    name = None if optimizer is None else optimizer_name(optimizer)
    budget_loss = number("budget_loss", budget_loss, minimum=0)
    if not 0 < number("budget_seconds", budget_seconds, minimum=0) < math.inf:
        raise ConfigError(f"budget_seconds must be above 0 and finite, got {budget_seconds}")
    if not number("least_gain", least_gain, minimum=0) < 1:
        raise ConfigError(f"least_gain must be a share below 1, such as 0.05 for 5 %, got {least_gain}")
    if not isinstance(probe, Probe | None):
        raise ConfigError(f"probe must be what thinwire.probe or Probe.load returned, or None, got {probe!r}")
    module, device = _copied(model)
    transport = ProcessGroupTransport()
    probe = measure_network() if probe is None else probe
    with _alone(module) as ddp, ExitStack() as entered:
        bench = _Bench(ddp, one_step, Stopwatch(probe.world_size, device), entered)
        bench.run(budget_seconds, transport, progress)

    # Of any network: the rate at which compressing begins to win is found by asking again.
    def predictions(network: Network) -> list[Prediction]:
        return _agreed(bench.predictions(network, probe.world_size), transport)

    training = Training.of(module, name, probe.world_size)
    found = predictions(probe.collective_seconds)
    ranked = sorted(_with_losses(found, bench, training), key=lambda each: each.step_seconds)
    # Of the two kinds of 16 bits only the one that no gradient is too large for: they send the same.
    advisable = [each for each in ranked if each.name != OVERFLOWING]
    within = [each for each in advisable if is_within(each, budget_loss)]
    # Without averaging, too, the slowest of as many processes sets the pace.
    own_seconds, *_ = _slowest_of([each.seconds for each in bench.without_averaging], probe.world_size)
    return Advice(
        predictions=tuple(ranked),
        baseline=next(each for each in ranked if each.name == BASELINE),
        best=choose(advisable, least_gain, budget_loss),
        tied=tuple(tied(within)),
        break_even_bits_per_second=_break_even(
            predictions, [each.name for each in within if each.is_lossy], probe, least_gain
        ),
        compute_seconds=_mean_over_processes([own_seconds], transport)[0],
        least_gain=least_gain,
        budget_loss=budget_loss,
        optimizer=name,
        notes=tuple(_notes(training, probe, transport.size, device)),
    )


def _copied(model: nn.Module) -> tuple[nn.Module, torch.device]:
    """Return a copy of a model's module, so that neither gradients nor hooks are left behind, and its device.

    Raises:
        ConfigError: It is none that one process can train by itself, on one device.
    """
    # Of a compiled model the module inside: what is compiled can't be copied.
    given = getattr(model, "_orig_mod", model)
    if not isinstance(given, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {model!r:.200}")
    if is_sharded(given):
        raise ConfigError(
            "advise times the whole model on each process, got one that is sharded (FSDP), which can't be "
            "copied; pass the plain module, as it is before fully_shard"
        )
    if not any(each.requires_grad for each in given.parameters()):
        raise ConfigError("no parameter of the model is trained, so there is nothing to average")
    devices = {parameter.device for parameter in given.parameters()}
    if len(devices) > 1:
        places = " and ".join(sorted(map(str, devices)))
        raise ConfigError(f"advise times the work of one device, got a model on {places}; put it on one")
    (device,) = devices
    return copy.deepcopy(given.module if isinstance(given, DistributedDataParallel) else given), device


def _with_losses(found: Sequence[Prediction], bench: _Bench, training: Training) -> list[Prediction]:
    """Add what is known of the loss, and the place of each among all."""
    local = {each.way.name: each.way for each in bench.local}
    with_loss = []
    for each in found:
        if each.name in local:
            name, bounds = each.name, {"loses_more_than": local[each.name].loses_more_than}
        else:
            variant = bench.variants[each.name]
            # In the table, algorithms have the names that they print.
            name = str(variant.algorithm)
            bounds = {
                "loses_more_than": variant.loses_more_than,
                "loses_less_than": variant.loses_less_than,
            }
        with_loss.append(
            replace(
                each,
                loss=EXACT_LOSS if each.name == EXACT else expected_loss(name, training, **bounds),
                published=published_gap(name, training),
            )
        )
    # Equal gaps have one place: then time decides. Unknown ones are infinite, and come last.
    orders = sorted({each.loss.order for each in with_loss if each.is_lossy})
    return [
        replace(each, loss_gap_order=1 + orders.index(each.loss.order)) if each.is_lossy else each
        for each in with_loss
    ]


def _notes(training: Training, probe: Probe, num_processes: int, device: torch.device) -> Iterator[str]:
    """Yield what makes the advice less certain, in words."""
    if (note := optimizer_note(training.optimizer)) is not None:
        yield note
    if training.is_recurrent:
        yield (
            "The model has an RNN: what was not measured with an LSTM has the gap of transformers, which may "
            "be less."
        )
    # One process alone may ask about any network: that is what the command does.
    if num_processes not in (1, probe.world_size):
        yield (
            f"The probe is of {probe.world_size} processes, this job has {num_processes}: what is predicted "
            f"is for {probe.world_size}."
        )
    if device.type != "cpu":
        yield (
            "Each bucket has launches of its own: where no message could hide behind the backward pass, "
            "DistributedDataParallel(..., bucket_cap_mb=10_000) makes one bucket of them all."
        )
    if probe.device != device.type:
        yield f"The probe is of messages on {probe.device}; what is timed here runs on {device.type}."


def _agreed(predictions: Sequence[Prediction], transport: Transport) -> list[Prediction]:
    """Return the mean of what the processes predict: the same on all, so that all choose alike."""
    own = [(each.step_seconds, each.low_seconds, each.high_seconds) for each in predictions]
    # All in one message: there are a hundred numbers, and tens of networks to ask about.
    means = iter(_mean_over_processes([seconds for three in own for seconds in three], transport))
    return [
        replace(each, step_seconds=next(means), low_seconds=next(means), high_seconds=next(means))
        for each in predictions
    ]


def _mean_over_processes(numbers: Sequence[float], transport: Transport) -> list[float]:
    everyone = gather_numbers(numbers, transport, "advise: what the processes have measured")
    return [fmean(column) for column in zip(*everyone, strict=True)]


@contextmanager
def _alone(module: nn.Module) -> Iterator[DistributedDataParallel]:
    """Make a DDP model in a group of this process only."""
    # In a larger one, DDP would broadcast buffers in each step, among processes that each measure alone.
    group = own_subgroup(1, None)
    try:
        yield DistributedDataParallel(module, process_group=group)
    finally:
        dist.destroy_process_group(group)


class _Turns:
    """Hands DDP's buckets to the front whose turn it is: DDP takes one hook only."""

    def __init__(self, front: BucketFront) -> None:
        self.front = front

    def run(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """As `BucketFront.run`."""
        return self.front.run(bucket)


class _Bench:
    """Steps with every algorithm in turn, so that a busy machine slows all of them."""

    def __init__(
        self, ddp: DistributedDataParallel, one_step: OneStep, stopwatch: Stopwatch, entered: ExitStack
    ) -> None:
        self.ddp, self.one_step, self.stopwatch = ddp, one_step, stopwatch
        self.variants = priced()
        self.fronts: dict[str, BucketFront] = {
            code: front_of(ddp, variant.algorithm, self.stopwatch.transport)
            for code, variant in self.variants.items()
        }
        self.turns = _Turns(self.fronts[EXACT])
        # DDP takes one hook, and never another one: whose turn it is changes behind it.
        register(ddp, self.turns, thinwire_hook)
        self.timelines: dict[str, list[Timeline]] = {code: [] for code in self.variants}
        self.memory_bytes: dict[str, int] = {}
        self.without_averaging: list[Timeline] = []
        self.local = local_benches(ddp.module, self.stopwatch, entered)

    def run(self, budget_seconds: float, transport: Transport, progress: Callable[[str], None]) -> None:
        """Make as many rounds as the time allows, equally many on all processes; the first are not counted.

        Args:
            budget_seconds: About how long it may take.
            transport: Between the processes.
            progress: Gets what is being measured, in words.
        """
        start = time.perf_counter()
        for _ in range(UNTIMED_ROUNDS):
            progress("untimed steps")
            self._round()
        timed = (each.averaging.timelines for each in self.local)
        for timelines in (self.without_averaging, *self.timelines.values(), *timed):
            timelines.clear()
        own_seconds = (time.perf_counter() - start) / UNTIMED_ROUNDS
        # Of all processes: a module that communicates by itself must run equally often everywhere.
        round_seconds = _mean_over_processes([own_seconds], transport)[0]
        # The budget bends where steps are long: fewer would tell nothing.
        num_rounds = max(MIN_ROUNDS, int(budget_seconds / round_seconds) - UNTIMED_ROUNDS)
        for done in range(num_rounds):
            progress(f"round {done + 1} of {num_rounds}, a step with every algorithm")
            self._round()
        # While they are there: what the fronts keep goes with them.
        self.memory_bytes = {code: front.engine.memory_bytes() for code, front in self.fronts.items()}
        for each in self.local:
            each.averaging.note_memory()

    def predictions(self, network: Network, world_size: int) -> list[Prediction]:
        """Return what each way of averaging would take.

        Args:
            network: Tells how long messages take.
            world_size: Processes.
        """
        of_gradients = [
            _predicted(variant, self.timelines[code], self.memory_bytes[code], network, world_size)
            for code, variant in self.variants.items()
        ]
        return of_gradients + [
            _predicted_local(each, self.without_averaging, network, world_size) for each in self.local
        ]

    def _round(self) -> None:
        # DDP calls no hook in there.
        with self.ddp.no_sync():
            self.without_averaging.append(self._step())
        for code, front in self.fronts.items():
            self.turns.front = front
            timeline = self._step()
            # DDP calls its hook in a backward pass only.
            if not timeline.sent:
                raise ConfigError(
                    "one_step(model) must run a backward pass on the model that it is given, through all of "
                    "its parameters"
                )
            self.timelines[code].append(timeline)
        # Without gradients, so that what the inner optimizers take is no time at all.
        self.ddp.zero_grad(set_to_none=True)
        for averaging in dict.fromkeys(each.averaging for each in self.local):
            averaging.make()

    def _step(self) -> Timeline:
        self.ddp.zero_grad()
        self.stopwatch.start()
        self.one_step(self.ddp)
        return self.stopwatch.timeline()


def _predicted(
    variant: Variant, timelines: Sequence[Timeline], memory_bytes: int, network: Network, world_size: int
) -> Prediction:
    return Prediction(
        variant.code,
        f"thinwire.attach(ddp_model, thinwire.{variant.code})",
        *_slowest_of([each.step_seconds(network) for each in timelines], world_size),
        # Of the last step: in the first one processes compare settings as well.
        message_bytes=timelines[-1].message_bytes(world_size),
        memory_bytes=memory_bytes,
        is_lossy=not variant.keeps_16_bits,
        loss_gap_order=0,
        sent_bytes=timelines[-1].wire_bytes(world_size),
        received_bytes=timelines[-1].wire_bytes(world_size),
    )


def _predicted_local(
    local: LocalBench, alone: Sequence[Timeline], network: Network, world_size: int
) -> Prediction:
    message_bytes, sent_bytes = local.bytes_per_step(world_size)
    step_seconds, *quartiles = _slowest_of([each.seconds for each in alone], world_size)
    extra_seconds = local.extra_seconds(network, step_seconds)
    # Between two averagings nobody waits for anybody: the mean of so many steps varies so much less than one
    # of them does. With the quartiles of single steps, all ways would tie wherever a machine has other work.
    narrower = math.sqrt(local.way.every_steps / local.way.fragments)
    low_seconds, high_seconds = (step_seconds + (each - step_seconds) / narrower for each in quartiles)
    return Prediction(
        local.way.name,
        local.way.code,
        step_seconds + extra_seconds,
        low_seconds + extra_seconds,
        high_seconds + extra_seconds,
        message_bytes=message_bytes,
        memory_bytes=local.averaging.memory_bytes,
        is_lossy=True,
        loss_gap_order=0,
        averages_less_often=True,
        sent_bytes=sent_bytes,
        received_bytes=sent_bytes,
    )


def _slowest_of(seconds: Sequence[float], world_size: int) -> tuple[float, float, float]:
    """Return median and quartiles of the slowest of as many steps as there are processes."""
    # Of k independent steps, all are below a time with the k-th power of the chance that one is.
    ordered = sorted(seconds)

    def below(share: float) -> float:
        return ordered[math.ceil(len(ordered) * math.pow(share, 1 / world_size)) - 1]

    return below(0.5), below(0.25), below(0.75)


def _break_even(
    predictions: Callable[[Network], list[Prediction]],
    within_budget: Collection[str],
    probe: Probe,
    least_gain: float,
) -> float:
    """Return the bits per second below which the fastest compression wins enough over the baseline.

    Args:
        predictions: On a network.
        within_budget: Names of what may be advised.
        probe: Of the network that there is.
        least_gain: As of `advise`.
    """

    def gain_seconds(bits_per_second: float) -> float:
        def network(collective: Collective, handed_bytes: int) -> float:
            # A network of that rate alone: its latency is the probed one's.
            bits = 8 * wire_bytes(collective, handed_bytes, probe.world_size)
            return probe.latency_seconds + probe.wire_factor(collective) * bits / bits_per_second

        found = predictions(network)
        compressed = [each for each in found if each.is_lossy and not each.averages_less_often]
        accepted = [each for each in compressed if each.name in within_budget] or compressed
        baseline = next(each.step_seconds for each in found if each.name == BASELINE)
        return (1 - least_gain) * baseline - min(each.step_seconds for each in accepted)

    # By bisection on a logarithmic scale: the slower the link, the more compression wins.
    low, high = 1e5, 1e13
    if gain_seconds(low) <= 0:
        return 0.0
    if gain_seconds(high) > 0:
        return math.inf
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain_seconds(middle) > 0 else (low, middle)
    return low
