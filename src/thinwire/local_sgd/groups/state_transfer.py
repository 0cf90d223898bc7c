"""Transfer of newcomers' initial state, and of leavers' residuals, in parts of bounded size."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from thinwire.comm import Transport
from thinwire.comm.collectives import in_messages
from thinwire.comm.process_group import GroupTransport
from thinwire.errors import StateError
from thinwire.tensors.layout import local_tensor

# The timeout is for one part, so that a slow link is not mistaken for a member that does not respond. But
# while a newcomer receives its state, the other members wait in one message: see `receive_state`.
PART_BYTES = 1 << 22
MAX_BYTES = 1 << 44
MEASURED_SHARE = 0.2  # share of the timeout: after it, estimate whether a state will arrive in time
PURPOSE = "sending a newcomer what it starts from"


def plain(value: Any) -> Any:
    """Return a value made of CPU tensors, numbers, text and None, in lists, tuples and dicts."""
    # A tensor subclass, such as the state of an 8-bit optimizer, may have no memory at its address.
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) or hasattr(value, "to_local")
    if isinstance(value, torch.Tensor) and is_plain:
        return local_tensor(value).to("cpu").contiguous()
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    # NumPy's float64 is a float, but `weights_only` does not accept it.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise StateError(
        f"a {type(value).__name__} can't be sent to a joining member, expected tensors, numbers, text, "
        "None, and lists, tuples and mappings of them; use other optimizers, or send_optimizer=False"
    )


def serialize(value: object) -> torch.Tensor:
    """Return the bytes of a value as returned by `plain`.

    Examples:
        >>> deserialize(serialize({"step": 3, "weight": torch.ones(2)}))
        {'step': 3, 'weight': tensor([1., 1.])}
    """
    file = io.BytesIO()
    torch.save(plain(value), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def deserialize(data: torch.Tensor) -> Any:
    """Return the value of bytes from `serialize`."""
    try:
        return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # damaged data raises all kinds of errors
        raise StateError(
            f"the initial state that this member received can't be read: {error}; install the same version "
            "of Thinwire on all members"
        ) from error


def send_state(state: object, transport: GroupTransport, newcomers: Sequence[int]) -> None:
    """Send a state to members that call `receive_state`, one after the other."""
    data = serialize(state)
    for newcomer in newcomers:
        transport.send(torch.tensor([len(data)], device="cpu"), newcomer, PURPOSE).wait()
        for part in torch.split(data, PART_BYTES):
            transport.send(part, newcomer, PURPOSE).wait()


def broadcast_state(state: object, transport: Transport, source: int) -> Any:
    """Return a member's state on all members. Collective."""
    data = serialize(state)
    length = torch.tensor([len(data)], device=transport.control_device)
    transport.broadcast(length, source, PURPOSE).wait()
    sent = (data if transport.rank == source else data.new_empty(int(length))).to(transport.control_device)
    transport.broadcast(sent, source, PURPOSE).wait()
    return state if transport.rank == source else deserialize(sent.cpu())


def broadcast_residual(errors: Iterable[torch.Tensor], transport: Transport, rank: int) -> list[torch.Tensor]:
    """Return the residual that the leaving member of this rank has not transmitted. Collective."""
    arrived = [residual if transport.rank == rank else torch.empty_like(residual) for residual in errors]
    pieces = chain.from_iterable(torch.split(tensor.view(torch.uint8), PART_BYTES) for tensor in arrived)
    # Each part costs a round trip, so small tensors (biases, counts of steps) share one.
    for part in in_messages(pieces, PART_BYTES, len):
        flat = torch.cat(part)
        transport.broadcast(flat, rank, "the residual of a leaving member").wait()
        for piece, its_bytes in zip(part, flat.split_with_sizes(list(map(len, part))), strict=True):
            piece.copy_(its_bytes)
    return arrived


def receive_state(transport: GroupTransport, source: int, timeout_seconds: float) -> Any:
    """Return the state that a member sends, if it arrives within the time that the others wait for it."""
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    transport.receive(length, source, PURPOSE).wait()
    if not 0 < int(length) < MAX_BYTES:
        raise StateError(
            f"the initial state sent to this member begins with a length of {int(length)} bytes; install "
            "the same version of Thinwire on all members"
        )
    data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    start, num_received = time.monotonic(), 0
    for part in torch.split(data, PART_BYTES):
        transport.receive(part, source, PURPOSE).wait()
        num_received += len(part)
        seconds = time.monotonic() - start
        expected = seconds * len(data) / num_received
        # Raise as soon as this is known: otherwise the others would time out, again and again.
        if seconds >= MEASURED_SHARE * timeout_seconds and expected > timeout_seconds:
            rate = 8e-6 * num_received / seconds
            raise StateError(
                f"a newcomer's state of {len(data) / 1e6:.0f} MB takes about {expected:.0f} s at {rate:.1f} "
                f"Mbit/s, but members wait {timeout_seconds:g} s, so it has left. Start all with "
                f"TorchftGroup(timeout_seconds={2 * expected:.0f}), or with send_optimizer=False"
            )
    return deserialize(data)
