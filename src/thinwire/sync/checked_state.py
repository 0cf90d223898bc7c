"""A state that was handed over, from a file perhaps: all of it is checked before any of it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from thinwire.algorithms import Slot
from thinwire.algorithms.registry import SLOTS
from thinwire.checks import whole_number
from thinwire.errors import StateError
from thinwire.plan import SHARD_MARK, ParameterSpec
from thinwire.sync.checksum import check_readable, check_undamaged
from thinwire.sync.state import (
    DTYPES,
    KEYS,
    STATE_VERSION,
    LoadedState,
    check_model,
    names_in,
    slot_names,
)


def checked_state(
    state: object,
    specs: Mapping[str, ParameterSpec] | None,
    *,
    slots: Iterable[Slot] = (),
    strict: bool = True,
) -> LoadedState:
    """Return a state after checking all of it, before any of it is used.

    Args:
        state: What the user passed.
        specs: The parameters it must be for, None if they are not known yet.
        slots: What the algorithm in use remembers.
        strict: Whether it must be for just these parameters.

    Raises:
        StateError: It is not a Thinwire state, damaged, of another version, or of another model.

    Cost: a copy of its tensors, made once their kinds, shapes and what is stored of them have been checked.
    """
    check_readable(state)
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    if _count(state, "version") != STATE_VERSION:
        raise StateError(
            f"the state is of version {state['version']!r}, this Thinwire reads version {STATE_VERSION}; "
            "load it with the Thinwire that saved it"
        )
    if not state.keys() >= KEYS:
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    known = {**SLOTS, **{slot.name: slot for slot in slots}}
    # All that can be seen without its numbers comes first: a file may name tensors of any size, and no copy
    # is made before it is in order.
    saved_slots = _slots(state, known)
    shapes = _shapes(state)
    tensors = {slot: _tensors(state, slot.name) for slot in saved_slots}
    for key in ("algorithm", "checksum"):
        if not isinstance(state[key], str | None):
            raise StateError(f"{key} must be text, got {_kind(state[key])}")
    loaded = LoadedState(
        _count(state, "step"),
        _count(state, "skipped_steps"),
        shapes,
        tensors,
        checksum=check_undamaged(state),
    )
    _check_inside(loaded)
    if specs is not None:
        check_model(loaded, specs, strict=strict)
    return loaded._replace(slots={slot: _copied(slot.name, each) for slot, each in tensors.items()})


def _check_inside(loaded: LoadedState) -> None:
    """Refuse what is not of the parameters that are listed, or not of their shapes."""
    for slot, tensors in loaded.slots.items():
        for label, tensor in tensors.items():
            # A checksum says that a file is as it was written, not that it makes sense.
            if slot.is_elementwise and loaded.shapes.get(label) != tuple(tensor.shape):
                raise StateError(
                    f"the state's {slot.name} of {label} has shape {tuple(tensor.shape)}, its list of "
                    f"parameters says {loaded.shapes.get(label, 'nothing')}; load an earlier state"
                )
            if not loaded.shapes.keys() >= names_in(label):
                raise StateError(
                    f"the state has a {slot.name} of {label}, which is not in its list of parameters"
                )
            if slot.check is not None and SHARD_MARK not in label:  # of a shard, whose shape is not listed
                slot.check(label, tensor, loaded.shapes)


def _slots(state: Mapping[str, Any], known: Mapping[str, Slot]) -> list[Slot]:
    """Return what the tensors of a state are of."""
    names = slot_names(state)
    slots = []
    for name, kind in _pairs(state, "slots"):
        if (
            not isinstance(kind, list | tuple)
            or len(kind) != 2
            or not all(type(each) is bool for each in kind)
        ):
            raise StateError(f"slots must pair names with two flags, got {name!r}: {_kind(kind)}")
        # As it says of itself: it may be of an algorithm that is not in use here, and is carried along.
        slot = Slot(name, is_local=kind[0], is_elementwise=kind[1])
        if known.get(name, slot) != slot:
            raise StateError(
                f"the state has a {name} of another kind than this Thinwire's; load an earlier state"
            )
        slots.append(known.get(name, slot))
    if sorted(slot.name for slot in slots) != names:
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    return slots


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    for name, shape in _pairs(state, "parameters"):
        if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise StateError(f"parameters must pair names with shapes, got {name!r}: {_kind(shape)}")
    return {name: tuple(shape) for name, shape in state["parameters"]}


def _tensors(state: Mapping[str, Any], key: str) -> dict[str, torch.Tensor]:
    for name, tensor in _pairs(state, key):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
            raise StateError(
                f"{key} must pair names with floating tensors of 16, 32 or 64 bits, "
                f"got {name!r}: {_kind(tensor)}"
            )
    return dict(state[key])


def _copied(key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # One number that is not finite would stop all later steps, or spread from the residual to the model.
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise StateError(f"{key} of {name} is not finite: the state is damaged; load an earlier one")
    # Copies, for the user may go on with what was passed; at least of 32 bits, as memory is.
    return {
        name: tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for name, tensor in tensors.items()
    }


def _pairs(state: Mapping[str, Any], key: str) -> Sequence[tuple[str, Any]]:
    """Return the (name, value) pairs under a key."""
    pairs = state[key]
    if not isinstance(pairs, list | tuple):
        raise StateError(f"{key} must be a tuple of pairs of a name and a value, got {_kind(pairs)}")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise StateError(f"{key} must hold pairs of a name and a value, got {_kind(pair)}")
    # A mapping could not have a name twice; pairs can, and the last would win unseen.
    if len({name for name, _ in pairs}) < len(pairs):
        raise StateError(f"{key} has a name twice; the state is damaged, load an earlier one")
    return [(name, value) for name, value in pairs]


def _count(state: Mapping[str, Any], key: str) -> int:
    return whole_number(key, state[key], minimum=0, error=StateError)


def _kind(value: object) -> str:
    """Return what was got, in a few words."""
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))[:8]}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return f"{type(value).__name__}"
