"""Saved state: memory as tensors in the model's own shapes, by parameter name, and plain values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from thinwire.algorithms import Algorithm, Memory
from thinwire.algorithms.batched import square
from thinwire.checks import whole_number
from thinwire.checksum import check_undamaged, with_checksum
from thinwire.errors import StateError
from thinwire.plan import BUCKET_SEPARATOR, ParameterSpec, Plan

__all__ = [
    "DTYPES",
    "TENSORS",
    "LoadedState",
    "check_model",
    "checked_state",
    "fitting",
    "laid_out",
    "packed_state",
    "warn_of_cuts",
]

STATE_VERSION = 2
KEYS = {"version", "algorithm", "step", "skipped_steps", "parameters", "error", "factor", "checksum"}
LATER_KEYS = {"buckets"}  # that earlier states of this version lack
TENSORS = ("error", "factor")
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class LoadedState(NamedTuple):
    """A state that has been checked; its tensors are copies.

    Attributes:
        step: Committed steps.
        skipped_steps: Skipped ones.
        shapes: Of all the parameters that were trained, by name.
        error: By parameter name, fp32 or fp64, in the parameter's shape.
        factor: By route, fp32 or fp64, (matrix rank, columns).
        checksum: Of all of it.
        buckets: The parameters of each bucket that factors belong to, in order; none where they belong to
            parameters.
    """

    step: int
    skipped_steps: int
    shapes: dict[str, tuple[int, ...]]
    error: dict[str, torch.Tensor]
    factor: dict[str, torch.Tensor]
    checksum: str
    buckets: tuple[tuple[str, ...], ...]


def packed_state(
    algorithm: Algorithm,
    memory: Memory,
    specs: Mapping[str, ParameterSpec],
    shapes: Mapping[str, tuple[int, ...]],
    unclaimed_error: Mapping[str, torch.Tensor],
    *,
    skipped_steps: int,
    buckets: tuple[tuple[str, ...], ...] = (),
) -> dict[str, Any]:
    """The state of `memory`, as copies on the CPU.

    Names and what they are of stand in tuples of pairs: `torch.distributed.checkpoint` takes mappings apart,
    and when loading fills in only the keys that are there already.

    Args:
        algorithm: Noted for the reader.
        memory: Its error must be the mean already.
        specs: Give the error back the shapes of the parameters.
        shapes: Of all parameters, noted.
        unclaimed_error: Loaded, and not yet laid out.
        skipped_steps: Noted.
        buckets: What the next step is to be made with, where results depend on it.
    """
    error = {name: _in_shape(flat, specs[name]) for name, flat in memory.error.items()}
    error |= {name: tensor.clone() for name, tensor in unclaimed_error.items()}
    factor = {label: factor.to("cpu", copy=True) for label, factor in memory.factor.items()}
    state = {
        "version": STATE_VERSION,
        "algorithm": repr(algorithm),
        "step": memory.step,
        "skipped_steps": skipped_steps,
        "parameters": tuple(sorted(shapes.items())),
        "error": tuple(sorted(error.items())),
        "factor": tuple(sorted(factor.items())),
        "buckets": buckets,
    }
    return with_checksum(state)


def checked_state(
    state: object, specs: Mapping[str, ParameterSpec] | None, *, strict: bool = True
) -> LoadedState:
    """Check a state whole before any of it is used.

    Args:
        state: What the user passed.
        specs: The parameters it must be for, None if they are not known yet.
        strict: Whether it must be for just these.

    Raises:
        StateError: It is not a Thinwire state, damaged, of another version, or of another model.

    Cost: a copy of its tensors, made once their kinds, shapes and what is stored of them have been checked.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    if _count(state, "version") != STATE_VERSION:
        raise StateError(
            f"the state is of version {state['version']!r}, this Thinwire reads version {STATE_VERSION}; "
            "load it with the Thinwire that saved it"
        )
    if state.keys() - LATER_KEYS != KEYS:
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    shapes = _shapes(state)
    tensors = {key: _tensors(state, key) for key in TENSORS}
    for key in ("algorithm", "checksum"):
        if not isinstance(state[key], str | None):
            raise StateError(f"{key} must be text, got {_kind(state[key])}")
    loaded = LoadedState(
        _count(state, "step"),
        _count(state, "skipped_steps"),
        shapes,
        **tensors,
        checksum=check_undamaged(state),
        buckets=_buckets(state, shapes),
    )
    _check_inside(loaded)
    if specs is not None:
        check_model(loaded, specs, strict=strict)
    error, factor = _copied("error", loaded.error), _copied("factor", loaded.factor)
    return loaded._replace(error=error, factor=factor)


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
        by_position: Whether the names tell positions only.

    Raises:
        StateError: A parameter has another shape, or one of the two lacks parameters of the other; or
            something is too large for the type of the model's memory.
    """
    here = {name: spec.shape for name, spec in specs.items()}
    missing, unknown = here.keys() - loaded.shapes.keys(), loaded.shapes.keys() - here.keys()
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
    _check_range("error", loaded.error, specs)
    _check_range("factor", loaded.factor, specs)


def _check_range(key: str, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, ParameterSpec]) -> None:
    """Refuse what would become infinite in the type of a model's memory, and stop all its steps."""
    for label, tensor in tensors.items():
        first = label.split(BUCKET_SEPARATOR)[0]
        if first not in specs or specs[first].memory_dtype == tensor.dtype or tensor.dtype != torch.float64:
            continue
        largest = tensor.abs().max().item() if tensor.numel() else 0
        if largest > torch.finfo(specs[first].memory_dtype).max:
            raise StateError(
                f"{key} of {label} has {largest:.3g}, which is beyond {specs[first].memory_dtype}, in which "
                "this model's is kept; load an earlier state, or one of a model of this type"
            )


def fitting(loaded: LoadedState, specs: Mapping[str, ParameterSpec]) -> LoadedState:
    """The part of a state that is about parameters of this model."""
    return loaded._replace(
        error={name: error for name, error in loaded.error.items() if name in specs},
        factor={label: each for label, each in loaded.factor.items() if specs.keys() >= _names_in(label)},
    )


def warn_of_cuts(loaded: LoadedState, plan: Plan) -> None:
    """Say so if factors are of another matrix rank than planned."""
    ranks = {route.label: route.matrix_rank for route in plan.routes if route.matrix_rank is not None}
    cut = [label for label, each in loaded.factor.items() if ranks.get(label, len(each)) != len(each)]
    if cut:
        there, here = len(loaded.factor[cut[0]]), ranks[cut[0]]
        warnings.warn(
            f"the state's factors of {_some(cut)} are of another matrix rank ({there}, here {here}): they "
            "are cut, or extended with random rows, and fit again after a few steps. No error is lost",
            stacklevel=3,
        )


def laid_out(error: torch.Tensor, spec: ParameterSpec, device: torch.device) -> torch.Tensor:
    """The error as memory holds it: flat, in the parameter's order of memory and type, on its device.

    Raises:
        StateError: It has another shape than the parameter, or is too large for its type.
    """
    _check_range("error", {spec.name: error}, {spec.name: spec})
    if tuple(error.shape) != spec.shape:
        raise StateError(
            f"the state's error of {spec.name} has shape {tuple(error.shape)}, the model's parameter has "
            f"{spec.shape}; load the state of the same model"
        )
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=spec.memory_dtype, device=device)
    return strided.copy_(error).as_strided((spec.numel,), (1,))


def _in_shape(flat: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    strided = flat.as_strided(spec.shape, spec.stride, flat.storage_offset())
    return strided.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _check_inside(loaded: LoadedState) -> None:
    """What is remembered is of the parameters that are listed, and of their shapes."""
    for name, error in loaded.error.items():
        if loaded.shapes.get(name) != tuple(error.shape):
            raise StateError(
                f"the state's error of {name} has shape {tuple(error.shape)}, its list of parameters says "
                f"{loaded.shapes.get(name, 'nothing')}; load an earlier state"
            )
    most = sum(math.prod(shape) for shape in loaded.shapes.values())
    for label, factor in loaded.factor.items():
        if factor.dim() != 2:
            raise StateError(f"factor of {label} must have 2 dimensions, got shape {tuple(factor.shape)}")
        if not loaded.shapes.keys() >= _names_in(label):
            raise StateError(f"the state has a factor of {label}, which is not in its list of parameters")
        rows, columns = factor.shape
        if rows == 0 or not _can_have(columns, label, loaded.shapes, most):
            raise StateError(
                f"factor of {label} has shape {(rows, columns)}, which no factor of it can have; load an "
                "earlier state"
            )


def _can_have(columns: int, label: str, shapes: Mapping[str, tuple[int, ...]], most: int) -> bool:
    """Whether a factor may have so many columns: the rows or columns of a matrix, or the side of a bucket.

    Any dimension may be the outermost in memory, whose sizes are the rows. A bucket has its first and last
    parameter, and at `most` all elements.
    """
    first, *last = label.split(BUCKET_SEPARATOR)
    numel = math.prod(shapes[first])
    if last:
        return _side(numel + math.prod(shapes[last[0]])) <= columns <= square(most)[1]
    sizes = {size for size in shapes[first] if size}
    return columns in sizes | {numel // size for size in sizes} | {_side(numel), square(numel)[1]}


def _side(numel: int) -> int:
    """Of the smallest square that holds so many elements."""
    return math.isqrt(numel - 1) + 1 if numel else 0


def _names_in(label: str) -> set[str]:
    """The parameter of a factor; of a whole bucket, the first and the last."""
    return set(label.split(BUCKET_SEPARATOR))


def _some(names: Iterable[str]) -> str:
    """The first few names."""
    listed = sorted(names)
    shown = ", ".join(listed[:4]) or "nothing"
    return shown + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _count(state: Mapping[str, Any], key: str) -> int:
    return whole_number(key, state[key], least=0, error=StateError)


def _pairs(state: Mapping[str, Any], key: str) -> Sequence[tuple[str, Any]]:
    """The (name, value) pairs under a key."""
    pairs = state[key]
    if not isinstance(pairs, list | tuple):
        raise StateError(f"{key} must be a tuple of pairs of a name and a value, got {_kind(pairs)}")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise StateError(f"{key} must hold pairs of a name and a value, got {_kind(pair)}")
    if len({name for name, _ in pairs}) < len(pairs):
        raise StateError(f"{key} has a name twice; the state is damaged, load an earlier one")
    return [(name, value) for name, value in pairs]


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    for name, shape in _pairs(state, "parameters"):
        if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise StateError(f"parameters must pair names with shapes, got {name!r}: {_kind(shape)}")
    return {name: tuple(shape) for name, shape in state["parameters"]}


def _buckets(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[str, ...], ...]:
    """By bucket, the names of its parameters, each of the model's and no more than once."""
    told = state.get("buckets", ())
    if not isinstance(told, list | tuple) or not all(isinstance(each, list | tuple) for each in told):
        raise StateError(f"buckets must be a tuple of tuples of names, got {_kind(told)}")
    names = [name for each in told for name in each]
    if not all(isinstance(name, str) and name in shapes for name in names) or len(set(names)) < len(names):
        raise StateError(
            "buckets must hold names from the state's list of parameters, each once; the state is damaged, "
            "load an earlier one"
        )
    return tuple(tuple(each) for each in told)


def _tensors(state: Mapping[str, Any], key: str) -> dict[str, torch.Tensor]:
    for name, tensor in _pairs(state, key):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
            raise StateError(
                f"{key} must pair names with floating tensors of 16, 32 or 64 bits, "
                f"got {name!r}: {_kind(tensor)}"
            )
    return dict(state[key])


def _copied(key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise StateError(f"{key} of {name} is not finite: the state is damaged; load an earlier one")
    return {
        name: tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for name, tensor in tensors.items()
    }


def _kind(value: object) -> str:
    """What was got, in a few words."""
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))[:8]}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return f"{type(value).__name__}"
