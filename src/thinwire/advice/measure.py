"""Predicting step times: each algorithm's own work is measured here, the network comes from a probe."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.advice.result import Advice, Prediction, choose, tied
from thinwire.advice.timeline import RecordingChannel, Timeline
from thinwire.algorithms import Algorithm, AllReduce, Cast, PowerSGD
from thinwire.algorithms.lowrank import LowRank
from thinwire.channel import ProcessGroupChannel
from thinwire.ddp import front_of, register, thinwire_hook
from thinwire.engine import Engine
from thinwire.errors import ConfigError
from thinwire.probe import Probe
from thinwire.probe import probe as measure_network
from thinwire.probe.result import ring_share

__all__ = ["ALGORITHMS", "advise"]

BASELINE = 'Cast("bf16")'
ALGORITHMS: dict[str, Algorithm] = {
    "AllReduce()": AllReduce(),
    BASELINE: Cast("bf16"),
    "PowerSGD(matrix_rank=1)": PowerSGD(matrix_rank=1),
    "PowerSGD(matrix_rank=2)": PowerSGD(matrix_rank=2),
    "PowerSGD(matrix_rank=4)": PowerSGD(matrix_rank=4),
    "PowerSGD(matrix_rank=8)": PowerSGD(matrix_rank=8),
    "PowerSGD(matrix_rank=4, alternating=True)": PowerSGD(matrix_rank=4, alternating=True),
}
LOCAL_EVERY_STEPS = 10
LOCAL_SGD = f"LocalSGD(every_steps={LOCAL_EVERY_STEPS})"
# From the smallest: losses after equally many steps, and steps to the same loss
# (benchmarks/results/2026-11-21-quality.md, -quality-powersgd-4-powersgd-8-alternating.md, -time-to-loss.md).
WITH_LOSS_GAPS = (
    LOCAL_SGD,
    "PowerSGD(matrix_rank=8)",
    "PowerSGD(matrix_rank=4)",
    "PowerSGD(matrix_rank=2)",
    "PowerSGD(matrix_rank=4, alternating=True)",
    "PowerSGD(matrix_rank=1)",
)
UNTIMED_ROUNDS = 3
LEAST_ROUNDS = 5

OneStep = Callable[[nn.Module], object]
Network = Callable[[float], float]


def advise(
    model: nn.Module,
    one_step: OneStep,
    probe: Probe | None = None,
    *,
    budget_seconds: float = 30.0,
    least_gain: float = 0.05,
    progress: Callable[[str], None] = lambda told: None,
) -> Advice:
    """Predict the step time of each algorithm for a model, on the network that was probed.

    The model is copied (a DDP model's options are not); a step of the copy is timed with every algorithm
    on this process, without any network, noting which message would have been sent when. The probe tells
    how long each would have been under way, and of as many steps as there are processes the slowest sets
    the pace.

    Args:
        model: A module, or a `DistributedDataParallel` model, whose module is taken.
        one_step: Is called with a DDP model of the copy; to make a batch, run forward and backward. What else
            it does (an optimizer's step) counts in every prediction.
        probe: Of the network; None to probe the default process group now, which is collective.
        budget_seconds: About how long the measuring may take.
        least_gain: What an approximation must win over the fastest of exact and 16-bit averaging to be
            advised, as a share of the step.
        progress: Is told what is being measured.

    To be called on every process of the default process group, or in a group of one; the result is the
    same on all. A module that communicates by itself (SyncBatchNorm) must do so in every process alike.

    Cost: a copy of the model, its gradients and its error memory, while it runs.

    Raises:
        ConfigError: `one_step` does not run a backward pass, the model is on a GPU, or an argument is out of
            range.
        AttachError: There is no process group, or the model can't be wrapped.
    """
    if not 0 < budget_seconds < math.inf or not 0 <= least_gain < 1:
        raise ConfigError(
            f"budget_seconds must be above 0 and finite, least_gain at least 0 and below 1, got "
            f"{budget_seconds} and {least_gain}"
        )
    channel = ProcessGroupChannel()
    given = getattr(model, "_orig_mod", model)
    module = copy.deepcopy(given.module if isinstance(given, DistributedDataParallel) else given)
    if any(parameter.is_cuda for parameter in module.parameters()):
        raise ConfigError(
            "advise times the host, which is not when a GPU works: give it the model on the CPU"
        )
    probe = measure_network() if probe is None else probe
    with _alone(module) as ddp:
        bench = _Bench(ddp, one_step)
        bench.run(budget_seconds, channel, progress)
        measured = {
            name: (timelines, _memory_bytes(bench.engines[name]))
            for name, timelines in bench.timelines.items()
        }
    alone = bench.without_averaging
    own_seconds, *_ = _slowest_of([each.seconds for each in alone], probe.world_size)
    compute = torch.tensor([own_seconds], dtype=torch.float64)
    compute_seconds = channel.average(compute, "advise", is_gradient=False).wait().item()
    gradient_bytes = sum(each.message_bytes for each in measured["AllReduce()"][0][-1].sent)

    def predictions(network: Network) -> list[Prediction]:
        found = [
            _predicted(name, timelines, memory_bytes, network, probe.world_size)
            for name, (timelines, memory_bytes) in measured.items()
        ]
        return _agreed([*found, _local(alone, gradient_bytes, network, probe.world_size)], channel)

    ranked = sorted(predictions(probe.average_seconds), key=lambda each: each.step_seconds)
    return Advice(
        predictions=tuple(ranked),
        baseline=next(each for each in ranked if each.name == BASELINE),
        best=choose(ranked, least_gain),
        tied=tuple(tied(ranked)),
        break_even_bits_per_second=_break_even(predictions, probe, least_gain),
        compute_seconds=compute_seconds,
        least_gain=least_gain,
    )


def _agreed(predictions: Sequence[Prediction], channel: ProcessGroupChannel) -> list[Prediction]:
    """The mean of what the processes predict: the same on all, so that all choose alike."""
    names = ("step_seconds", "low_seconds", "high_seconds")
    own = torch.tensor([[getattr(each, name) for name in names] for each in predictions], dtype=torch.float64)
    means = channel.average(own.view(-1), "advise", is_gradient=False).wait().view_as(own).tolist()
    return [
        replace(each, **dict(zip(names, seconds, strict=True)))
        for each, seconds in zip(predictions, means, strict=True)
    ]


@contextmanager
def _alone(module: nn.Module) -> Iterator[DistributedDataParallel]:
    """A DDP model in a group of this process only."""
    ranks = range(dist.get_world_size())
    groups = [dist.new_group([process_rank]) for process_rank in ranks]
    group = groups[dist.get_rank()]
    try:
        yield DistributedDataParallel(module, process_group=group)
    finally:
        dist.destroy_process_group(group)


class _Bench:
    """Steps with every algorithm in turn, so that a busy machine slows all of them."""

    def __init__(self, ddp: DistributedDataParallel, one_step: OneStep) -> None:
        self.ddp, self.one_step = ddp, one_step
        self.channel = RecordingChannel()
        self.front = front_of(ddp, AllReduce(), self.channel)
        register(ddp, self.front, thinwire_hook)
        specs = self.front.engine.specs
        self.engines = {name: Engine(each, self.channel, specs) for name, each in ALGORITHMS.items()}
        self.timelines: dict[str, list[Timeline]] = {name: [] for name in ALGORITHMS}
        self.without_averaging: list[Timeline] = []

    def run(
        self, budget_seconds: float, channel: ProcessGroupChannel, progress: Callable[[str], None]
    ) -> None:
        """As many rounds as the time allows, equally many on all processes; the first are not counted."""
        start = time.perf_counter()
        for _ in range(UNTIMED_ROUNDS):
            progress("untimed steps")
            self._round()
        for each in (self.without_averaging, *self.timelines.values()):
            each.clear()
        round_seconds = torch.tensor([(time.perf_counter() - start) / UNTIMED_ROUNDS], dtype=torch.float64)
        round_seconds = channel.average(round_seconds, "advise", is_gradient=False).wait()
        num_rounds = max(LEAST_ROUNDS, int(budget_seconds / round_seconds.item()) - UNTIMED_ROUNDS)
        for number in range(num_rounds):
            progress(f"round {number + 1} of {num_rounds}, a step with every algorithm")
            self._round()

    def _round(self) -> None:
        with self.ddp.no_sync():
            self.without_averaging.append(self._step())
        for name, engine in self.engines.items():
            self.front.engine = engine
            timeline = self._step()
            if not timeline.sent:
                raise ConfigError(
                    "one_step(model) must run a backward pass on the model that it is given, through all of "
                    "its parameters"
                )
            self.timelines[name].append(timeline)

    def _step(self) -> Timeline:
        self.ddp.zero_grad()
        self.channel.start()
        self.one_step(self.ddp)
        return self.channel.timeline()


def _memory_bytes(engine: Engine) -> int:
    memory = engine._memory
    kept = [*memory.error.values(), *memory.factor.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def _predicted(
    name: str, timelines: Sequence[Timeline], memory_bytes: int, network: Network, world_size: int
) -> Prediction:
    is_lossy = isinstance(ALGORITHMS[name], LowRank)
    return Prediction(
        name,
        f"thinwire.attach(ddp_model, thinwire.{name})",
        *_slowest_of([each.step_seconds(network) for each in timelines], world_size),
        message_bytes=sum(each.message_bytes for each in timelines[-1].sent),
        memory_bytes=memory_bytes,
        is_lossy=is_lossy,
        loss_gap_order=1 + WITH_LOSS_GAPS.index(name) if is_lossy else 0,
    )


def _local(alone: Sequence[Timeline], num_bytes: int, network: Network, world_size: int) -> Prediction:
    """Each process on its own, and whole models averaged now and then: nothing of that overlaps."""
    averaging_seconds = network(num_bytes) / LOCAL_EVERY_STEPS
    return Prediction(
        LOCAL_SGD,
        f"with thinwire.LocalSGD(model, optimizer, every_steps={LOCAL_EVERY_STEPS}):",
        *_slowest_of([each.seconds + averaging_seconds for each in alone], world_size),
        message_bytes=num_bytes / LOCAL_EVERY_STEPS,
        memory_bytes=num_bytes,
        is_lossy=True,
        loss_gap_order=1 + WITH_LOSS_GAPS.index(LOCAL_SGD),
        averages_less_often=True,
    )


def _slowest_of(seconds: Sequence[float], world_size: int) -> tuple[float, float, float]:
    """Median and quartiles of the slowest of as many steps as there are processes.

    Of k independent steps, all are below a time with the k-th power of the chance that one is.
    """
    ordered = sorted(seconds)

    def below(share: float) -> float:
        return ordered[math.ceil(len(ordered) * math.pow(share, 1 / world_size)) - 1]

    return below(0.5), below(0.25), below(0.75)


def _break_even(predictions: Callable[[Network], list[Prediction]], probe: Probe, least_gain: float) -> float:
    """Bits a second below which the fastest low-rank approximation wins enough over the baseline."""

    def gain_seconds(bits_per_second: float) -> float:
        byte_seconds = ring_share(probe.world_size) * 8 / bits_per_second
        found = predictions(lambda num_bytes: probe.latency_seconds + num_bytes * byte_seconds)
        low_rank = min(each.step_seconds for each in found if each.name.startswith("PowerSGD"))
        baseline = next(each.step_seconds for each in found if each.name == BASELINE)
        return (1 - least_gain) * baseline - low_rank

    low, high = 1e5, 1e13
    if gain_seconds(low) <= 0:
        return 0.0
    if gain_seconds(high) > 0:
        return math.inf
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain_seconds(middle) > 0 else (low, middle)
    return low
