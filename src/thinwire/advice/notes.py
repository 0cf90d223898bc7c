"""What makes advice less certain, and what it costs besides, in words; and what else the machines did."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import gethostname

import torch

from thinwire.advice.loss import Training
from thinwire.advice.result import Prediction
from thinwire.advice.timeline import Network
from thinwire.channel import Transport, gather_bytes, gather_numbers
from thinwire.probe import Probe

PROC_STAT = Path("/proc/stat")
# Below, it hardly shows in what is measured.
MIN_SHARE, MIN_SPREAD = 0.1, 0.2

PURPOSE = "advise: what else the machines did"


def cost_of_saving(best: Prediction, network: Network) -> Iterator[str]:
    """Yield what `state_dict` takes with what is advised, if it keeps a residual."""
    if best.residual_bytes:
        seconds = network("all_reduce", best.residual_bytes)
        yield (
            f"Saving (state_dict) averages the residual of {best.name}, {best.residual_bytes / 1e6:.3g} MB, "
            f"over the link: about {seconds:.2g} s each time."
        )


def notes_on(
    training: Training,
    probe: Probe,
    num_processes: int,
    device: torch.device,
    shards: int = 1,
    processes: int = 1,
) -> Iterator[str]:
    """Yield what is uncertain besides the optimizer."""
    if training.is_recurrent:
        yield (
            "The model has an RNN: what was not measured with an LSTM has the gap of transformers, which may "
            "be less."
        )
    predicted_processes = training.members * shards * processes
    if processes > 1:
        yield (
            f"Predicted for {training.members} machines of {processes} processes, which average inside of "
            "each machine first: bytes are those that leave a machine. What stays inside is counted by the "
            "rate that pairs of its processes were probed with, as if nothing hid it; the work on messages, "
            "of which each process has its part, as if each had all (docs/machines.md)."
        )
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
    yield from _notes_on_probe(probe, num_processes, device)


def _notes_on_probe(probe: Probe, num_processes: int, device: torch.device) -> Iterator[str]:
    if probe.device != device.type:
        yield f"The probe is of messages on {probe.device}; what is timed here runs on {device.type}."
    places = list(dict.fromkeys(probe.hosts))
    if places and gethostname() not in places:
        yield (
            f"The probe is of other machines ({', '.join(places[:4])}{', …' if len(places) > 4 else ''}): "
            f"their links, and the arithmetic of this one, {gethostname()}."
        )
    # Nothing is old about a network that this very job has just probed.
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


class ProcessorUse:
    """What the processors of this machine do from now on."""

    def __init__(self) -> None:
        self._own_seconds, self._seconds = time.process_time(), _seconds()

    def others_share(self, transport: Transport) -> float | None:
        """Return the share of the processors that others than the group's processes took. Collective.

        Of the machine where it was largest, the same on all; None where the system does not tell.
        """
        own_seconds = time.process_time() - self._own_seconds
        busy, every = (now - before for now, before in zip(_seconds(), self._seconds, strict=True))
        hosts = gather_bytes(gethostname().encode(), transport, PURPOSE)
        return others_share(hosts, gather_numbers([own_seconds, busy, every], transport, PURPOSE))


def others_share(hosts: Sequence[bytes], seconds: Sequence[Sequence[float]]) -> float | None:
    """Return the largest share of a machine's processors that others than the group's processes took.

    Seconds are of each process: its own, those of its machine's processors that they were busy, and all.

    Examples:
        >>> others_share([b"one", b"one"], [(1.0, 3.5, 10.0), (2.0, 3.5, 10.0)])
        0.05
    """
    shares = []
    for host in set(hosts):
        of_host = [row for name, row in zip(hosts, seconds, strict=True) if name == host]
        _, busy, every = of_host[0]
        # NaN fails this, too.
        if every > 0:
            shares.append(max(0.0, busy - sum(own for own, *_ in of_host)) / every)
    return max(shares, default=None)


def disturbance(others: float | None, low_seconds: float, high_seconds: float) -> Iterator[str]:
    """Yield what makes predictions less certain, in at most one sentence."""
    found = []
    if others is not None and others > MIN_SHARE:
        found.append(f"other programs took {others:.0%} of the machine's processors")
    if high_seconds > (1 + MIN_SPREAD) * low_seconds:
        found.append(
            f"half of the steps without averaging took {1e3 * low_seconds:.1f} to {1e3 * high_seconds:.1f} ms"
        )
    if found:
        yield f"While it measured, {', and '.join(found)}: on a quiet machine predictions are surer."


def _seconds() -> tuple[float, float]:
    """Return the time of all processors that they were busy, and all of it; NaN where nobody tells."""
    try:
        first_line, _, _ = PROC_STAT.read_text(encoding="ascii").partition("\n")
    except OSError:  # Linux alone has it
        return math.nan, math.nan
    # Time that a host of virtual machines gave to others is theirs; that of guests is in `user` already.
    user, nice, system, idle, waiting, *others = map(int, first_line.split()[1:9])
    busy = user + nice + system + sum(others)
    ticks = os.sysconf("SC_CLK_TCK")
    return busy / ticks, (busy + idle + waiting) / ticks
