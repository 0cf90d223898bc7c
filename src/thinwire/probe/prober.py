"""Measure how long averaging takes on a process group, within a budget of time."""

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

from thinwire.checks import positive
from thinwire.comm import ProcessGroupTransport, Work, agree, gather_numbers, gather_values
from thinwire.comm.machines import ranks_by_machine
from thinwire.comm.process_group import over_connections
from thinwire.errors import ConfigError
from thinwire.probe.link_timings import PairTiming, Probe, Timing, ring_share
from thinwire.tensors.accelerators import wait_for
from thinwire.wire import Collective

# Each is four times the one before; `average_seconds` interpolates between them.
MESSAGE_BYTES = [4, *(1024 << shift for shift in range(0, 17, 2))]  # 1 KiB to 64 MiB
MIN_REPETITIONS, MAX_REPETITIONS = 3, 25
KEPT_FOR_LARGE = 3  # shares of the time kept for large messages
COLLECTIVE_REPETITIONS = 4
PAIR_REPETITIONS, PAIR_SECONDS = 5, 0.05
MAX_PROCESSES_FOR_ALL_PAIRS = 8
# How much later than the others one process starts, plus a latency: in training they never start together.
LATE_SECONDS = 0.005
IN_FLIGHT, STREAM_REPETITIONS, MAX_STREAMED_BYTES = 8, 3, 5 << 19
PURPOSE = "a probe"

Progress = Callable[[str], None]


def probe(
    group: dist.ProcessGroup | None = None,
    *,
    budget_seconds: float = 20.0,
    device: torch.device | None = None,
    progress: Progress = lambda doing: None,
) -> Probe:
    """Measure averaging over message sizes, other collectives, and single pairs of processes. Collective.

    The result is the same on every process. With more than 8 processes, only neighbours are timed as pairs.

    Args:
        group: The process group, None for the default one.
        budget_seconds: About how long it may take. Messages too large for it are left out. If it is too
            short to find the link's rate, the result says so.
        device: The device of the messages. By default the GPU that the group was made for, or else the
            current one, if NCCL sends its tensors; otherwise the CPU.
        progress: Called with a description of each measurement.

    Raises:
        ConfigError: The budget is not positive, there is one process only, or several processes of a
            machine have the same GPU.
        AttachError: There is no process group.
        AgreementError: The processes have been given different arguments.
        CommunicationError: The backend failed.
    """
    budget_seconds = positive("budget_seconds", budget_seconds)
    transport = ProcessGroupTransport(group, device)
    if transport.size < 2:
        raise ConfigError("probe measures between processes: start at least 2, got 1")
    device = transport.fast_device if device is None else device
    # With different budgets, processes would send different messages, and wait forever.
    agree(transport, {"budget_seconds": str(budget_seconds)}, PURPOSE)
    prober = Prober(transport, device, progress)
    timings = list(prober.time_averagings(5 / 8 * budget_seconds))
    wire_factors = prober.time_collectives(timings, budget_seconds / 8)
    pairs = prober.time_pairs(timings, budget_seconds / 4)
    hosts = gather_values(gethostname(), transport, PURPOSE)
    backend = transport.backend_for(device)
    nodes = ranks_by_machine(transport)
    return Probe(transport.size, backend, device.type, timings, pairs, nodes, wire_factors, hosts)


def compare_streams(counts: Sequence[int], measured: Probe) -> dict[int, float]:
    """Return the bits per second of concurrent averagings by number of Gloo connections. Collective.

    To each process Gloo makes one connection per interface in `GLOO_SOCKET_IFNAME`, which may repeat one.
    Each number of connections is measured in a separate group of all processes.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not interface or measured.backend != "gloo":
        raise ConfigError(
            "streams compares numbers of Gloo connections over one network interface; set "
            "GLOO_SOCKET_IFNAME=eth0, or your interface's name, on every machine"
        )
    # A tenth of a second each, so that latency is a small part of it.
    message_bytes = int(min(MAX_STREAMED_BYTES, max(1 << 16, measured.known_rate() / 10))) // 4 * 4
    probers = {count: Prober(over_connections(interface, count), torch.device("cpu")) for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    messages = [torch.zeros(message_bytes // 4, device="cpu") for _ in range(IN_FLIGHT)]
    for _ in range(STREAM_REPETITIONS + 1):
        for count, prober in probers.items():
            seconds[count].append(prober.average_once(*messages))
    sent_bits = 8 * IN_FLIGHT * message_bytes * ring_share(measured.world_size)
    # The first repetition is a warm-up, in which TCP finds the connections' rate.
    return {count: sent_bits / median(repetitions[1:]) for count, repetitions in seconds.items()}


def _mean(number: float, transport: ProcessGroupTransport) -> float:
    return fmean(number for (number,) in gather_numbers([number], transport, PURPOSE))


class Prober:
    """Times messages, as one of the processes."""

    def __init__(
        self, transport: ProcessGroupTransport, device: torch.device, progress: Progress = lambda doing: None
    ) -> None:
        self.transport, self.device, self.progress = transport, device, progress

    def time_averagings(self, budget_seconds: float) -> Iterator[Timing]:
        end, shortest_seconds = time.perf_counter() + budget_seconds, math.inf
        for index, message_bytes in enumerate(MESSAGE_BYTES):
            # Sizes get equal shares of the time, but the largest: they show the rate if round trips are long.
            sizes_left = len(MESSAGE_BYTES) - index + KEPT_FOR_LARGE
            share_seconds = (end - time.perf_counter()) / sizes_left
            message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=self.device)
            self.progress(f"averaging {message_bytes:,} bytes")
            # The first one does not count: it makes connections and touches pages. But it shows the cost of
            # one averaging with its coordinating messages, which take longer than itself on a long link.
            start = time.perf_counter()
            self.average_once(message)
            once_seconds = _mean(time.perf_counter() - start, self.transport)
            # The mean over all processes decides: with different numbers of repetitions they would hang.
            affordable = min(MAX_REPETITIONS, share_seconds / max(once_seconds, 1e-6))
            repetitions = max(MIN_REPETITIONS, int(_mean(affordable, self.transport)))
            yield Timing(message_bytes, [self.average_once(message) for _ in range(repetitions)])
            # The next size is four times as large, but round trips take no longer. All processes stop at the
            # same size, by a mean.
            shortest_seconds = min(shortest_seconds, once_seconds)
            next_seconds = 4 * once_seconds - 3 * shortest_seconds
            missing_seconds = (MIN_REPETITIONS + 1) * next_seconds - (end - time.perf_counter())
            if _mean(missing_seconds, self.transport) > 0 and index > 0:
                return

    def average_once(self, *messages: torch.Tensor) -> float:
        """Return the seconds of averaging messages concurrently, the mean over the processes."""
        return fmean(self.seconds_of(lambda: [self.transport.mean(message, PURPOSE) for message in messages]))

    def seconds_of(
        self, start: Callable[[], Sequence[Work]], last: int = -1, late_seconds: float = 0.0
    ) -> list[float]:
        """Return each process's seconds for messages that all start together, except the `last` process."""
        # Synchronise first, or a process would count its wait for the others as the network's time.
        _mean(0.0, self.transport)
        wait_for(self.device)
        if self.transport.rank == last:
            time.sleep(late_seconds)
        begun = time.perf_counter()
        for work in start():
            work.wait()
        wait_for(self.device)
        seconds = time.perf_counter() - begun
        return [taken for (taken,) in gather_numbers([seconds], self.transport, PURPOSE)]

    def time_collectives(self, timings: list[Timing], budget_seconds: float) -> dict[Collective, float]:
        """Return how much longer other collectives take than averagings with as many bytes on the wire."""
        # Each is timed the same number of times; one that sends before it receives takes twice as long.
        num_averagings = (1 + 2 * 2) * (COLLECTIVE_REPETITIONS + 1)
        message_bytes = self.largest_within(timings, budget_seconds / num_averagings)
        late_seconds = LATE_SECONDS + timings[0].median_seconds
        # A process sends as many bytes as in a ring all-reduce.
        message = torch.zeros(2 * message_bytes, dtype=torch.uint8, device=self.device)
        contribution = message[: 2 * message_bytes // self.transport.size].clone()
        gathered = message[: contribution.numel() * self.transport.size].clone()
        exchanged = torch.zeros_like(gathered)
        averaged = torch.zeros(message_bytes // 4, dtype=torch.float32, device=self.device)

        def typical_seconds(start: Callable[[], Work]) -> float:
            timed = []
            for number in range(COLLECTIVE_REPETITIONS + 1):
                # Until all have ended: the late process may have received most of a short message when it
                # starts, and latency and noise would decide how long it waits for the rest.
                last = number % self.transport.size
                timed.append(max(self.seconds_of(lambda: [start()], last, late_seconds)))
            return median(timed[1:])  # the first one makes connections

        self.progress(f"all-gather and all-to-all, {message_bytes:,} bytes")
        averaging_seconds = typical_seconds(lambda: self.transport.mean(averaged, PURPOSE))
        gather_seconds = typical_seconds(lambda: self.transport.all_gather(gathered, contribution, PURPOSE))
        exchange_seconds = typical_seconds(lambda: self.transport.all_to_all(exchanged, gathered, PURPOSE))
        return {
            "all_gather": max(1.0, gather_seconds / averaging_seconds),
            "all_to_all": max(1.0, exchange_seconds / averaging_seconds),
        }

    def largest_within(self, timings: list[Timing], seconds: float) -> int:
        """Return the largest timed message whose averaging takes less than `seconds`."""
        # Not larger than timed: if noise hides the rate, larger ones would seem to take no longer.
        sizes = [timing.message_bytes for timing in timings[1:] if timing.median_seconds < seconds]
        return max(sizes, default=MESSAGE_BYTES[1])

    def time_pairs(self, timings: list[Timing], budget_seconds: float) -> list[PairTiming]:
        """Time one pair after the other while all others wait."""
        # The number of pairs grows with the square of the processes, and they are timed one after the other.
        ranks = range(self.transport.size)
        all_pairs = self.transport.size <= MAX_PROCESSES_FOR_ALL_PAIRS
        pairs = list(combinations(ranks, 2) if all_pairs else pairwise(ranks))
        # A message of a pair takes about as long as averaging as many bytes.
        pair_seconds = budget_seconds / len(pairs) / (2 * (PAIR_REPETITIONS + 1))
        message_bytes = self.largest_within(timings, min(PAIR_SECONDS, pair_seconds))
        message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=self.device)
        pair_timings = []
        for pair in pairs:
            self.progress(f"processes {pair[0]} and {pair[1]}, {message_bytes:,} bytes")
            seconds = 0.0
            # The others wait below: two concurrent pairs would share links.
            if self.transport.rank in pair:
                pings = [self.transport.ping_seconds(*pair, message) for _ in range(PAIR_REPETITIONS + 1)]
                # The minimum: other work on the machines only adds time, and would hide which are close.
                seconds = min(pings[1:])
            # All use the time of the pair's first rank: they must have the same.
            everyone = gather_numbers([seconds], self.transport, PURPOSE)
            pair_timings.append(PairTiming(pair, message_bytes, everyone[pair[0]][0]))
        return pair_timings
