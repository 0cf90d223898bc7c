"""Measuring how long averaging takes on a process group, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from statistics import fmean

import torch
import torch.distributed as dist

from thinwire.channel import ProcessGroupTransport, agree, gather_numbers
from thinwire.errors import ConfigError
from thinwire.probe.result import PairTiming, Probe, Timing, nodes_of

__all__ = ["probe"]

# Four times from one to the next: between them, `average_seconds` is linear.
MESSAGE_BYTES = [4, *(1024 << shift for shift in range(0, 17, 2))]  # 1 KiB to 64 MiB
MAX_REPETITIONS = 25
MIN_REPETITIONS = 3
PAIR_REPETITIONS = 5
PAIR_SECONDS = 0.05
MAX_PROCESSES_FOR_ALL_PAIRS = 8

Progress = Callable[[str], None]


def probe(
    group: dist.ProcessGroup | None = None,
    *,
    budget_seconds: float = 20.0,
    device: torch.device | None = None,
    all_pairs: bool | None = None,
    progress: Progress = lambda doing: None,
) -> Probe:
    """Measure averaging collectives over message sizes, and single pairs of processes. Collective.

    Args:
        group: The process group, None for the default one.
        budget_seconds: About how long it may take. Larger messages than fit in it are left out; three
            quarters are for averaging.
        device: Where the messages lie. By default the GPU that the group was made for, or else the current
            one, where NCCL carries its tensors; the CPU elsewhere.
        all_pairs: Whether to time all pairs of processes, or only neighbours; by default all of up to 8.
        progress: Gets what is being measured, in words.

    Returns:
        The same on every process.

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
    # Other arguments would mean other messages, and processes that wait for ever.
    agree(transport, {"budget_seconds": str(budget_seconds), "all_pairs": str(all_pairs)}, "a probe")
    meter = _Meter(transport, device, progress)
    timings = list(meter.timings(0.75 * budget_seconds))
    # All pairs grow with the square of the processes, and wait for each other.
    if all_pairs is None:
        all_pairs = transport.size <= MAX_PROCESSES_FOR_ALL_PAIRS
    ranks = range(transport.size)
    chosen = list(combinations(ranks, 2)) if all_pairs else list(pairwise(ranks))
    pair_bytes = meter.pair_bytes(timings, budget_seconds / 4 / max(1, len(chosen)))
    pairs = [meter.pair(each, pair_bytes) for each in chosen]
    return Probe(
        world_size=transport.size,
        backend=transport.backend_for(device),
        device=device.type,
        timings=timings,
        pairs=pairs,
        nodes=nodes_of(transport.size, pairs),
    )


class _Meter:
    """Measures, as one of the processes."""

    def __init__(self, transport: ProcessGroupTransport, device: torch.device, progress: Progress) -> None:
        self.transport, self.device, self.progress = transport, device, progress

    def timings(self, budget_seconds: float) -> Iterator[Timing]:
        """Time one message size after the other, as long as the time lasts."""
        end = time.perf_counter() + budget_seconds
        for index, message_bytes in enumerate(MESSAGE_BYTES):
            share_seconds = (end - time.perf_counter()) / (len(MESSAGE_BYTES) - index)
            message = torch.zeros(message_bytes // 4, device=self.device)
            self.progress(f"averaging {message_bytes:,} bytes")
            # Not counted: connections are made, pages are touched.
            first_seconds = self.once(message)
            # From the mean over all: with unlike numbers of repetitions they would wait for ever.
            wanted = self.agreed(min(MAX_REPETITIONS, share_seconds / max(first_seconds, 1e-6)))
            repetitions = max(MIN_REPETITIONS, int(wanted))
            yield Timing(message_bytes, [self.once(message) for _ in range(repetitions)])
            # The next size takes about four times as long. All stop at the same one: the decision is made on
            # a mean.
            missing_seconds = 4 * (MIN_REPETITIONS + 1) * first_seconds - (end - time.perf_counter())
            if self.agreed(missing_seconds) > 0 and index > 0:
                return

    def once(self, message: torch.Tensor) -> float:
        """Return the seconds of one averaging that all start together, their mean over the processes."""
        # All start together, or the first to come would count its waiting as the network's time.
        self.agreed(0.0)
        self._synchronize()
        start = time.perf_counter()
        self.transport.mean(message, "a probe").wait()
        self._synchronize()
        return self.agreed(time.perf_counter() - start)

    def agreed(self, number: float) -> float:
        """Return the mean of a number over the processes: the same on all."""
        return fmean(of_one for (of_one,) in gather_numbers([number], self.transport, "a probe"))

    def pair_bytes(self, timings: list[Timing], budget_seconds: float) -> int:
        """Return a message size for one pair, large enough to show the rate and small enough for the time.

        Args:
            timings: Of averaging.
            budget_seconds: For one pair.
        """
        found = Probe(self.transport.size, "", "", timings, [], [])
        seconds = min(PAIR_SECONDS, budget_seconds / (2 * (PAIR_REPETITIONS + 1)))
        # What an averaging of all manages in that time, one message of a pair does as well.
        sizes: list[int] = [each for each in MESSAGE_BYTES[1:] if found.average_seconds(each) < seconds]
        return max(sizes, default=MESSAGE_BYTES[1])

    def pair(self, processes: tuple[int, int], message_bytes: int) -> PairTiming:
        """Time a pair while all others wait.

        Args:
            processes: Their ranks.
            message_bytes: What they send each other.
        """
        self.progress(f"processes {processes[0]} and {processes[1]}, {message_bytes:,} bytes")
        found = 0.0
        # The others wait below: two pairs at a time would share links.
        if self.transport.rank in processes:
            message = torch.zeros(message_bytes // 4, device=self.device)
            seconds = [self.transport.ping_seconds(*processes, message) for _ in range(PAIR_REPETITIONS + 1)]
            # What else the computers do can only add to it, and would hide who is near whom.
            found = min(each or 0.0 for each in seconds[1:])
        everyone = gather_numbers([found], self.transport, "a probe")
        # As the first of the pair saw it; all must hold the same.
        return PairTiming(processes, message_bytes, everyone[processes[0]][0])

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
