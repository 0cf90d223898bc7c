"""Messages: what generators ask for at one time travels together, one message for each operation and type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.algorithms import AllGather, AllToAll, Commit, Mean
from thinwire.channel import Transport, Work
from thinwire.errors import ConfigError
from thinwire.tensors.layout import as_one


@dataclass
class Sent:
    """A message of one or several requests, under way.

    Attributes:
        work: To wait for.
        message: Kept until it has come back: a backend may read it meanwhile.
        parts: Returns the answers, once it has come back.
    """

    work: Work
    message: torch.Tensor
    parts: Callable[[], Sequence[torch.Tensor]]


def send_all(
    requests: Sequence[Any], transport: Transport, purpose: str
) -> list[tuple[list[tuple[int, int]], Sent]]:
    """Send what some generators ask for; messages of one operation, type and device as one.

    Returns:
        Each message with whose parts it is made of: (place in `requests`, place in that one's tuple).
    """
    kinds: dict[tuple[str, str, type], list[tuple[int, int, Any]]] = {}
    for number, request in enumerate(requests):
        if isinstance(request, Commit):
            continue
        for place, message in enumerate(request if isinstance(request, tuple) else (request,)):
            _check_message(message)
            key = (str(message.tensor.device), str(message.tensor.dtype), type(message))
            kinds.setdefault(key, []).append((number, place, message))
    # Backends match collectives by their order alone, and wait for ever where it differs. Sorted, it follows
    # from what is asked for: not from which bucket asked first, nor from what a dictionary makes of that.
    sent = []
    for key in sorted(kinds, key=lambda key: (key[0], key[1], key[2].__name__)):
        owners = [(number, place) for number, place, _ in kinds[key]]
        tensors = [message.tensor for _, _, message in kinds[key]]
        kind = key[2]
        sent.append((owners, _SENDERS[kind](tensors, transport, purpose, kind.__name__)))
    return sent


def _send_means(tensors: list[torch.Tensor], transport: Transport, purpose: str, name: str) -> Sent:
    _check_flat(tensors, name)
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ConfigError(
                f"an exchange has asked for the mean of {tensor.dtype}, expected a floating type; "
                "AllGather and AllToAll carry every type"
            )
    # One alone is not copied, so its mean comes to lie where the request was.
    flat = tensors[0] if len(tensors) == 1 else as_one(tensors)
    work = transport.mean(flat, purpose)
    sizes = [tensor.numel() for tensor in tensors]
    return Sent(work, flat, lambda: [flat] if len(sizes) == 1 else flat.split_with_sizes(sizes))


def _send_gathers(tensors: list[torch.Tensor], transport: Transport, purpose: str, name: str) -> Sent:
    _check_flat(tensors, name)
    # Contiguous, for transports carry a tensor's memory as it lies, as bytes.
    flat = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
    rows = flat.new_empty(transport.size, flat.numel())
    work = transport.all_gather(rows, flat, purpose)
    sizes = [tensor.numel() for tensor in tensors]
    return Sent(work, flat, lambda: rows.split_with_sizes(sizes, dim=1))


def _send_exchanges(tensors: list[torch.Tensor], transport: Transport, purpose: str, name: str) -> Sent:
    for tensor in tensors:
        if tensor.dim() != 2 or len(tensor) != transport.size:
            raise ConfigError(
                f"an exchange has asked for {name} of shape {tuple(tensor.shape)}, expected a row for each "
                f"of the {transport.size} members"
            )
    # Side by side: of each request row i is for member i.
    rows = tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors, dim=1)
    received = torch.empty_like(rows)
    work = transport.all_to_all(received, rows, purpose)
    sizes = [tensor.shape[1] for tensor in tensors]
    return Sent(work, rows, lambda: received.split_with_sizes(sizes, dim=1))


_SENDERS: dict[type, Callable[[list[torch.Tensor], Transport, str, str], Sent]] = {
    Mean: _send_means,
    AllGather: _send_gathers,
    AllToAll: _send_exchanges,
}


def _check_message(message: object) -> None:
    if type(message) not in _SENDERS:
        raise ConfigError(
            f"an exchange has asked for {message!r}, expected Mean, AllGather or AllToAll, of which several "
            "may stand in a tuple; or, alone, Jointly or Commit"
        )
    tensor: object = message.tensor  # type: ignore[attr-defined]
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(
            f"an exchange has asked for {type(message).__name__} of {got}, expected a dense tensor"
        )


def _check_flat(tensors: list[torch.Tensor], operation: str) -> None:
    for tensor in tensors:
        if tensor.dim() != 1:
            raise ConfigError(
                f"an exchange has asked for {operation} of shape {tuple(tensor.shape)}, expected a flat "
                "tensor; send tensor.view(-1)"
            )
