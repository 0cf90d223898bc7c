"""Predicting step times: each algorithm's own work is measured here, the network comes from a probe."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from socket import gethostname
from statistics import fmean
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.advice.local import LocalBench, local_benches
from thinwire.advice.loss import (
    EXACT_LOSS,
    Training,
    checked_budget,
    expected_loss,
    optimizer_name,
    optimizer_notes,
    published_gap,
)
from thinwire.advice.processors import ProcessorUse, disturbance
from thinwire.advice.replicated import EXACT, OVERFLOWING, Replicated, Subject
from thinwire.advice.result import Advice, Prediction, choose, is_within, tied
from thinwire.advice.timeline import Network, Stopwatch, Timeline
from thinwire.algorithms.registry import Variant
from thinwire.channel import (
    Collective,
    ProcessGroupTransport,
    Transport,
    gather_numbers,
    wire_bytes,
)
from thinwire.checks import number
from thinwire.errors import AttachError, ConfigError
from thinwire.fronts.ddp_model import is_fsdp2, is_sharded
from thinwire.probe import Probe
from thinwire.probe import probe as measure_network
from thinwire.probe.result import ring_share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Of a turn: in their first step fronts agree, plan and compile, and in the second they have a residual.
UNTIMED_STEPS, TIMED_STEPS = 2, 3
# One in each direction, so that no algorithm is always the first.
MIN_ROUNDS = 2

OneStep = Callable[[nn.Module], object]


def advise(
    model: nn.Module,
    one_step: OneStep,
    probe: Probe | None = None,
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    budget_seconds: float = 30.0,
    least_gain: float = 0.05,
    budget_loss: float = 0.01,
    optimizer: torch.optim.Optimizer | str | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Advice:
    """Predict the step time of each algorithm for a model, on the network that was probed, and its loss gap.

    The model is copied (a DDP model's options are not); steps of the copy are timed with one algorithm after
    the other on this process, without any network, noting which message would have been sent when. The probe
    tells how long each would have been under way, and of as many steps as there are processes the slowest
    sets the pace. With a model on which you called `fully_shard`, the processes of a replica time steps
    together, with FSDP2's own messages between them and none to other replicas; all of them share the link
    of the one process that was probed, and what is compared with is native HSDP in bf16. Loss gaps are those
    that were measured with small models, by optimizer and number of members (`loss_gaps.json` beside this
    module): yours may be others.

    Args:
        model: A module, or a `DistributedDataParallel` model, whose module is taken. Or an FSDP2 model, as
            `attach` takes it: it is trained itself, and put back as it was.
        one_step: Is called with a DDP model of the copy, or with the FSDP2 model; to make a batch, run
            forward and backward. What else it does (an optimizer's step) counts in every prediction.
        probe: Of the network; None to probe the default process group now, which is collective. Of a
            sharded model: of one process on each machine, or of all on machines that hold a replica each.
        replicas: Of a sharded model, where there is no probe: as of `attach`; the links are probed now.
        budget_seconds: About how long the measuring may take. Ten steps with each algorithm are made in any
            case, of which four are not timed: of a large model, and of a sharded one, they take longer.
        least_gain: What an approximation must win over the fastest of exact and 16-bit averaging to be
            advised, as a share of the step.
        budget_loss: The largest expected gap to exact averaging's loss that is advised, as a share of it:
            0.01 is 1 %; at most 0.2. `math.inf` for any, known or not.
        optimizer: What trains the model, or its name, such as "AdamW": loss gaps depend on it. With another
            one than was measured with, and with None, the largest gap of those counts.
        progress: Gets what is being measured, in words.

    To be called on every process of the default process group, or in a group of one (of a sharded model: of
    one replica); the result is the same on all. A module that communicates by itself (SyncBatchNorm) must do
    so in every process alike.

    Cost: a copy of the model (or of this process's shards) and its gradients, and what the algorithm whose
    turn it is keeps between steps, while it runs.

    Raises:
        ConfigError: `one_step` does not run a backward pass, the model is sharded by FSDP1, on several
            devices, the probe does not know the link's rate, or an argument is out of range.
        AttachError: There is no process group; or the model is all frozen; or a sharded model is none that
            `attach` takes.
        GradientError: Gradients are sparse.
    """
    name = None if optimizer is None else optimizer_name(optimizer)
    budget_loss = checked_budget(budget_loss)
    if not 0 < number("budget_seconds", budget_seconds, minimum=0) < math.inf:
        raise ConfigError(f"budget_seconds must be above 0 and finite, got {budget_seconds}")
    if not number("least_gain", least_gain, minimum=0) < 1:
        raise ConfigError(f"least_gain must be a share below 1, such as 0.05 for 5 %, got {least_gain}")
    if not isinstance(probe, Probe | None):
        raise ConfigError(f"probe must be what thinwire.probe or Probe.load returned, or None, got {probe!r}")
    module, device = _trainable(model)
    # DTensors take seconds to import; with a sharded model that is done.
    sharded = import_module("thinwire.advice.sharded") if is_fsdp2(module) else None
    if sharded is None and replicas is not None:
        raise ConfigError("replicas is for models of fully_shard; leave it out")
    transport = ProcessGroupTransport()
    if probe is None:
        probe = measure_network() if sharded is None else sharded.probed_between_replicas(module, replicas)
    # Without it every large message would seem to take as long as the largest that was probed.
    probe.known_rate()
    shards = 1 if sharded is None else sharded.shards_of(module).size
    # Where each machine that was seen has as many processes as a replica, all were probed; else one of each.
    is_of_all = len(probe.nodes) > 1 and all(len(node) == shards for node in probe.nodes)
    members = len(probe.nodes) if shards > 1 and is_of_all else probe.world_size
    with ExitStack() as entered:
        stopwatch = Stopwatch(members, device)
        make: Callable[..., Subject] = Replicated if sharded is None else sharded.Sharded
        subject = make(module, stopwatch.transport, entered)
        bench = _Bench(subject, one_step, stopwatch)
        use = ProcessorUse()
        bench.run(budget_seconds, transport, progress)
        others = use.others_share(transport)

    # Of any network: the rate at which compressing begins to win is found by asking again.
    def predictions(network: Network) -> list[Prediction]:
        return _agreed(bench.predictions(network, members), transport)

    training = Training.of(module, name, members)
    probed = partial(shared_link_seconds, probe, members, shards)
    found = predictions(probed)
    ranked = sorted(_with_losses(found, bench, training), key=lambda each: each.step_seconds)
    # Of the two kinds of 16 bits only the one that no gradient is too large for: they send the same.
    advisable = [each for each in ranked if each.name != OVERFLOWING]
    within = [each for each in advisable if is_within(each, budget_loss)]
    # Without averaging, too, the slowest of as many processes sets the pace.
    own_seconds, *_ = _slowest_of([each.seconds for each in bench.without_averaging], members)
    # As they were on each process, and not the slowest of many.
    _, *middle_half = _slowest_of([each.seconds for each in bench.without_averaging], 1)
    low_seconds, high_seconds = _mean_over_processes(middle_half, transport)
    best = choose(advisable, least_gain, budget_loss)
    return Advice(
        predictions=tuple(ranked),
        baseline=next(each for each in ranked if each.name == subject.baseline),
        best=best,
        tied=tuple(tied(within, least_gain)),
        break_even_bits_per_second=_break_even(
            predictions,
            [each.name for each in within if each.is_lossy],
            subject.baseline,
            lambda collective, handed_bytes: (
                probe.wire_factor(collective) * wire_bytes(collective, shards * handed_bytes, members)
            ),
            probe.latency_seconds,
            least_gain,
        ),
        compute_seconds=_mean_over_processes([own_seconds], transport)[0],
        least_gain=least_gain,
        budget_loss=budget_loss,
        optimizer=name,
        shards=subject.shards,
        others_share=others,
        notes=(
            *optimizer_notes(optimizer),
            *_cost_of_saving(best, probed),
            *disturbance(others, low_seconds, high_seconds),
            *_notes(training, probe, transport.size, device, shards),
        ),
    )


def shared_link_seconds(
    probe: Probe, members: int, shards: int, collective: Collective, handed_bytes: int
) -> float:
    """Return how long a collective takes that all processes of a machine make at once, over its one link.

    Args:
        probe: Of the network.
        members: That each of them averages with, itself included.
        shards: Processes of a machine.
        collective: What carries the message.
        handed_bytes: What each process hands over.
    """
    if shards == 1:
        return probe.collective_seconds(collective, handed_bytes)
    sent = probe.wire_factor(collective) * wire_bytes(collective, shards * handed_bytes, members)
    return probe.average_seconds(sent / ring_share(probe.world_size))


def _trainable(model: nn.Module) -> tuple[nn.Module, torch.device]:
    """Return what is trained here, and its device: a copy of the module, but a sharded model itself.

    Raises:
        ConfigError: It is none that one process can train by itself, on one device.
        AttachError: It trains nothing.
    """
    # Of a compiled model the module inside: what is compiled can't be copied.
    given = getattr(model, "_orig_mod", model)
    if not isinstance(given, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {model!r:.200}")
    if is_sharded(given) and not is_fsdp2(given):
        raise ConfigError(
            "the model is sharded by FullyShardedDataParallel (FSDP1), whose flat shards span several "
            "parameters; shard it with fully_shard, or pass the plain module if it fits on each device"
        )
    if not any(each.requires_grad for each in given.parameters()):
        raise AttachError("no parameter of the model is trained, so there is nothing to average")
    devices = {parameter.device for parameter in given.parameters()}
    if len(devices) > 1:
        places = " and ".join(sorted(map(str, devices)))
        raise ConfigError(f"advise times the work of one device, got a model on {places}; put it on one")
    (device,) = devices
    if is_fsdp2(given):
        return given, device
    # A copy: neither gradients nor hooks are left behind.
    return copy.deepcopy(given.module if isinstance(given, DistributedDataParallel) else given), device


def _with_losses(found: Sequence[Prediction], bench: _Bench, training: Training) -> list[Prediction]:
    """Add what is known of the loss."""
    local = {each.way.name: each.way for each in bench.local}
    with_loss = []
    for each in found:
        if each.name in local:
            name, bounds = each.name, {"loses_more_than": local[each.name].loses_more_than}
        else:
            variant = bench.subject.variants[each.name]
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
    return with_loss


def _cost_of_saving(best: Prediction, network: Network) -> Iterator[str]:
    """Yield what `state_dict` takes with what is advised, if it keeps a residual."""
    if best.residual_bytes:
        seconds = network("all_reduce", best.residual_bytes)
        yield (
            f"Saving (state_dict) averages the residual of {best.name}, {best.residual_bytes / 1e6:.3g} MB, "
            f"over the link: about {seconds:.2g} s each time."
        )


def _notes(
    training: Training, probe: Probe, num_processes: int, device: torch.device, shards: int = 1
) -> Iterator[str]:
    """Yield what makes the advice less certain, besides the optimizer, in words."""
    if training.is_recurrent:
        yield (
            "The model has an RNN: what was not measured with an LSTM has the gap of transformers, which may "
            "be less."
        )
    predicted_processes = training.members * shards
    if shards > 1:
        yield (
            f"Predicted for {training.members} replicas of {shards} shards, {predicted_processes} processes; "
            f"the {shards} of a replica share one link to the others."
        )
    # One replica alone may ask about any network: that is what the command does.
    if num_processes not in (shards, predicted_processes):
        yield (
            f"The probe is of {probe.world_size} processes, this job has {num_processes}: what is predicted "
            f"is for {predicted_processes}."
        )
    if device.type != "cpu" and shards == 1:
        yield (
            "Each bucket has launches of its own: where no message could hide behind the backward pass, "
            "DistributedDataParallel(..., bucket_cap_mb=10_000) makes one bucket of them all."
        )
    if probe.device != device.type:
        yield f"The probe is of messages on {probe.device}; what is timed here runs on {device.type}."
    places = list(dict.fromkeys(probe.hosts))
    if places and gethostname() not in places:
        yield (
            f"The probe is of other machines ({', '.join(places[:4])}{', …' if len(places) > 4 else ''}): "
            f"their links, and the arithmetic of this one, {gethostname()}."
        )
    # What is said of the network that this very job has just probed needs no warning.
    if len(places) == 1 and num_processes != probe.world_size:
        yield (
            f"All processes of the probe ran on one machine, {places[0]}; for a training on several, probe "
            "between those."
        )
    if probe.doubt:
        yield f"The probe is doubtful: {probe.doubt}."
    if probe.timings and probe.timings[-1].median_seconds < 2 * probe.latency_seconds:
        yield (
            f"The largest message of the probe, {probe.timings[-1].message_bytes:,} bytes, took less than "
            "twice as long as one of nothing: the link's rate is uncertain; probe with a larger "
            "budget_seconds."
        )


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


class _Bench:
    """Steps with one algorithm after the other, each made anew for its turn, so that one alone takes memory.

    In several rounds, in one direction and then in the other, so that a busy machine slows all of them.
    """

    def __init__(self, subject: Subject, one_step: OneStep, stopwatch: Stopwatch) -> None:
        self.subject, self.one_step, self.stopwatch = subject, one_step, stopwatch
        self.timelines: dict[str, list[Timeline]] = {name: [] for name in subject.variants}
        self.kept_bytes: dict[str, tuple[int, int]] = {}
        self.without_averaging: list[Timeline] = []
        self.local = local_benches(subject.module, stopwatch)

    def run(self, budget_seconds: float, transport: Transport, progress: Callable[[str], None]) -> None:
        """Make as many rounds as the time allows, equally many on all processes.

        Args:
            budget_seconds: About how long it may take.
            transport: Between the processes.
            progress: Gets what is being measured, in words.
        """
        averagings = dict.fromkeys(each.averaging for each in self.local)
        turns: list[Callable[[], None]] = [partial(self._turn, name) for name in (None, *self.timelines)]
        turns += [partial(each.take_turn, UNTIMED_STEPS, TIMED_STEPS) for each in averagings]
        start, num_rounds, told = time.perf_counter(), MIN_ROUNDS, ""
        done = 0
        while done < num_rounds:
            progress(f"round {done + 1} of {num_rounds}, some steps with every algorithm{told}")
            for turn in turns:
                turn()
            turns.reverse()
            done += 1
            if done == MIN_ROUNDS:
                # Of all processes: a module that communicates by itself must run equally often everywhere.
                own_seconds = (time.perf_counter() - start) / done
                round_seconds = _mean_over_processes([own_seconds], transport)[0]
                # The budget bends where steps are long: fewer would tell nothing.
                num_rounds = max(MIN_ROUNDS, int(budget_seconds / round_seconds))
                told = f", {round_seconds:.1f} s each"

    def predictions(self, network: Network, world_size: int) -> list[Prediction]:
        """Return what each way of averaging would take.

        Args:
            network: Tells how long messages take.
            world_size: Processes.
        """
        of_gradients = [
            _predicted(variant, self.timelines[name], self.kept_bytes[name], network, world_size)
            for name, variant in self.subject.variants.items()
        ]
        averaged_less_often = [
            _predicted_local(each, self.without_averaging, network, world_size) for each in self.local
        ]
        # All processes of a replica send over one link.
        return [
            replace(
                each,
                code=self.subject.line(each),
                sent_bytes=(self.subject.shards or 1) * each.sent_bytes,
                received_bytes=(self.subject.shards or 1) * each.received_bytes,
            )
            for each in of_gradients + averaged_less_often
        ]

    def _turn(self, name: str | None) -> None:
        """Time some steps with an algorithm, or with None without averaging."""
        with self.subject.turn_of(name) as engine:
            found = [self._step() for _ in range(UNTIMED_STEPS + TIMED_STEPS)][UNTIMED_STEPS:]
            if name is None or engine is None:
                self.without_averaging += found
            else:
                self.timelines[name] += found
                self.kept_bytes[name] = engine.memory_bytes(), engine.residual_bytes()
        # Hooks are called in a backward pass only.
        if name is not None and not all(each.sent for each in found):
            raise ConfigError(
                "one_step(model) must run a backward pass on the model that it is given, through all of its "
                "parameters"
            )
        # Without gradients, so that what inner optimizers take is no time at all.
        self.subject.model.zero_grad(set_to_none=True)

    def _step(self) -> Timeline:
        self.subject.model.zero_grad()
        self.stopwatch.start()
        self.one_step(self.subject.model)
        return self.stopwatch.timeline()


def _predicted(
    variant: Variant,
    timelines: Sequence[Timeline],
    kept_bytes: tuple[int, int],
    network: Network,
    world_size: int,
) -> Prediction:
    memory_bytes, residual_bytes = kept_bytes
    return Prediction(
        variant.code,
        f"thinwire.{variant.code}",
        *_slowest_of([each.step_seconds(network) for each in timelines], world_size),
        # Of the last step: in the first one processes compare settings as well.
        message_bytes=timelines[-1].message_bytes(world_size),
        memory_bytes=memory_bytes,
        is_lossy=not variant.keeps_16_bits,
        sent_bytes=timelines[-1].wire_bytes(world_size),
        received_bytes=timelines[-1].wire_bytes(world_size),
        residual_bytes=residual_bytes,
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
        averages_less_often=True,
        sent_bytes=sent_bytes,
        received_bytes=sent_bytes,
        residual_bytes=local.averaging.residual_bytes,
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
    baseline_name: str,
    link_bytes: Callable[[Collective, int], float],
    latency_seconds: float,
    least_gain: float,
) -> float:
    """Return the bits per second below which the fastest compression wins enough over the baseline.

    Args:
        predictions: On a network.
        within_budget: Names of what may be advised.
        baseline_name: Of 16-bit averaging.
        link_bytes: What a collective puts on a link, by the bytes that each process hands over.
        latency_seconds: Of each message.
        least_gain: As of `advise`.
    """

    def gain_seconds(bits_per_second: float) -> float:
        def network(collective: Collective, handed_bytes: int) -> float:
            # A network of that rate alone: its latency is the probed one's.
            return latency_seconds + 8 * link_bytes(collective, handed_bytes) / bits_per_second

        found = predictions(network)
        compressed = [each for each in found if each.is_lossy and not each.averages_less_often]
        accepted = [each for each in compressed if each.name in within_budget] or compressed
        baseline = next(each.step_seconds for each in found if each.name == baseline_name)
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
