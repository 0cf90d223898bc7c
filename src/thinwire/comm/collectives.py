"""Functions built on collectives, outside steps: copy one member's tensors, gather those of all."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from thinwire.comm.transport import Transport
from thinwire.errors import CommunicationError

Item = TypeVar("Item")

# A shape and a dtype as text, padded to one length on all members: enough for a hundred dimensions.
DESCRIBED_BYTES = 512

# Copied in one message, unless a single tensor is larger. A member holds two more copies of each message.
COPIED_BYTES = 64 << 20


def copy_from(is_source: bool, tensors: Iterable[torch.Tensor], transport: Transport) -> None:
    """Overwrite every tensor in place with one member's; exact to the bit.

    Collective. Tensors are sent as bytes, in messages of at most 64 MiB; a larger tensor by itself.
    """
    by_device = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            by_device[tensor.device].append(tensor.detach())
    # Devices are in tensor order, which is the same on all members: so messages are, too.
    for device, copied in by_device.items():
        # Find the source: only the source itself knows.
        offered = torch.tensor([transport.rank if is_source else -1], device=device)
        transport.all_reduce(offered, "finding the process to copy from", operation="max").wait()
        source = int(offered)
        if source < 0:
            raise CommunicationError("no process of the group offers its tensors to the others")
        for batch in in_messages(copied, COPIED_BYTES, lambda tensor: tensor.nbytes):
            # Many tensors in one message: a model has hundreds, and each message costs a latency.
            flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in batch])
            transport.broadcast(flat, source, "copying tensors").wait()
            parts = flat.split_with_sizes([tensor.nbytes for tensor in batch])
            for tensor, part in zip(batch, parts, strict=True):
                # Clone: unaligned bytes can't be viewed as a wider dtype.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def in_messages(items: Iterable[Item], limit: int, size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield items in order, as many at a time as fit within a limit; a larger one by itself."""
    batch: list[Item] = []
    total = 0
    for item in items:
        total += size(item)
        if batch and total > limit:
            yield batch
            batch, total = [], size(item)
        batch.append(item)
    if batch:
        yield batch


def true_for_all(is_true: torch.Tensor, transport: Transport, purpose: str) -> torch.Tensor:
    """Return whether something is true on every member, as a tensor of one bool. Collective."""
    # The maximum of the negation: transports have sums and maxima, and not every backend reduces bools.
    # On the gradients' device: otherwise the host would wait for it, even if it does not read the result.
    is_false = (~is_true).to(transport.data_device, torch.uint8).view(1)
    transport.all_reduce(is_false, purpose, operation="max").wait()
    return is_false[0] == 0


def gather_numbers(numbers: Sequence[float], transport: Transport, purpose: str) -> list[list[float]]:
    """Return the numbers of all members, by rank. Collective; a message and a host synchronisation."""
    # float64 holds counts of steps and bytes exactly.
    own = torch.tensor(numbers, dtype=torch.float64, device=transport.control_device)
    rows = own.new_empty(transport.size, len(numbers))
    transport.all_gather(rows, own, purpose).wait()
    return rows.tolist()


def gather_values(value: object, transport: Transport, purpose: str) -> list[Any]:
    """Return the values of all members, as JSON holds them, by rank.

    Collective; two messages and host synchronisations.
    """
    data = json.dumps(value).encode()
    # Pad to one length on all members; JSON ignores spaces at the end.
    longest = max(int(length) for (length,) in gather_numbers([len(data)], transport, purpose))
    return list(map(json.loads, gather_bytes(data.ljust(longest), transport, purpose)))


def gather_bytes(data: bytes, transport: Transport, purpose: str) -> list[bytes]:
    """Return the bytes of all members, of one length, by rank. Collective; a host synchronisation."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(transport.control_device)
    rows = own.new_empty(transport.size, len(own))
    transport.all_gather(rows, own, purpose).wait()
    return list(map(bytes, rows.tolist()))


def gather_stacked(tensor: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Return the tensors of all members, stacked by rank: shape (members, *shape). Collective.

    Shapes and dtypes are compared first: if they differ, a backend would hang or mix them up.
    """
    described = f"{tuple(tensor.shape)} {tensor.dtype}".encode().ljust(DESCRIBED_BYTES)[:DESCRIBED_BYTES]
    everyone = gather_bytes(described, transport, "comparing the shapes to gather")
    if len(set(everyone)) > 1:
        kinds = [f"process {rank}: {kind.decode().rstrip()}" for rank, kind in enumerate(everyone)]
        raise CommunicationError(
            f"all processes must gather one shape and type, got {'; '.join(kinds)}; pad or cast first"
        )
    flat = tensor.contiguous().view(-1)
    rows = flat.new_empty(transport.size, flat.numel())
    transport.all_gather(rows, flat, "gathering tensors").wait()
    return rows.view(transport.size, *tensor.shape)
