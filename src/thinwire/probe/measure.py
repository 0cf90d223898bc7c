"""Measuring how long averaging takes on a process group, within a budget of time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from socket import gethostname
from statistics import fmean, median

import torch
import torch.distributed as dist

from thinwire.comm import (
    Collective,
    ProcessGroupTransport,
    Work,
    agree,
    gather_bytes,
    gather_numbers,
    over_connections,
    ranks_by_machine,
)
from thinwire.errors import ConfigError
from thinwire.probe.result import TIMED_COLLECTIVES, PairTiming, Probe, Timing, nodes_of, ring_share
from thinwire.tensors.accelerators import wait_for

# Four times from one to the next: between them, `average_seconds` is linear.
MESSAGE_BYTES = [4, *(1024 << shift for shift in range(0, 17, 2))]  # 1 KiB to 64 MiB
MIN_REPETITIONS, MAX_REPETITIONS = 3, 25
KEPT_FOR_LARGE = 3  # shares of the time
COLLECTIVE_REPETITIONS = 4
PAIR_REPETITIONS, PAIR_SECONDS = 5, 0.05
MAX_PROCESSES_FOR_ALL_PAIRS = 8
# How much later than the others one process comes, besides a latency: in training they never come at once,
# and then what is sent may go before what is received, and not beside it.
LATE_SECONDS = 0.005
IN_FLIGHT, STREAM_REPETITIONS, MAX_STREAMED_BYTES = 8, 3, 5 << 19

Progress = Callable[[str], None]


def probe(
    group: dist.ProcessGroup | None = None,
    *,
    budget_seconds: float = 20.0,
    device: torch.device | None = None,
    all_pairs: bool | None = None,
    progress: Progress = lambda doing: None,
) -> Probe:
    """Measure averaging over message sizes, other collectives, and single pairs of processes. Collective.

    The result is the same on every process.

    Args:
        group: The process group, None for the default one.
        budget_seconds: About how long it may take. Larger messages than fit in it are left out; five
            eighths are for averaging. If it is too short to tell the link's rate, the result says so.
        device: Where the messages lie. By default the GPU that the group was made for, or else the current
            one, if NCCL carries its tensors; else the CPU.
        all_pairs: Whether to time all pairs of processes, or only neighbours; by default all of up to 8.
        progress: Gets what is being measured, in words.

    Raises:
        ConfigError: The budget is not positive, there is one process only, or several processes of a
            machine have the same GPU.
        AttachError: There is no process group.
        AgreementError: The processes have been given different arguments.
        CommunicationError: The backend failed.
    """
    if not budget_seconds > 0:
        raise ConfigError(f"budget_seconds must be above 0, got {budget_seconds}")
    transport = ProcessGroupTransport(group, device)
    if transport.size < 2:
        raise ConfigError("probe measures between processes: start at least 2, got 1")
    device = transport.fast_device if device is None else device
    # Different arguments would mean different messages, and processes that wait forever.
    agree(transport, {"budget_seconds": str(budget_seconds), "all_pairs": str(all_pairs)}, "a probe")
    meter = _Meter(transport, device, progress)
    timings = list(meter.timings(5 / 8 * budget_seconds))
    wire_factors = meter.wire_factors(timings, budget_seconds / 8)
    pairs = meter.pairs(timings, budget_seconds / 4, all_pairs)
    # These are the machines that `attach` finds; what the launcher does not tell follows from the pairs.
    machines = ranks_by_machine(transport)
    return Probe(
        world_size=transport.size,
        backend=transport.backend_for(device),
        device=device.type,
        timings=timings,
        pairs=pairs,
        nodes=machines if len(machines) > 1 else nodes_of(transport.size, pairs),
        wire_factors=wire_factors,
        hosts=[name.decode() for name in gather_bytes(gethostname().encode(), transport, "a probe")],
    )


def compare_streams(counts: Sequence[int], found: Probe) -> dict[int, float]:
    """Return the bits per second of averagings in flight, by the connections that Gloo makes. Collective.

    Gloo makes as many to each process as `GLOO_SOCKET_IFNAME` names interfaces, also one of them twice.
    Each number of connections is measured in a separate group of all processes.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not interface or found.backend != "gloo":
        raise ConfigError(
            "streams compares settings of Gloo's for one network interface: set GLOO_SOCKET_IFNAME=eth0, or "
            "what it is called, on every machine"
        )
    # A tenth of a second each, so that one alone does not tell a latency.
    message_bytes = int(min(MAX_STREAMED_BYTES, max(1 << 16, found.known_rate() / 10))) // 4 * 4
    transports = {count: over_connections(interface, count) for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(STREAM_REPETITIONS + 1):
        for count, transport in transports.items():
            messages = [torch.zeros(message_bytes // 4) for _ in range(IN_FLIGHT)]
            gather_numbers([0.0], transport, "a probe")
            start = time.perf_counter()
            for work in [transport.mean(message, "a probe") for message in messages]:
                work.wait()
            took = gather_numbers([time.perf_counter() - start], transport, "a probe")
            seconds[count].append(fmean(own_seconds for (own_seconds,) in took))
    sent_bits = 8 * IN_FLIGHT * message_bytes * ring_share(found.world_size)
    # The first finds out how fast connections are.
    return {count: sent_bits / median(of_count[1:]) for count, of_count in seconds.items()}


class _Meter:
    """Measures, as one of the processes."""

    def __init__(self, transport: ProcessGroupTransport, device: torch.device, progress: Progress) -> None:
        self.transport, self.device, self.progress = transport, device, progress

    def timings(self, budget_seconds: float) -> Iterator[Timing]:
        """Time one message size after the other, as long as the time lasts."""
        end, shortest_seconds = time.perf_counter() + budget_seconds, math.inf
        for index, message_bytes in enumerate(MESSAGE_BYTES):
            # Sizes share the time alike, but the largest ones tell the rate of a link of long round trips.
            sizes_left = len(MESSAGE_BYTES) - index + KEPT_FOR_LARGE
            share_seconds = (end - time.perf_counter()) / sizes_left
            message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=self.device)
            self.progress(f"averaging {message_bytes:,} bytes")
            # This one does not count: connections are made, pages are touched. It tells what one costs with
            # all that the processes tell each other around it, which takes longer than itself on a long link.
            start = time.perf_counter()
            self.once(message)
            each_seconds = self.agreed(time.perf_counter() - start)
            # The mean over all decides: with different numbers of repetitions they would wait forever.
            wanted = self.agreed(min(MAX_REPETITIONS, share_seconds / max(each_seconds, 1e-6)))
            repetitions = max(MIN_REPETITIONS, int(wanted))
            yield Timing(message_bytes, [self.once(message) for _ in range(repetitions)])
            # The next size is four times as long, but a round trip is none the longer for it. All stop at the
            # same one, by a mean.
            shortest_seconds = min(shortest_seconds, each_seconds)
            next_seconds = 4 * each_seconds - 3 * shortest_seconds
            missing_seconds = (MIN_REPETITIONS + 1) * next_seconds - (end - time.perf_counter())
            if self.agreed(missing_seconds) > 0 and index > 0:
                return

    def once(self, message: torch.Tensor) -> float:
        """Return the seconds of one averaging that all start together, their mean over the processes."""
        self.agreed(0.0)  # all start together, or the first would count its waiting as the network's time
        wait_for(self.device)
        start = time.perf_counter()
        self.transport.mean(message, "a probe").wait()
        wait_for(self.device)
        return self.agreed(time.perf_counter() - start)

    def agreed(self, number: float) -> float:
        """Return the mean of a number over the processes: the same on all."""
        return fmean(of_one for (of_one,) in gather_numbers([number], self.transport, "a probe"))

    def wire_factors(self, timings: list[Timing], budget_seconds: float) -> dict[Collective, float]:
        """Return how much longer other collectives take than averagings with as many bytes on the wire."""
        # Each is timed as often; one that sends before it receives takes twice as long.
        num_averagings = (1 + 2 * len(TIMED_COLLECTIVES)) * (COLLECTIVE_REPETITIONS + 1)
        message_bytes = self.largest_within(timings, budget_seconds / num_averagings)
        late_seconds = LATE_SECONDS + timings[0].median_seconds
        # A process sends as many bytes as with an averaging's ring.
        message = torch.zeros(2 * message_bytes, dtype=torch.uint8, device=self.device)
        contribution = message[: 2 * message_bytes // self.transport.size].clone()
        gathered = message[: contribution.numel() * self.transport.size].clone()
        exchanged = torch.zeros_like(gathered)
        averaged = torch.zeros(message_bytes // 4, dtype=torch.float32, device=self.device)
        starts: dict[Collective, Callable[[], Work]] = {
            "all_reduce": lambda: self.transport.mean(averaged, "a probe"),
            "all_gather": lambda: self.transport.all_gather(gathered, contribution, "a probe"),
            "all_to_all": lambda: self.transport.all_to_all(exchanged, gathered, "a probe"),
        }
        seconds = {}
        for kind, start in starts.items():
            self.progress(f"{kind.replace('_', '-')}, {message_bytes:,} bytes")
            numbers = range(COLLECTIVE_REPETITIONS + 1)
            timed = [self.with_one_late(number, start, late_seconds) for number in numbers]
            seconds[kind] = median(timed[1:])  # the first makes connections, as above
        return {kind: max(1.0, seconds[kind] / seconds["all_reduce"]) for kind in TIMED_COLLECTIVES}

    def with_one_late(self, number: int, start: Callable[[], Work], late_seconds: float) -> float:
        """Return the seconds of a collective from when the last process has come."""
        last = number % self.transport.size
        self.agreed(0.0)
        if self.transport.rank == last:
            time.sleep(late_seconds)
        begun = time.perf_counter()
        start().wait()
        wait_for(self.device)
        everyone = gather_numbers([time.perf_counter() - begun], self.transport, "a probe")
        return everyone[last][0]

    def largest_within(self, timings: list[Timing], seconds: float) -> int:
        """Return the largest message, of those timed, of which an averaging takes less than so long."""
        # Nothing larger than was timed: if noise hides the rate, it would seem to take no longer.
        sizes = [timing.message_bytes for timing in timings[1:] if timing.median_seconds < seconds]
        return max(sizes, default=MESSAGE_BYTES[1])

    def pairs(self, timings: list[Timing], budget_seconds: float, all_pairs: bool | None) -> list[PairTiming]:
        """Time one pair after the other while all others wait."""
        # The number of all pairs grows with the square of the processes, and they wait for each other.
        if all_pairs is None:
            all_pairs = self.transport.size <= MAX_PROCESSES_FOR_ALL_PAIRS
        ranks = range(self.transport.size)
        chosen = list(combinations(ranks, 2) if all_pairs else pairwise(ranks))
        # One message of a pair manages in that time as much as an averaging of all.
        seconds_of_each = budget_seconds / len(chosen) / (2 * (PAIR_REPETITIONS + 1))
        message_bytes = self.largest_within(timings, min(PAIR_SECONDS, seconds_of_each))
        message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=self.device)
        pair_timings = []
        for pair in chosen:
            self.progress(f"processes {pair[0]} and {pair[1]}, {message_bytes:,} bytes")
            seconds = [0.0]
            # The others wait below: two pairs at a time would share links.
            if self.transport.rank in pair:
                pings = [self.transport.ping_seconds(*pair, message) for _ in range(PAIR_REPETITIONS + 1)]
                # Other work of the computers can only add to it, and would hide who is near whom.
                seconds = [min(ping or 0.0 for ping in pings[1:])]
            # All take the time that the first of the pair saw: they must hold the same.
            ((of_first,), *_) = gather_numbers(seconds, self.transport, "a probe")[pair[0] :]
            pair_timings.append(PairTiming(pair, message_bytes, of_first))
        return pair_timings
