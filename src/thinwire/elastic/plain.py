"""Plain values and tensors as bytes: a JSON header and the tensors' memory. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from thinwire.errors import StateError

MAX_HEADER_BYTES = 1 << 28
MAX_DEPTH = 32
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def packed(value: object) -> tuple[bytes, list[torch.Tensor]]:
    """Return a header, and the tensors that belong to it as flat bytes on the CPU, in its order.

    Args:
        value: Mappings, lists, tuples, tensors, text, numbers, True, False and None, nested.

    Raises:
        StateError: There is something else in it.

    Examples:
        >>> header, tensors = packed({"step": 3, "weight": torch.ones(2)})
        >>> len(tensors), unpacked(header, tensors)
        (1, {'step': 3, 'weight': tensor([1., 1.])})
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_described(value, tensors)).encode(), tensors


def _described(value: object, tensors: list[torch.Tensor]) -> object:
    """Return a value as JSON holds it; whatever is not a number, text, truth value or None is tagged."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        held = value.detach().to("cpu").contiguous()
        if held.dtype not in NAMES:
            raise StateError(
                f"a tensor of {held.dtype} can't be sent to a member that joins, expected one of "
                f"{', '.join(DTYPES)}; keep it in one of those"
            )
        tensors.append(held.view(-1).view(torch.uint8))
        return ["tensor", NAMES[held.dtype], list(held.shape)]
    if isinstance(value, Mapping):
        pairs = [[_described(key, tensors), _described(each, tensors)] for key, each in value.items()]
        return ["mapping", pairs]
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_described(each, tensors) for each in value]]
    raise StateError(
        f"a {type(value).__name__} can't be sent to a member that joins, expected tensors, numbers, text, "
        "None, and lists, tuples and mappings of them; use optimizers with such settings and state only (the "
        "one inside LocalSGD or DiLoCo is not sent with send_optimizer=False)"
    )


def sizes(header: bytes) -> list[int]:
    """Return of each tensor of a header its bytes, in order.

    Raises:
        StateError: It is no header of `packed`.
    """
    found: list[int] = []
    _rebuilt(_parsed(header), lambda dtype, shape: found.append(prod(shape) * dtype.itemsize), 0)
    return found


def unpacked(header: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what `packed` was given.

    Args:
        header: As it was returned.
        tensors: As they were returned.

    Raises:
        StateError: The header is not one of `packed`, or is not of these tensors.
    """
    left = list(tensors)

    def taken(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        if not left or left[0].numel() != prod(shape) * dtype.itemsize:
            raise _damaged("its tensors are not those of its header")
        # Cloned: a view of bytes as a wider type needs an aligned beginning.
        return left.pop(0).clone().view(dtype).view(tuple(shape))

    value = _rebuilt(_parsed(header), taken, 0)
    if left:
        raise _damaged("it has more tensors than its header")
    return value


def _parsed(header: bytes) -> object:
    try:
        return json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _damaged(str(error)) from error


def _rebuilt(value: object, tensor_of: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is not list or not value or depth > MAX_DEPTH:
        raise _damaged("a value without a kind, or too deeply nested")
    match value:
        case ["tensor", str(name), list(shape)] if name in DTYPES and all(
            type(length) is int and 0 <= length < 1 << 48 for length in shape
        ):
            return tensor_of(DTYPES[name], shape)
        case ["mapping", list(pairs)] if all(type(pair) is list and len(pair) == 2 for pair in pairs):
            rebuilt = [[_rebuilt(part, tensor_of, depth + 1) for part in pair] for pair in pairs]
            if all(type(key) in (str, int, float, bool) or key is None for key, _ in rebuilt):
                return dict(rebuilt)
        case ["tuple" | "list" as kind, list(items)]:
            values = [_rebuilt(item, tensor_of, depth + 1) for item in items]
            return tuple(values) if kind == "tuple" else values
    raise _damaged(f"a value of kind {str(value[0])[:20]!r}")


def _damaged(why: str) -> StateError:
    return StateError(f"what the group has sent this member to start from can't be read: {why}")
