"""`thinwire.advise`: steps are timed here, the network comes from a probe, losses from a table."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.adapters.ddp_model import ddp_inside, is_fsdp2, is_sharded
from thinwire.advice.bench import Bench, OneStep, Replicated, mean_over_processes, slowest_of
from thinwire.advice.loss import Training, optimizer_name, optimizer_notes
from thinwire.advice.result import Advice, Prediction, checked_budget, checked_gain, choose, contenders
from thinwire.advice.timeline import Network, Stopwatch, Transfer
from thinwire.advice.variants import OVERFLOWING
from thinwire.advice.words import cost_of_saving, disturbance, notes_on
from thinwire.checks import number, whole_count
from thinwire.comm import (
    Collective,
    ProcessGroupTransport,
    Transport,
    gather_bytes,
    round_trips_over_gloo,
    wire_bytes,
)
from thinwire.errors import AttachError, ConfigError
from thinwire.probe import Probe
from thinwire.probe import probe as measure_network
from thinwire.probe.result import ring_share
from thinwire.torch_private import uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMES = ("step_seconds", "low_seconds", "high_seconds")
ROUND_TRIPS = (0, 5, 20, 80)
PROC_STAT = Path("/proc/stat")
SHARDED = "thinwire.advice.sharded"  # it knows of DTensors, which take seconds to import


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
    total_steps: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Advice:
    """Predict the step time of each algorithm for a model, on the network that was probed, and its loss gap.

    The model is copied (a DDP model's options are not); steps of the copy are timed with one algorithm after
    the other on this process, without any network, noting which message would have been sent when. The probe
    tells how long each would have been under way, and of as many steps as there are processes the slowest
    sets the pace. With a model on which you called `fully_shard`, the processes of a replica time steps
    together, with FSDP2's own messages between them and none to other replicas; all of them share the link
    of the one process that was probed, and what is compared with is native HSDP in bf16. Loss gaps were
    measured with small models, by optimizer and number of members: yours may be others.

    Args:
        model: A module, or a `DistributedDataParallel` model, whose module is taken. Or an FSDP2 model, as
            `attach` takes it: it is trained itself, and put back as it was.
        one_step: Is called with a DDP model of the copy, or with the FSDP2 model; to make a batch, run
            forward and backward. What else it does (an optimizer's step) counts in every prediction.
        probe: Of the network; None to probe the default process group now, which is collective. For a
            sharded model: of one process on each machine, or of all on machines that hold a replica each.
        replicas: Of a sharded model, if there is no probe: as of `attach`; the links are probed now.
        budget_seconds: About how long the measuring may take. Ten steps with each algorithm are made in any
            case, of which four are not timed: of a large model, and of a sharded one, they take longer.
        least_gain: What an approximation must win over the fastest of exact and 16-bit averaging to be
            advised, as a share of the step.
        budget_loss: The largest expected gap to exact averaging's loss that is advised, as a share of it:
            0.01 is 1 %; at most 0.2. `math.inf` for any, known or not.
        optimizer: What trains the model, or its name, such as "AdamW": loss gaps depend on it. With one that
            was not measured with, and with None, the largest gap of those that were counts.
        total_steps: Of the run. Few bits lose more in short ones, so of the runs that were measured only
            those count that were not longer; with None, the shortest.
        progress: Gets what is being measured, in words.

    Call it on every process of the default process group, or in a group of one (of a sharded model: of one
    replica); the result is the same on all. A module that communicates by itself (SyncBatchNorm) must do so
    in every process alike.

    Cost: a copy of the model (or of this process's shards) and its gradients, and what the algorithm whose
    turn it is keeps between steps, while it runs.

    Raises:
        ConfigError: `one_step` does not run a backward pass, the model is sharded by FSDP1, on several
            devices, the probe does not know the link's rate, or an argument is out of range.
        AttachError: There is no process group; or the model is all frozen; or `attach` does not take the
            sharded model.
        GradientError: Gradients are sparse.
    """
    name = None if optimizer is None else optimizer_name(optimizer)
    budget_loss, least_gain = checked_budget(budget_loss), checked_gain(least_gain)
    if total_steps is not None:
        total_steps = whole_count("total_steps", total_steps, minimum=1)
    if not 0 < number("budget_seconds", budget_seconds, minimum=0) < math.inf:
        raise ConfigError(f"budget_seconds must be above 0 and finite, got {budget_seconds}")
    module, device = _trainable(model)
    link, transport = _link_of(module, probe, replicas), ProcessGroupTransport()
    training = Training.of(module, name, link.members, total_steps)
    with ExitStack() as entered:
        stopwatch = Stopwatch(link.members, device)
        kind = import_module(SHARDED).Sharded if is_fsdp2(module) else Replicated
        subject = kind(module, stopwatch.transport, entered)
        bench, before = Bench(subject, one_step, stopwatch, training), processor_seconds()
        bench.run(budget_seconds, transport, progress)
        spent = [now - then for now, then in zip(processor_seconds(), before, strict=True)]
        others = others_share(gethostname(), spent, transport)
    forecast = Forecast(bench, link, transport)
    ranked = forecast.ranked()
    # Only the 16-bit type that no gradient is too large for: both send the same.
    advisable = [prediction for prediction in ranked if prediction.name != OVERFLOWING]
    compute_seconds, low_seconds, high_seconds = forecast.compute_seconds()
    rules = least_gain, budget_loss, compute_seconds
    best = choose(advisable, *rules)
    return Advice(
        predictions=tuple(ranked),
        baseline=next(prediction for prediction in ranked if prediction.name == bench.baseline),
        best=best,
        tied=tuple(contenders(advisable, *rules)),
        break_even_bits_per_second=forecast.break_even(
            {prediction.name for prediction in advisable if prediction.is_within(budget_loss)}, least_gain
        ),
        compute_seconds=compute_seconds,
        least_gain=least_gain,
        budget_loss=budget_loss,
        optimizer=name,
        shards=subject.shards,
        processes=link.processes,
        others_share=others,
        notes=(
            *optimizer_notes(optimizer),
            *training.notes(),
            *cost_of_saving(best, link.transfer),
            *disturbance(others, low_seconds, high_seconds),
            *notes_on(training, link.probe, transport.size, device, link.shards, link.processes),
        ),
    )


@dataclass(frozen=True)
class Link:
    """The link between `members`, processes or machines that average with each other."""

    probe: Probe
    members: int
    shards: int = 1  # processes of a machine that hold a replica together, and share its one link
    processes: int = 1  # of a machine, that average inside of it first, and send together what one would

    def transfer(
        self, collective: Collective, handed_bytes: int, *, round_trip_seconds: float | None = None
    ) -> Transfer:
        """Return the time of a collective that all processes of a machine make at once.

        Args:
            collective: What carries the message.
            handed_bytes: What each process hands over.
            round_trip_seconds: Of a link that is as fast as the one that was probed, over Gloo.
        """
        sent_bytes = self.wire_bytes(collective, handed_bytes)
        averaged_bytes = sent_bytes / ring_share(self.probe.world_size)
        seconds = self.probe.average_seconds(averaged_bytes)
        if self.probe.backend != "gloo":
            return Transfer(seconds)  # each message follows the one before to its end
        # An averaging of almost nothing takes half a round trip. So what else a message waits for is known.
        probed_seconds = 2 * self.probe.latency_seconds
        if round_trip_seconds is None:
            round_trip_seconds = probed_seconds
        seconds -= self._waiting("all_reduce", averaged_bytes, self.probe.world_size, probed_seconds)
        seconds += self._waiting(collective, handed_bytes, self.members, round_trip_seconds)
        busy_seconds = sent_bytes / self.probe.known_rate()
        return Transfer(busy_seconds, max(0.0, seconds - busy_seconds))

    def _waiting(
        self, collective: Collective, handed_bytes: float, members: int, round_trip_seconds: float
    ) -> float:
        """Return how long a message waits besides its bytes."""
        round_trips, head_bytes = round_trips_over_gloo(collective, handed_bytes, members)
        seconds = round_trips * round_trip_seconds
        if head_bytes:  # the link is busy with the head while the question for the rest comes
            seconds += max(0.0, round_trip_seconds / 2 - head_bytes / self.probe.known_rate())
        return seconds

    @property
    def round_trips(self) -> Sequence[int]:
        """In ms, at which steps are predicted beside the link that was probed."""
        return ROUND_TRIPS if self.probe.backend == "gloo" else ()

    def inside_seconds(self, gradient_bytes: int) -> float:
        """Return how long gradients take to be averaged inside of a machine, and to come back, on a ring.

        As of pairs of processes, one after the other; 0 if none inside of a machine was probed.
        """
        rate = self.probe.pair_bytes_per_second(inside=True) if self.processes > 1 else None
        return ring_share(self.processes) * gradient_bytes / rate if rate else 0.0

    def wire_bytes(self, collective: Collective, handed_bytes: int) -> float:
        """Return a collective's bytes on the link, counted as bytes that take as long as an averaging's."""
        sent = wire_bytes(collective, self.shards * handed_bytes, self.members)
        # The probe's is of all processes, most of whose all-to-all leaves machines.
        return sent if self.processes > 1 else self.probe.wire_factor(collective) * sent


def _trainable(model: nn.Module) -> tuple[nn.Module, torch.device]:
    """Return the module to train here, and its device: a copy of it, but a sharded model itself."""
    # A compiled module can't be copied, and a wrapper's copy would average: take the module inside.
    ddp = ddp_inside(model)
    module = uncompiled(model) if ddp is None else ddp.module
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {model!r:.200}")
    if is_sharded(module) and not is_fsdp2(module):
        raise ConfigError(
            "the model is sharded by FullyShardedDataParallel (FSDP1), whose flat shards span several "
            "parameters; shard it with fully_shard, or pass the plain module if it fits on each device"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise AttachError("no parameter of the model is trained, so there is nothing to average")
    device, *others = {parameter.device for parameter in module.parameters()}
    if others:
        places = " and ".join(sorted(map(str, (device, *others))))
        raise ConfigError(f"advise times the work of one device, got a model on {places}; put it on one")
    if is_fsdp2(module):
        return module, device
    # A copy: neither gradients nor hooks are left behind.
    return copy.deepcopy(module), device


def _link_of(module: nn.Module, probe: Probe | None, replicas: dist.ProcessGroup | DeviceMesh | None) -> Link:
    """Return the link between the replicas, probed now if there is no probe, which is collective."""
    if not isinstance(probe, Probe | None):
        raise ConfigError(f"probe must be what thinwire.probe or Probe.load returned, or None, got {probe!r}")
    if is_fsdp2(module):
        sharded = import_module(SHARDED)
        probe = probe or sharded.probed_between_replicas(module, replicas)
        shards = sharded.shards_of(module).size
    elif replicas is not None:
        raise ConfigError("replicas is for models of fully_shard; leave it out")
    else:
        probe, shards = probe or measure_network(), 1
    # Without it every large message would seem to take as long as the largest that was probed.
    probe.known_rate()
    sizes = {len(node) for node in probe.nodes} if len(probe.nodes) > 1 else {1}
    if sizes == {1} or len(sizes) > 1:
        return Link(probe, probe.world_size, shards)
    # On machines that hold a replica each, all processes were probed, or else one of each.
    if shards > 1:
        return Link(probe, len(probe.nodes) if sizes == {shards} else probe.world_size, shards)
    return Link(probe, len(probe.nodes), processes=sizes.pop())


@dataclass(frozen=True)
class Forecast:
    """Predicts the steps that were timed here for a network: the mean of what all processes predict."""

    bench: Bench
    link: Link
    transport: Transport

    def on(self, network: Network) -> list[Prediction]:
        """Return the prediction for each way of averaging: the same on all processes, so all choose alike."""
        predictions = self.bench.predictions(network)
        parameters = self.bench.subject.module.parameters()
        inside_seconds = self.link.inside_seconds(
            sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        )
        # All in one message: there are a hundred numbers, and tens of networks to ask about.
        flat = [getattr(prediction, name) + inside_seconds for prediction in predictions for name in TIMES]
        means = iter(mean_over_processes(flat, self.transport))
        times = [dict[str, Any]((name, next(means)) for name in TIMES) for _ in predictions]
        return [
            replace(prediction, **seconds) for prediction, seconds in zip(predictions, times, strict=True)
        ]

    def ranked(self) -> list[Prediction]:
        """Return the predictions for the probed link, and for other round trips; the fastest first."""
        link = self.link
        ranked = sorted(self.on(link.transfer), key=lambda prediction: prediction.step_seconds)
        at = {ms: self.on(partial(link.transfer, round_trip_seconds=ms / 1e3)) for ms in link.round_trips}
        seconds_at = {
            predictions[0].name: {
                ms: prediction.step_seconds for ms, prediction in zip(at, predictions, strict=True)
            }
            for predictions in zip(*at.values(), strict=True)
        }
        return [replace(prediction, seconds_at=seconds_at.get(prediction.name, {})) for prediction in ranked]

    def compute_seconds(self) -> tuple[float, float, float]:
        """Return how long steps take without averaging, and their quartiles."""
        alone, num_processes = self.bench.alone.timelines, self.link.members * self.link.processes
        seconds = [timeline.seconds for timeline in alone]
        # Without averaging, too, the slowest process sets the pace. The spread is that of each.
        typical, spread = slowest_of(seconds, num_processes)[0], slowest_of(seconds, 1)[1:]
        compute, low, high = mean_over_processes([typical, *spread], self.transport)
        return compute, low, high

    def break_even(self, accepted: Collection[str], least_gain: float) -> float:
        """Return the bits per second below which the fastest compression wins enough over 16 bits."""
        # Found by bisection on a logarithmic scale: the slower the link, the more compression wins.
        low, high = 1e5, 1e13
        if self._gain_seconds(low, accepted, least_gain) <= 0:
            return 0.0
        if self._gain_seconds(high, accepted, least_gain) > 0:
            return math.inf
        while high > 1.01 * low:
            middle = math.sqrt(low * high)
            wins = self._gain_seconds(middle, accepted, least_gain) > 0
            low, high = (middle, high) if wins else (low, middle)
        return low

    def _gain_seconds(self, bits_per_second: float, accepted: Collection[str], least_gain: float) -> float:
        link = self.link

        def network(collective: Collective, handed_bytes: int) -> Transfer:
            # A network of that rate alone: its latency is the probed one's.
            busy_seconds = 8 * link.wire_bytes(collective, handed_bytes) / bits_per_second
            return Transfer(busy_seconds, link.probe.latency_seconds)

        predictions = self.on(network)
        compressed = [prediction for prediction in predictions if prediction.compresses]
        fastest = [prediction for prediction in compressed if prediction.name in accepted] or compressed
        baseline = next(
            prediction.step_seconds for prediction in predictions if prediction.name == self.bench.baseline
        )
        return (1 - least_gain) * baseline - min(prediction.step_seconds for prediction in fastest)


def processor_seconds() -> tuple[float, float, float]:
    """Return the time of this process, and of all processors: busy, and all of it; NaN if no one tells."""
    own_seconds = time.process_time()
    try:
        first_line, _, _ = PROC_STAT.read_text(encoding="ascii").partition("\n")
    except OSError:  # Linux alone has it
        return own_seconds, math.nan, math.nan
    # Time that a host of virtual machines gave to others is theirs; that of guests is in `user` already.
    user, nice, system, idle, waiting, *others = map(int, first_line.split()[1:9])
    busy, ticks = user + nice + system + sum(others), os.sysconf("SC_CLK_TCK")
    return own_seconds, busy / ticks, (busy + idle + waiting) / ticks


def others_share(host: str, spent: Sequence[float], transport: Transport) -> float | None:
    """Return the largest share of a machine's processors that other programs took; None if not known."""
    messages = gather_bytes(
        json.dumps([host, *spent]).encode(), transport, "advise: what else the machines did"
    )
    machines: dict[str, list[Sequence[float]]] = {}
    for machine, *numbers in map(json.loads, messages):
        machines.setdefault(machine, []).append(numbers)
    shares = [
        max(0.0, of_all[0][1] - sum(own_seconds for own_seconds, *_ in of_all)) / of_all[0][2]
        for of_all in machines.values()
        if of_all[0][2] > 0  # NaN fails this, too
    ]
    return max(shares, default=None)
