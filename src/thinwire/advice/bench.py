"""Steps with one way of averaging after the other, without a network; and what they would take on one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.adapters.ddp import DDPAdapter, adapter_of, switched
from thinwire.advice.loss import Training, published_gap
from thinwire.advice.result import Prediction
from thinwire.advice.timeline import Network, Stopwatch, Timeline
from thinwire.advice.variants import (
    BASELINE,
    LOCAL_VARIANTS,
    NATIVE,
    LocalVariant,
    code_of,
    expected_losses,
    priced,
)
from thinwire.algorithms import Algorithm
from thinwire.comm import Transport, gather_numbers, own_subgroup
from thinwire.errors import ConfigError, GradientError
from thinwire.local_sgd import LocalSGD
from thinwire.sync import Engine, engine_of

if TYPE_CHECKING:
    from thinwire.advice.sharded import Sharded

# Steps of a turn: in their first step adapters agree, plan and compile; in the second they have a residual.
UNTIMED_STEPS, TIMED_STEPS = 2, 3
# One in each direction, so that no algorithm is always the first.
MIN_ROUNDS = 2

OneStep = Callable[[nn.Module], object]
Quartiles = tuple[float, float, float]  # the median comes first


class Replicated:
    """A copy of the user's model, in a DDP group of this process only: a subject, as `Sharded` is."""

    shards: int | None = None  # processes that hold a replica together; None if each holds all of it

    def __init__(self, module: nn.Module, transport: Transport, entered: ExitStack) -> None:
        # In a larger one, DDP would broadcast buffers in each step, among processes that each measure alone.
        group = own_subgroup(1, None)
        entered.callback(dist.destroy_process_group, group)
        # Steps train `model`; adapters that average whole models are given `module`.
        self.module, self._transport = module, transport
        self._ddp = DistributedDataParallel(module, process_group=group)
        self.model: nn.Module = self._ddp
        self._adapter: DDPAdapter | None = None
        switched(self._ddp, lambda: self._adapter, "advise")

    @contextmanager
    def turn_of(self, algorithm: Algorithm | None) -> Iterator[Engine | None]:
        """Average steps with an algorithm, or not at all.

        The engine is made for this turn alone: what algorithms remember is as large as the model.
        """
        if algorithm is None:
            with self._ddp.no_sync():  # DDP calls no hook in there
                yield None
            return
        self._adapter = adapter_of(self._ddp, algorithm, self._transport)
        try:
            yield self._adapter.engine
        finally:
            self._adapter = None


@dataclass
class Timed:
    """Timings of a way of averaging, of steps or of averagings of the whole model; and what it keeps."""

    timelines: list[Timeline] = field(default_factory=list)
    memory_bytes: int = 0
    residual_bytes: int = 0


class Bench:
    """Steps with one algorithm after the other, each made again for its turn, so that one alone takes memory.

    In several rounds, in one direction and then in the other, so that a busy machine slows all of them.
    """

    def __init__(
        self, subject: Replicated | Sharded, one_step: OneStep, stopwatch: Stopwatch, training: Training
    ) -> None:
        self.subject, self.one_step, self.stopwatch, self.training = subject, one_step, stopwatch, training
        self.baseline = BASELINE if subject.shards is None else NATIVE
        self.variants = {
            self.baseline if code == BASELINE else code: variant for code, variant in priced().items()
        }
        self.losses = expected_losses(training)
        self.alone = Timed()
        self.ways: list[tuple[str, LocalVariant | None, Timed]] = [(n, None, Timed()) for n in self.variants]
        # Distances, delays and outer rates change nothing in how long an averaging of everything takes.
        self.averagings: dict[tuple[type[LocalSGD], Algorithm | None], Timed] = {}
        for local in LOCAL_VARIANTS:
            try:
                # With all its settings: a model may have fewer layers than fragments.
                self._adapter_of(local.adapter, every_steps=local.every_steps, **local.options)
            except (ConfigError, GradientError):
                continue
            alike = local.adapter, local.options.get("algorithm")
            self.ways.append((local.name, local, self.averagings.setdefault(alike, Timed())))

    def run(self, budget_seconds: float, transport: Transport, progress: Callable[[str], None]) -> None:
        """Make as many rounds as the time allows, equally many on all processes."""
        turns = [partial(self._turn, self.alone, None)]
        turns += [
            partial(self._turn, timed, self.variants[name].algorithm)
            for name, local, timed in self.ways
            if local is None
        ]
        turns += [partial(self._local_turn, timed, *alike) for alike, timed in self.averagings.items()]
        start, num_rounds, pace, done = time.perf_counter(), MIN_ROUNDS, "", 0
        while done < num_rounds:
            progress(f"round {done + 1} of {num_rounds}, some steps with every algorithm{pace}")
            for turn in turns:
                turn()
            turns.reverse()
            done += 1
            if done == MIN_ROUNDS:
                # The mean over all processes: a module that communicates must run equally often everywhere.
                own_seconds = (time.perf_counter() - start) / done
                (round_seconds,) = mean_over_processes([own_seconds], transport)
                # The budget bends if steps are long: fewer would tell nothing.
                num_rounds = max(MIN_ROUNDS, int(budget_seconds / round_seconds))
                pace = f", {round_seconds:.1f} s each"

    def predictions(self, network: Network) -> list[Prediction]:
        """Return a prediction for each way of averaging, as this process has measured it."""
        members, shards = self.training.members, self.subject.shards
        alone = slowest_of([timeline.seconds for timeline in self.alone.timelines], members)
        predictions = []
        for name, local, timed in self.ways:
            if local is None:
                steps = [timeline.step_seconds(network) for timeline in timed.timelines]
                seconds, every_steps = slowest_of(steps, members), 1
            else:
                seconds = local_seconds(local, timed, network, alone)
                every_steps = local.every_steps
            # In the first step processes compare settings as well. All of a replica send over one link.
            last = timed.timelines[-1]
            wire_bytes = (shards or 1) * last.wire_bytes(members) / every_steps
            prediction = Prediction(
                name,
                code_of(name, local, is_sharded=shards is not None),
                *seconds,
                message_bytes=last.message_bytes(members) / every_steps,
                memory_bytes=timed.memory_bytes,
                is_lossy=local is not None or not self.variants[name].keeps_16_bits,
                averages_less_often=local is not None,
                sent_bytes=wire_bytes,
                received_bytes=wire_bytes,
                residual_bytes=timed.residual_bytes,
                loss=self.losses[name],
                published=published_gap(name, self.training),
                rounds=(1 if local is None else local.streaming.fragments) * last.rounds / every_steps,
            )
            predictions.append(prediction)
        return predictions

    def _turn(self, timed: Timed, algorithm: Algorithm | None) -> None:
        """Time some steps with an algorithm, or without averaging."""
        model = self.subject.model
        with self.subject.turn_of(algorithm) as engine:
            timelines = self._timelines(model.zero_grad, lambda: self.one_step(model))
            if engine is not None:
                timed.memory_bytes, timed.residual_bytes = (
                    engine.state.memory_bytes(),
                    engine.state.residual_bytes(),
                )
        # Hooks are called in a backward pass only.
        if algorithm is not None and not all(timeline.sent for timeline in timelines):
            needs = "a backward pass on the model that it is given, through all of its parameters"
            raise ConfigError(f"one_step(model) must run {needs}")
        timed.timelines += timelines
        # Without gradients, so that what inner optimizers take is no time at all.
        model.zero_grad(set_to_none=True)

    def _local_turn(self, timed: Timed, kind: type[LocalSGD], algorithm: Algorithm | None) -> None:
        """Average the whole model after every step of an optimizer that changes nothing."""
        settings = {} if algorithm is None else {"algorithm": algorithm}
        adapter, optimizer = self._adapter_of(kind, every_steps=1, **settings)
        with adapter:
            # The optimizer finds no gradients, so all that is timed is the averaging after its step.
            timed.timelines += self._timelines(optimizer.zero_grad, optimizer.step)
            timed.memory_bytes, timed.residual_bytes = (
                _kept_bytes(adapter),
                engine_of(adapter).state.residual_bytes(),
            )

    def _timelines(self, prepare: Callable[[], None], step: Callable[[], object]) -> list[Timeline]:
        timelines = []
        for _ in range(UNTIMED_STEPS + TIMED_STEPS):
            prepare()
            self.stopwatch.start()
            step()
            timelines.append(self.stopwatch.timeline())
        return timelines[UNTIMED_STEPS:]

    def _adapter_of(self, kind: type[LocalSGD], **settings: Any) -> tuple[LocalSGD, torch.optim.Optimizer]:
        """Return an adapter that averages the model over the stopwatch, and the optimizer that it follows."""
        module = self.subject.module
        optimizer = torch.optim.SGD(
            [parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.0
        )
        return kind(module, optimizer, replicas=self.stopwatch.transport, **settings), optimizer


def _kept_bytes(adapter: LocalSGD) -> int:
    """Return the bytes kept between steps: last averages, outer optimizer's state, algorithm's memory."""

    def held(tensor: torch.Tensor) -> torch.Tensor:
        """Return the part that this process holds: its shard of a sharded tensor."""
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    kept_bytes = engine_of(adapter).state.memory_bytes()
    for state in () if adapter.outer is None else adapter.outer.state.values():
        kept_bytes += sum(held(value).nbytes for value in state.values() if isinstance(value, torch.Tensor))
    # Each averaged tensor has a copy of what all held after the last averaging, in at least 32 bits.
    averaged = (parameter for parameter in adapter.module.parameters() if parameter.requires_grad)
    return kept_bytes + sum(held(parameter).numel() * max(4, parameter.itemsize) for parameter in averaged)


def local_seconds(local: LocalVariant, timed: Timed, network: Network, alone: Quartiles) -> Quartiles:
    """Return median and quartiles of a step, given those of one without averaging."""
    fragments, step_seconds = local.streaming.fragments, alone[0]
    arithmetic_seconds = median(timeline.seconds for timeline in timed.timelines)
    # Each fragment has its own messages: with fewer bytes in each, but as many of them.
    waited_seconds = fragments * median(
        timeline.step_seconds(lambda kind, handed_bytes: network(kind, -(-handed_bytes // fragments)))
        - timeline.seconds
        for timeline in timed.timelines
    )
    # A fragment's messages travel while its delay is computed. The link carries one after the other, so
    # what all fragments hide is no more than the steps between two averagings.
    hidden_steps = min(local.every_steps, fragments * local.streaming.delay_steps)
    exposed_seconds = max(0.0, waited_seconds - hidden_steps * step_seconds)
    extra_seconds = (arithmetic_seconds + exposed_seconds) / local.every_steps
    # Between two averagings no one waits: their mean varies much less than a step does.
    # With the quartiles of single steps, all ways would tie on a machine with other work.
    narrower = math.sqrt(local.every_steps / fragments)
    middle, low, high = (
        step_seconds + (quartile - step_seconds) / narrower + extra_seconds for quartile in alone
    )
    return middle, low, high


def slowest_of(seconds: Sequence[float], processes: int) -> Quartiles:
    """Return median and quartiles of the slowest of as many steps as there are processes."""
    # All of k independent steps are below a time with the k-th power of the chance that one is.
    ordered = sorted(seconds)

    def below(share: float) -> float:
        return ordered[math.ceil(len(ordered) * math.pow(share, 1 / processes)) - 1]

    return below(0.5), below(0.25), below(0.75)


def mean_over_processes(numbers: Sequence[float], transport: Transport) -> list[float]:
    """Return the mean of each number over all processes. Collective."""
    everyone = gather_numbers(numbers, transport, "advise: what the processes have measured")
    return [fmean(column) for column in zip(*everyone, strict=True)]
