"""What members hand over, as bytes in torch's format, read with `weights_only`: nothing of it is run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.errors import StateError


def plain(value: object) -> Any:
    """Return a value of tensors on the CPU, numbers, text and None, in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu").contiguous()
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    # NumPy's float64 is a float, and `weights_only` does not take it.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise StateError(
        f"a {type(value).__name__} can't be sent to a member that joins, expected tensors, numbers, text, "
        "None, and lists, tuples and mappings of them; use optimizers with such settings and state only (the "
        "one inside LocalSGD or DiLoCo is not sent with send_optimizer=False)"
    )


def packed(value: object) -> torch.Tensor:
    """Return the bytes of a value such as `plain` returns.

    Examples:
        >>> unpacked(packed({"step": 3, "weight": torch.ones(2)}))
        {'step': 3, 'weight': tensor([1., 1.])}
    """
    file = io.BytesIO()
    torch.save(plain(value), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(data: torch.Tensor) -> Any:
    """Return what `packed` was given."""
    try:
        return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged, it raises what it likes
        raise StateError(
            f"what the group has sent this member to start from can't be read: {error}; install the same "
            "Thinwire on all members"
        ) from error
