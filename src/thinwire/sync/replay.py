"""Steps that are recorded once as CUDA graphs and then replayed: so the host has little to do in them.

A step of many small launches takes the host several times as long as the device. What is launched between two
messages is the same in every step, as long as gradients, memory and messages stay where they are: it is one
graph, and the messages are sent between the graphs as they were when the step was recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from thinwire.algorithms import Bucket, BucketPlan, Commit, Memory, Requests, Slot
from thinwire.comm import Message, Transport, Work
from thinwire.errors import CommunicationError, StepError, ThinwireError
from thinwire.kernels.device_tables import uploading_by
from thinwire.sync.scheduler import CollectiveScheduler, Round, Task
from thinwire.tensors.accelerators import to_device_async

enabled = True
"""Whether steps are recorded at all; read at each step."""

# The first ones allocate memory, compile kernels and load them, none of which may be recorded.
UNRECORDED_STEPS = 2

Place: TypeAlias = "tuple[Slot, str]"


class Graph(Protocol):
    """Launches that are recorded, not made, and can be made any number of times."""

    def recording(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's launches on the device are recorded."""

    def upload(self, made: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a table of the host on the device; it is there when the graph is launched."""

    def replay(self) -> None:
        """Launch it on the current stream."""


class CudaGraph:
    """A CUDA graph; all of a step share memory and the stream that they are recorded on."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._outside = torch.cuda.current_stream(stream.device)
        self._graph = torch.cuda.CUDAGraph()
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and on the host

    @contextmanager
    def recording(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            # Other threads may go on, such as those that load data.
            self._graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                with warnings.catch_warnings():
                    # Between some messages there is nothing to launch.
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                    self._graph.capture_end()
        for table, made in self._tables:
            table.copy_(to_device_async(table.device, made))

    def upload(self, made: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Filled after the recording, which must contain no copy from the host."""
        # In the graph's memory it could lie on the scratch of the graph's earlier launches.
        with torch.cuda.stream(self._outside):
            self._tables.append((torch.empty_like(made, device=device), made))
        return self._tables[-1][0]

    def replay(self) -> None:
        self._graph.replay()


def can_record(device: torch.device) -> bool:
    """Return whether steps on a device are recorded."""
    return device.type == "cuda" and not torch.version.hip


def cuda_graphs(device: torch.device) -> Callable[[], Graph]:
    """Return a function that makes the graphs of one step."""
    # Steps do not share memory: what one leaves for a different one must not be its scratch.
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return lambda: CudaGraph(pool, stream)


class Section(NamedTuple):
    """A graph of the launches between messages."""

    graph: Graph
    waits: Sequence[int]  # numbers of the messages that must have come before
    messages: list[Message]  # sent behind it


class Passed(Task):
    """Stands for a bucket's task at its commit."""

    def __init__(self, gate: Commit) -> None:
        self.request = self.gate = gate


@dataclass
class Tape:
    """A recorded step."""

    buckets: list[Bucket] = field(default_factory=list)  # hold the gradients' memory, in the order of starts
    scales: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    found_healthy: torch.Tensor | None = None  # whether the step is, by what was received
    is_healthy: torch.Tensor | None = None  # the copy that the commit reads
    before: dict[Place, torch.Tensor] = field(default_factory=dict)  # memory that the step reads
    after: dict[Place, torch.Tensor] = field(default_factory=dict)  # and that it leaves, if that differs

    def fits(self, memory: Memory) -> bool:
        """Return whether memory is where the step would read it."""
        return all(memory[slot].get(label) is tensor for (slot, label), tensor in self.before.items())


class Homes:
    """Where each tensor of memory lies whenever a recorded step reads it."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[Slot, str, torch.Size, torch.dtype], torch.Tensor] = {}

    def bring(self, memory: Memory) -> dict[Place, torch.Tensor]:
        """Bring memory home, and return it; what has no home yet is at home where it is."""
        found: dict[Place, torch.Tensor] = {}
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for slot, tensors in memory.slots.items():
            for label, tensor in tensors.items():
                home = self._tensors.setdefault((slot, label, tensor.shape, tensor.dtype), tensor)
                if home.data_ptr() != tensor.data_ptr():
                    moved.append((home, tensor))
                found[slot, label] = tensors[label] = home
        if moved:
            torch._foreach_copy_([home for home, _ in moved], [tensor for _, tensor in moved])
        return found


class Recorder(CollectiveScheduler):
    """Drives a step's buckets as an `CollectiveScheduler`, and records it."""

    def __init__(
        self,
        transport: Transport,
        name: str,
        memory: Memory,
        homes: Homes,
        new_graph: Callable[[], Graph],
        variant: Hashable,
    ) -> None:
        super().__init__(transport, name)
        self.variant, self.tape = variant, Tape(before=homes.bring(memory))
        self.is_whole: bool | None = None  # whether all was recorded; None before the commit
        self._memory, self._homes, self._new_graph = memory, homes, new_graph
        self._waits: list[int] = []  # of the next section
        self._numbers: dict[Round, range] = {}  # of the messages of rounds under way
        self._num_messages = 0

    def loss_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Return a copy that lies where every replay finds its own."""
        return self.tape.scales.setdefault(scale.device, scale.clone())

    def start(self, requests: Requests, name: str, bucket: Bucket | None = None) -> None:
        assert bucket is not None
        self.tape.buckets.append(bucket)
        super().start(requests, name)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        graph = self._new_graph()
        try:
            with graph.recording(), uploading_by(graph.upload):
                yield
        except RuntimeError as error:  # CUDA's
            if isinstance(error, ThinwireError):
                raise
            why = str(error).partition("\n")[0]
            raise StepError(
                f"{self._name} could not be recorded as a CUDA graph ({why}); set "
                "thinwire.sync.replay.enabled = False before training"
            ) from error
        self.tape.sections.append(Section(graph, self._waits, []))
        self._waits = []
        graph.replay()

    def _wait(self, rounds: Sequence[Round]) -> None:
        super()._wait(rounds)
        for round_ in rounds:
            self._waits += self._numbers.pop(round_)

    def _send(self, later: Round) -> None:
        super()._send(later)
        messages = [packed.message for packed in later.packed]
        self.tape.sections[-1].messages.extend(messages)
        self._numbers[later] = range(self._num_messages, self._num_messages + len(messages))
        self._num_messages += len(messages)

    def is_healthy(self) -> torch.Tensor:
        """As `CollectiveScheduler.is_healthy`; the next replay leaves the answer as it is."""
        with self._computing():
            self.tape.found_healthy = super().is_healthy()
        return self.tape.found_healthy.clone()

    def commit_early(self) -> None:
        """Let no one pass: all commit in one section."""

    def commit(self, tasks: Sequence[Task], is_healthy: torch.Tensor | None = None) -> None:
        """As `CollectiveScheduler.commit`; memory comes to lie where the next step reads it."""
        self.tape.is_healthy = is_healthy = None if is_healthy is None else is_healthy.clone()
        self.tape.tasks = [Passed(task.gate) for task in self.tasks if task.gate is not None]
        with self._computing():
            super().commit(tasks, is_healthy)
            after = self._homes.bring(self._memory)
        self.tape.after = {at: it for at, it in after.items() if self.tape.before.get(at) is not it}
        # If some commit by themselves, or memory is dropped, the host has done more than launch.
        self.is_whole = len(tasks) == len(self.tasks) and self.tape.before.keys() <= after.keys()


class Replay(CollectiveScheduler):
    """Drives a step that was recorded: as an `CollectiveScheduler` does, without its arithmetic."""

    def __init__(self, tape: Tape, transport: Transport, name: str, memory: Memory) -> None:
        super().__init__(transport, name)
        self._tape, self._memory = tape, memory
        self._sections = iter(tape.sections)
        self._works: list[Work] = []
        self._num_started = 0
        self._elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients that do not lie as recorded

    def loss_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Take the loss scale of this step."""
        return self._tape.scales[scale.device].copy_(scale)

    def _next(self) -> Section:
        section = next(self._sections)
        for number in section.waits:
            self._works[number].wait()
        section.graph.replay()
        for message in section.messages:
            purpose = f"{self._name}, {message.purpose.partition(', ')[2]}"
            self._works.append(self._transport.start(replace(message, purpose=purpose)))
        return section

    def start(self, requests: Requests, name: str, bucket: Bucket | None = None) -> None:
        requests.close()
        recorded = self._tape.buckets[self._num_started : self._num_started + 1]
        if bucket is None or [earlier.specs for earlier in recorded] != [bucket.specs]:
            raise StepError(
                f"{self._name}: the bucket of {name} came in a place that a different one had in the steps "
                "before; set thinwire.sync.replay.enabled = False before training"
            )
        self._num_started += 1
        if bucket.flat.data_ptr() != recorded[0].flat.data_ptr():
            recorded[0].flat.copy_(bucket.flat)
            self._elsewhere.append((bucket.flat, recorded[0].flat))
        self._next()

    def advance_earlier(self) -> None:
        if self._num_started > 1:
            self._next()

    def advance(self) -> bool:
        is_under_way = bool(self._next().messages)
        self.tasks = [] if is_under_way else self._tape.tasks
        return is_under_way

    def is_healthy(self) -> torch.Tensor:
        self._next()
        assert self._tape.found_healthy is not None
        return self._tape.found_healthy.clone()

    def commit_early(self) -> None:
        """As `Recorder.commit_early`."""

    def commit(self, tasks: Sequence[Task], is_healthy: torch.Tensor | None = None) -> None:
        if is_healthy is not None and self._tape.is_healthy is not None:
            self._tape.is_healthy.copy_(is_healthy)
        self._next()
        for (slot, label), tensor in self._tape.after.items():
            self._memory[slot][label] = tensor
        for there, here in self._elsewhere:
            there.copy_(here)

    def close(self) -> None:
        self.tasks = []

    def drain(self) -> None:
        for work in self._works:
            with suppress(CommunicationError):
                work.wait()


class Replays:
    """Which steps of an engine are recorded, and what was recorded."""

    def __init__(self) -> None:
        self._pays = False
        self._forget(())

    def _forget(self, plans: Sequence[BucketPlan]) -> None:
        self._plans, self._homes = plans, Homes()
        self.tapes: dict[Hashable, Tape] = {}
        self._seen: dict[Hashable, int] = {}
        self._unfit: set[Hashable] = set()

    def exchange(
        self, plans: Sequence[BucketPlan], memory: Memory, device: torch.device, wire: Transport, name: str
    ) -> CollectiveScheduler:
        """Return the scheduler that drives a step of buckets of these plans."""
        if plans is not self._plans:
            self._forget(plans)
            # Next to nothing is launched for what travels uncompressed.
            self._pays = any(route.is_compressed for plan in plans for route in plan.routes)
        if not (enabled and self._pays and can_record(device)):
            return CollectiveScheduler(wire, name)
        variant = tuple(plan.variant(memory, device) for plan in plans)
        if None in variant or variant in self._unfit:
            return CollectiveScheduler(wire, name)
        tape = self.tapes.get(variant)
        if tape is not None and tape.fits(memory):
            return Replay(tape, wire, name, memory)
        if tape is not None:  # something else has written memory
            self._forget(plans)
        self._seen[variant] = self._seen.get(variant, 0) + 1
        if self._seen[variant] <= UNRECORDED_STEPS:
            return CollectiveScheduler(wire, name)
        return Recorder(wire, name, memory, self._homes, cuda_graphs(device), variant)

    def bring_home(self, memory: Memory) -> None:
        """Bring memory that was written between two steps to where recorded ones read it."""
        if self.tapes:
            self._homes.bring(memory)

    def keep(self, exchange: CollectiveScheduler) -> None:
        """Keep what was recorded of a step that has ended."""
        if isinstance(exchange, Recorder) and exchange.is_whole:
            self.tapes[exchange.variant] = exchange.tape
        elif isinstance(exchange, Recorder) and exchange.is_whole is False:
            self._unfit.add(exchange.variant)
