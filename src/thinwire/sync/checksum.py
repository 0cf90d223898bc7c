"""Checks of saved states of every kind: a version, a checksum, tensors that store what they say."""

from __future__ import annotations

import ctypes
import json
import math
import zlib
from collections.abc import Mapping, Sequence, Set

import torch

from thinwire.checks import whole_number
from thinwire.errors import StateError

MAX_NUMBER_BITS = 64
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
AS_MADE = "load a state as state_dict() made it"


def with_checksum(state: Mapping[str, object]) -> dict[str, object]:
    """Return a state with a CRC-32 of all its values and of the bytes, shapes and types of its tensors.

    Cost: one read of the tensors, and a copy of those that are not on the CPU.

    Examples:
        >>> with_checksum({"step": 3, "error": (("weight", torch.zeros(2)),)})["checksum"]
        'crc32:7022cc1c'
    """
    return {**state, "checksum": _checksum(*_described(state))}  # in place of the one that it has


def check_kind(state: object, version: int, keys: Set[str], made_by: str) -> None:
    """Refuse what is not a state of a kind and version; it may have more keys than those."""
    check_readable(state)
    its = state if isinstance(state, Mapping) else {}
    if "version" in its and whole_number("version", its["version"], minimum=0, error=StateError) != version:
        raise StateError(
            f"the state is of version {its['version']!r}, this Thinwire reads version {version}; "
            "load it with the Thinwire that saved it"
        )
    if not its.keys() >= keys:
        raise StateError(f"expected a state made by {made_by}, got {shown_kind(state)}")


def shown_kind(value: object) -> str:
    """Return the kind of a value, in a few words."""
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))[:8]}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return type(value).__name__


def check_finite(key: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse numbers that are not finite: one would stop all later steps, or spread to the model."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise StateError(f"{key} of {name} is not finite: the state is damaged; load an earlier one")


def check_readable(state: object) -> None:
    """Refuse values that can't be shown or sent: first of all, so that every other check may show them."""
    try:
        _plain(state, [])
    except StateError:
        raise
    except (ValueError, RecursionError) as error:
        raise StateError(f"the state can't be read: {error}; {AS_MADE}") from error


def check_undamaged(state: Mapping[str, object]) -> str:
    """Return the checksum of a state, if it is the one that the state has, or if that is None."""
    described, tensors = _described(state)
    # Before anything is read: a file of a few bytes can hold a tensor of any size, without values or with one
    # value expanded.
    _check_stored(tensors)
    actual = _checksum(described, tensors)
    if state.get("checksum") not in (None, actual):
        raise StateError(
            "the state is damaged: it is not what its checksum was made of; load an earlier one. (If you "
            "have changed it on purpose, set state['checksum'] to None)"
        )
    return actual


def _check_stored(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that are not stored number by number, or require gradients."""
    wrong = ""
    for tensor in tensors:
        # Compare types exactly: a subclass may report any shape and size.
        is_plain = type(tensor) in PLAIN_TYPES and not tensor.is_nested
        if not is_plain or tensor.layout != torch.strided or tensor.is_meta:
            wrong = f"layout {tensor.layout} on {tensor.device}, expected dense tensors with values"
        elif tensor.requires_grad:
            wrong = f"shape {tuple(tensor.shape)} that requires a gradient, expected plain values"
        if wrong:
            raise StateError(f"the state has a {type(tensor).__name__} of {wrong}; {AS_MADE}")
    shape_bytes = sum(math.prod(tensor.shape) * tensor.itemsize for tensor in tensors)
    storages = [tensor.untyped_storage() for tensor in tensors]
    # Count each storage once: several tensors may share it.
    stored_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    if shape_bytes > stored_bytes:
        words = f"{shape_bytes} bytes, of which {stored_bytes} are stored: some are expanded or share memory"
        raise StateError(f"the state's tensors have {words}; {AS_MADE}")


def _described(state: Mapping[str, object]) -> tuple[bytes, list[torch.Tensor]]:
    """Return all of a state but its checksum: its values as bytes, and its tensors."""
    tensors: list[torch.Tensor] = []
    plain = _plain({key: value for key, value in state.items() if key != "checksum"}, tensors)
    return json.dumps(plain).encode(), tensors


def _checksum(described: bytes, tensors: Sequence[torch.Tensor]) -> str:
    crc = zlib.crc32(described)
    for tensor in tensors:
        # An unknown class may have no memory at its address, or less than it says.
        if type(tensor) not in PLAIN_TYPES:
            raise StateError(
                f"the state has a {type(tensor).__name__}, expected plain tensors, whose bytes can be read; "
                "an optimizer with such state can't be saved here, nor sent to a member that joins"
            )
        held = tensor.detach().cpu().contiguous()
        # The memory itself: NumPy knows no bfloat16, and bytes of it would be a copy of the model's size.
        if held.numel():
            crc = zlib.crc32((ctypes.c_char * held.nbytes).from_address(held.data_ptr()), crc)
    return f"crc32:{crc:08x}"


def _plain(value: object, tensors: list[torch.Tensor]) -> object:
    """Return a value as JSON can hold it; each tensor is described, and put into `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return f"{tuple(value.shape)} {value.dtype}"
    # Python turns no number of 4 300 digits into text, and members compare numbers of 64 bits.
    if isinstance(value, int) and value.bit_length() > MAX_NUMBER_BITS:
        raise StateError(
            f"the state has a whole number of {value.bit_length()} bits, expected at most {MAX_NUMBER_BITS}; "
            "load an earlier one"
        )
    if isinstance(value, Mapping):  # sorted: what has stored it may have changed the order
        _plain(list(value), [])
        return [[str(key), _plain(value[key], tensors)] for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_plain(item, tensors) for item in value]
    for kind in (bool, int, float, str):
        # Use the plain type's repr: NumPy's float64 is a float too, but prints differently.
        if isinstance(value, kind):
            return kind.__repr__(value)
    return repr(value)
