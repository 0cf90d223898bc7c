"""Races between streams, and memory that is freed too early, found without a GPU.

Every operation is a kernel on the current one of some simulated streams. Torch's own CUDA sanitizer judges:
of two kernels that use one memory, and of which one writes it, one must be ordered behind the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda._sanitizer import EventHandler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpu_ready.counting import tensors_in
from thinwire.comm.transport import Message, Transport, Work

MAIN, NCCL = 0, 99


class Device(TorchDispatchMode):
    """What runs while it is on runs on its simulated streams."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.races: list[str] = []  # kernels that are not ordered behind others of the same memory
        # Kernels whose result was freed, and so used again by the stream that made it, too early for another.
        self.early_frees: list[str] = []
        self.stream = MAIN
        self._judge = EventHandler()
        self._known = {MAIN}
        self._events = 0
        self._alive: dict[int, tuple[StorageWeakRef, int | None, str]] = {}
        self._freed: list[tuple[int, str, list[tuple[int, int]]]] = []

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make another stream the current one."""
        if stream not in self._known:
            self._judge._handle_stream_creation(stream)
            self._known.add(stream)
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def recorded(self, stream: int | None = None) -> int:
        """Return an event of what a stream, else the current one, has been given so far."""
        self._events += 1
        self._judge._handle_event_creation(self._events)
        self._judge._handle_event_record(self._events, self.stream if stream is None else stream)
        return self._events

    def wait(self, event: int, stream: int | None = None) -> None:
        """Let a stream, else the current one, wait for an event."""
        self._judge._handle_event_wait(event, self.stream if stream is None else stream)

    def current_stream(self, device: torch.device) -> Stream:
        """Return the current stream, as `thinwire.sync.streams` asks for it."""
        return Stream(self, self.stream)

    def new_stream(self, device: torch.device) -> Stream:
        """Return a stream that is no other's, as `thinwire.sync.streams` makes it."""
        with self.on(max(self._known - {NCCL}) + 1):
            return Stream(self, self.stream)

    def run(self, name: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Note a kernel on the current stream."""
        self._reuse()
        writes = {tensor.untyped_storage().data_ptr() for tensor in written if tensor.numel()}
        reads = {tensor.untyped_storage().data_ptr() for tensor in read if tensor.numel()} - writes
        aliases: dict[int, list[str]] = {address: [] for address in reads | writes}
        found = self._judge._handle_kernel_launch(self.stream, reads, writes, set(), name, aliases)
        self.races += [f"{name} on stream {self.stream}" for _ in found]

    def _collect(self) -> None:
        """Take note of what was freed since, and by whom it was used last."""
        seen = self._judge.tensors_accessed
        for address, (reference, owner, name) in list(self._alive.items()):
            if reference.expired():  # type: ignore[no-untyped-call]
                del self._alive[address]
                if address in seen.accesses:
                    last = [*seen.get_reads(address), seen.get_write(address)]
                    used = [
                        (access.stream, access.seq_num)
                        for access in last
                        if access and access.stream != owner
                    ]
                    if owner is not None:
                        self._freed.append((owner, name, used))
                    seen.delete_tensor(address)

    def _reuse(self) -> None:
        """Give the current stream what was freed of its own: all other streams must be done with it."""
        for owner, name, used in [freed for freed in self._freed if freed[0] == self.stream]:
            if not all(self._judge.syncs.is_ordered_after(owner, number, other) for other, number in used):
                self.early_frees.append(f"{name} on stream {owner}")
        self._freed = [freed for freed in self._freed if freed[0] != self.stream]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._collect()
        kwargs = kwargs or {}
        out, name = func(*args, **kwargs), func._schema.name.removeprefix("aten::")
        if func.is_view or name in ("detach", "lift_fresh"):
            return out
        read: list[torch.Tensor] = []
        written = list(tensors_in((out,)))
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(tensors_in((value,)))
        # The host made what no kernel has written; its memory is used again as well.
        for owner, tensors in ((self.stream, written), (None, read)):
            for storage in (tensor.untyped_storage() for tensor in tensors if tensor.numel()):
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._alive.setdefault(storage.data_ptr(), (reference, owner, name))
        if not name.startswith(("empty", "new_empty")):
            self.run(name, read, written)
        return out


@dataclass(frozen=True)
class Stream:
    """What a `torch.Stream` is to a step."""

    device: Device
    number: int

    def wait_stream(self, other: Stream) -> None:
        """Let it wait for all that another one has been given."""
        self.device.wait(self.device.recorded(other.number), self.number)


class SimulatedNCCL(Transport):
    """A group of two alike over NCCL, which has its own stream and holds tensors until `wait`."""

    size, rank = 2, 0
    control_device = torch.device("cpu")

    def __init__(self, device: Device, *, forgets: bool) -> None:
        self.device = device
        self.forgets = forgets  # a planted bug: no stream waits for a message
        self.waiting = set[int]()  # the streams that have waited

    def start(self, message: Message) -> Work:
        """As `Transport.start`."""
        tensor, output, read = message.tensor, message.output, list[torch.Tensor]()
        if output is not tensor:
            read = [tensor]
            with _disable_current_modes():
                output.copy_(tensor.expand_as(output))
        self.device.wait(self.device.recorded(), NCCL)
        with self.device.on(NCCL):
            name = "mean" if message.operation == "mean" else message.collective
            self.device.run(name, read, [output])
            return _Sent(self, self.device.recorded(), [*read, output])


@dataclass
class _Sent:
    transport: SimulatedNCCL
    event: int
    held: list[torch.Tensor]

    def wait(self) -> None:
        device = self.transport.device
        self.transport.waiting.add(device.stream)
        if not self.transport.forgets:
            device.wait(self.event)
        self.held = []
