"""Saved state: memory as tensors by slot and name, and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from thinwire.algorithms import Algorithm, Choices, Memory, Slot
from thinwire.algorithms.error_feedback import ERROR
from thinwire.algorithms.registry import SLOTS
from thinwire.checks import whole_number
from thinwire.errors import StateError
from thinwire.plan import BUCKET_SEPARATOR, SHARD_MARK, ParameterSpec
from thinwire.sync.checksum import check_undamaged, with_checksum

__all__ = [
    "DTYPES",
    "LoadedState",
    "check_model",
    "checked_state",
    "fitting",
    "in_memory_order",
    "packed_state",
    "slot_names",
    "without_shards",
]

STATE_VERSION = 3
KEYS = {"version", "algorithm", "step", "skipped_steps", "parameters", "checksum"}
LATER_KEYS = {"buckets", "slots", "choices"}  # that a state of version 2 lacks, or may lack
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class LoadedState(NamedTuple):
    """A state that has been checked; its tensors are copies.

    Attributes:
        step: Committed steps.
        skipped_steps: Steps that were not finite.
        shapes: Of all the parameters that were trained, by name.
        slots: What was remembered: fp32 or fp64 tensors by slot and label, the elementwise ones in the
            parameter's shape.
        checksum: Of all of it.
        buckets: The parameters of each bucket that the next step is to be made with; none where it does not
            matter.
        choices: What the algorithm had chosen at run time; None where the state does not have it.
    """

    step: int
    skipped_steps: int
    shapes: dict[str, tuple[int, ...]]
    slots: dict[Slot, dict[str, torch.Tensor]]
    checksum: str
    buckets: tuple[tuple[str, ...], ...]
    choices: Choices | None


def packed_state(
    algorithm: Algorithm,
    memory: Memory,
    specs: Mapping[str, ParameterSpec],
    shapes: Mapping[str, tuple[int, ...]],
    unclaimed: Mapping[Slot, Mapping[str, torch.Tensor]],
    *,
    skipped_steps: int,
    buckets: tuple[tuple[str, ...], ...] = (),
    choices: Choices | None = None,
) -> dict[str, Any]:
    """Return the state of `memory`, as copies on the CPU.

    Names and what they are of stand in tuples of pairs: `torch.distributed.checkpoint` takes mappings apart.

    Args:
        algorithm: Noted for the reader.
        memory: Its local slots must be the mean already.
        specs: Give elementwise tensors back the shapes of the parameters.
        shapes: Of all parameters, noted.
        unclaimed: Loaded, and not yet laid out, by slot.
        skipped_steps: Noted.
        buckets: What the next step is to be made with, where results depend on it.
        choices: What the algorithm has chosen at run time.
    """
    # `torch.distributed.checkpoint` fills in only the keys that are there when it loads: so a fresh run must
    # have those of every algorithm, whatever it runs itself.
    named = {**SLOTS, **{slot.name: slot for slot in (*algorithm.slots, *memory.slots)}}
    slots = [slot for slot in named.values() if slot.is_saved]
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        "algorithm": repr(algorithm),
        "step": memory.step,
        "skipped_steps": skipped_steps,
        "parameters": tuple(sorted(shapes.items())),
        "slots": tuple((slot.name, (slot.is_local, slot.is_elementwise)) for slot in slots),
        "buckets": buckets,
        "choices": tuple(sorted((choices or {}).items())),
    }
    for slot in slots:
        kept = {}
        for label, tensor in memory.slots.get(slot, {}).items():
            if not slot.is_elementwise:
                kept[label] = tensor.to("cpu", copy=True)
                continue
            # In the parameter's shape: who resumes may have another order of memory (channels last).
            spec = specs[label]
            strided = tensor.as_strided(spec.shape, spec.stride, tensor.storage_offset())
            kept[label] = strided.to("cpu", copy=True, memory_format=torch.contiguous_format)
        # What was loaded for buckets that have not come yet is still to be sent.
        kept |= {name: tensor.clone() for name, tensor in unclaimed.get(slot, {}).items()}
        state[slot.name] = tuple(sorted(kept.items()))
    return with_checksum(state)


def slot_names(state: Mapping[str, Any]) -> list[str]:
    """Return the keys of a state that hold tensors."""
    return sorted(state.keys() - KEYS - LATER_KEYS)


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
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    version = _count(state, "version")
    if version not in (2, STATE_VERSION):
        raise StateError(
            f"the state is of version {state['version']!r}, this Thinwire reads version {STATE_VERSION}; "
            "load it with the Thinwire that saved it"
        )
    if not state.keys() >= KEYS or (version == STATE_VERSION and not state.keys() >= LATER_KEYS):
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    known = {**SLOTS, **{slot.name: slot for slot in slots}}
    # All that can be seen without its numbers comes first: a file may name tensors of any size, and no copy
    # is made before it is in order.
    saved_slots = _slots(state, known, version)
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
        buckets=_buckets(state, shapes),
        choices=None if version < STATE_VERSION else _choices(state),
    )
    _check_inside(loaded)
    if specs is not None:
        check_model(loaded, specs, strict=strict)
    return loaded._replace(slots={slot: _copied(slot.name, each) for slot, each in tensors.items()})


def check_model(
    loaded: LoadedState,
    specs: Mapping[str, ParameterSpec],
    *,
    strict: bool = True,
    by_position: bool = False,
) -> None:
    """Refuse the state of another model.

    Args:
        loaded: The state.
        specs: The parameters of the model.
        strict: Whether each must have all the other's parameters.
        by_position: Whether the names are positions only.

    Raises:
        StateError: A parameter has another shape, or one of the two lacks parameters of the other; or
            something is too large for the type of the model's memory.
    """
    here = {name: spec.shape for name, spec in specs.items()}
    missing, unknown = here.keys() - loaded.shapes.keys(), loaded.shapes.keys() - here.keys()
    # What was saved before any bucket had come lists none, and is of every model.
    if loaded.shapes and (missing or unknown) and strict:
        remedy = "" if by_position else ", or pass strict=False to load what is of both"
        raise StateError(
            f"the state is of a model with {_some(unknown)} where this one trains {_some(missing)}; "
            f"load the state of the same model{remedy}"
        )
    for name, shape in here.items():
        if loaded.shapes.get(name, shape) != shape:
            raise StateError(
                f"{name} has shape {loaded.shapes[name]} in the state and {shape} in the model; "
                "load the state of the same model"
            )
    for slot, tensors in loaded.slots.items():
        _check_range(slot.name, tensors, specs)


def _check_range(key: str, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, ParameterSpec]) -> None:
    """Refuse what would become infinite in the type of a model's memory, and stop all its steps."""
    for label, tensor in tensors.items():
        first = label.split(BUCKET_SEPARATOR)[0]
        # Only what is wider than this model's memory can be beyond its range.
        if first not in specs or specs[first].memory_dtype == tensor.dtype or tensor.dtype != torch.float64:
            continue
        largest = tensor.abs().max().item() if tensor.numel() else 0
        if largest > torch.finfo(specs[first].memory_dtype).max:
            raise StateError(
                f"{key} of {label} has {largest:.3g}, which is beyond {specs[first].memory_dtype}, in which "
                "this model's is kept; load an earlier state, or one of a model of this type"
            )


def fitting(loaded: LoadedState, specs: Mapping[str, ParameterSpec]) -> LoadedState:
    """Return the part of a state that is about parameters of this model.

    Args:
        loaded: The state.
        specs: The parameters of this model, and its statistics.
    """
    # Statistics once travelled like parameters. Residuals of that time must not be sent: added to a mean,
    # they could make a variance negative.
    statistics = {spec.name for spec in specs.values() if spec.is_statistic}
    known = specs.keys() - statistics
    slots = {
        slot: {label: each for label, each in tensors.items() if known >= _names_in(label)}
        for slot, tensors in loaded.slots.items()
    }
    halves = [
        tuple(name for name in names if (name in statistics) is kind)
        for names in loaded.buckets
        for kind in (False, True)
    ]
    return loaded._replace(slots=slots, buckets=tuple(filter(None, halves)))


def without_shards(loaded: LoadedState) -> LoadedState:
    """Return a state without what is of some shard of a parameter only."""
    slots = {
        slot: {label: each for label, each in tensors.items() if SHARD_MARK not in label}
        for slot, tensors in loaded.slots.items()
    }
    choices = loaded.choices
    if choices is not None:  # None has the algorithm find them in its memory
        choices = {name: choice for name, choice in choices.items() if SHARD_MARK not in name}
    return loaded._replace(slots=slots, choices=choices)


def in_memory_order(
    slot: Slot, tensor: torch.Tensor, spec: ParameterSpec, device: torch.device
) -> torch.Tensor:
    """Return an elementwise tensor as memory holds it: flat, in the parameter's order of memory and type.

    Args:
        slot: What it is of, for errors.
        tensor: In the parameter's shape.
        spec: The parameter.
        device: Where memory is.

    Raises:
        StateError: It has another shape than the parameter, or is too large for its type.
    """
    # Both may come to light only here: of a front that learns its parameters bucket by bucket.
    _check_range(slot.name, {spec.name: tensor}, {spec.name: spec})
    if tuple(tensor.shape) != spec.shape:
        raise StateError(
            f"the state's {slot.name} of {spec.name} has shape {tuple(tensor.shape)}, the model's "
            f"parameter has {spec.shape}; load the state of the same model"
        )
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=spec.memory_dtype, device=device)
    return strided.copy_(tensor).as_strided((spec.numel,), (1,))


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
            if not loaded.shapes.keys() >= _names_in(label):
                raise StateError(
                    f"the state has a {slot.name} of {label}, which is not in its list of parameters"
                )
            if slot.check is not None and SHARD_MARK not in label:  # of a shard, whose shape is not listed
                slot.check(label, tensor, loaded.shapes)


def _names_in(label: str) -> set[str]:
    """Return the parameter of a label; of a whole bucket, the first and the last."""
    return set(label.partition(SHARD_MARK)[0].split(BUCKET_SEPARATOR))


def _some(names: Iterable[str]) -> str:
    """Return the first few names, to be shown."""
    listed = sorted(names)
    shown = ", ".join(listed[:4]) or "nothing"
    return shown + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _count(state: Mapping[str, Any], key: str) -> int:
    return whole_number(key, state[key], minimum=0, error=StateError)


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


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    for name, shape in _pairs(state, "parameters"):
        if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise StateError(f"parameters must pair names with shapes, got {name!r}: {_kind(shape)}")
    return {name: tuple(shape) for name, shape in state["parameters"]}


def _choices(state: Mapping[str, Any]) -> Choices:
    for name, choice in _pairs(state, "choices"):
        if type(choice) is not int:
            raise StateError(f"choices must pair names with whole numbers, got {name!r}: {choice!r}")
    return dict(state["choices"])


def _buckets(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return by bucket the names of its parameters, each of the model's and no more than once."""
    listed = state.get("buckets", ())
    if not isinstance(listed, list | tuple) or not all(isinstance(bucket, list | tuple) for bucket in listed):
        raise StateError(f"buckets must be a tuple of tuples of names, got {_kind(listed)}")
    names = [name for bucket in listed for name in bucket]
    # The next step is made with these: of a parameter twice, or of one that there is not, it could not be.
    if not all(isinstance(name, str) and name in shapes for name in names) or len(set(names)) < len(names):
        raise StateError(
            "buckets must hold names from the state's list of parameters, each once; the state is damaged, "
            "load an earlier one"
        )
    return tuple(tuple(bucket) for bucket in listed)


def _slots(state: Mapping[str, Any], known: Mapping[str, Slot], version: int) -> list[Slot]:
    """Return what the tensors of a state are of. Version 2 did not say: error was what was local."""
    names = slot_names(state)
    if version < STATE_VERSION:
        if ERROR.name not in names:
            raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
        return [known.get(name, Slot(name)) for name in names]
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


def _kind(value: object) -> str:
    """Return what was got, in a few words."""
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))[:8]}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return f"{type(value).__name__}"
