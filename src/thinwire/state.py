"""Saved state: memory as tensors in the model's own shapes, by parameter name, and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

import torch

from thinwire.algorithms import Algorithm, Memory
from thinwire.checks import whole_number
from thinwire.errors import StateError
from thinwire.plan import BUCKET_SEPARATOR, ParameterSpec

__all__ = ["LoadedState", "check_model", "checked_state", "laid_out", "packed_state"]

STATE_VERSION = 1
REQUIRED = {"version", "step", "parameters", "error", "factor"}


class LoadedState(NamedTuple):
    """A state that has been checked; its tensors are copies.

    Attributes:
        step: Committed steps.
        skipped_steps: Skipped ones.
        shapes: Of all the parameters that were trained, by name.
        error: By parameter name, fp32 in the parameter's shape.
        factor: By route, fp32, (matrix rank, columns).
    """

    step: int
    skipped_steps: int
    shapes: dict[str, tuple[int, ...]]
    error: dict[str, torch.Tensor]
    factor: dict[str, torch.Tensor]


def packed_state(
    algorithm: Algorithm,
    memory: Memory,
    specs: Mapping[str, ParameterSpec],
    shapes: Mapping[str, tuple[int, ...]],
    unclaimed_error: Mapping[str, torch.Tensor],
    *,
    skipped_steps: int,
) -> dict[str, Any]:
    """The state of `memory`, as copies.

    Args:
        algorithm: Noted for the reader.
        memory: Its error must be the mean already.
        specs: Give the error back the shapes of the parameters.
        shapes: Of all parameters, noted.
        unclaimed_error: Loaded, and not yet laid out.
        skipped_steps: Noted.
    """
    error = {name: _in_shape(flat, specs[name]) for name, flat in memory.error.items()}
    error |= {name: tensor.clone() for name, tensor in unclaimed_error.items()}
    settings: dict[str, Any] = (
        asdict(algorithm) if is_dataclass(algorithm) and not isinstance(algorithm, type) else {}
    )
    return {
        "version": STATE_VERSION,
        "algorithm": {"name": type(algorithm).__name__, **settings},
        "step": memory.step,
        "skipped_steps": skipped_steps,
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        "error": error,
        "factor": {label: factor.clone() for label, factor in memory.factor.items()},
    }


def checked_state(state: object, specs: Mapping[str, ParameterSpec] | None) -> LoadedState:
    """Check a state whole before any of it is used.

    Args:
        state: What the user passed.
        specs: The parameters it must be for, None if they are not known yet.

    Raises:
        StateError: It is not a Thinwire state, of another version, or of another model.
    """
    if not isinstance(state, Mapping) or not state.keys() >= REQUIRED:
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    if _count(state, "version") != STATE_VERSION:
        raise StateError(
            f"the state is of version {state['version']!r}, this Thinwire reads version {STATE_VERSION}; "
            "load it with the Thinwire that saved it"
        )
    loaded = LoadedState(
        step=_count(state, "step"),
        skipped_steps=_count(state, "skipped_steps"),
        shapes=_shapes(state),
        error=_tensors(state, "error"),
        factor=_tensors(state, "factor"),
    )
    for label, factor in loaded.factor.items():
        if factor.dim() != 2:
            raise StateError(f"factor of {label} must have 2 dimensions, got shape {tuple(factor.shape)}")
    if specs is not None:
        check_model(loaded, specs)
    return loaded


def check_model(
    loaded: LoadedState, specs: Mapping[str, ParameterSpec], *, by_position: bool = False
) -> None:
    """Refuse the state of another model; freezing or unfreezing layers is allowed if none of them owes.

    Args:
        loaded: The state.
        specs: The parameters of the model.
        by_position: Whether the names tell positions only. Then all parameters must be the same.

    Raises:
        StateError: Neither has all the other's parameters, or one has another shape, or error or
            factors belong to a parameter that this model does not train.
    """
    _check_parameters(loaded.shapes, specs, by_position)
    _check_errors(loaded.error, specs)
    _check_factors(loaded.factor, specs)


def laid_out(error: torch.Tensor, spec: ParameterSpec, device: torch.device) -> torch.Tensor:
    """The error as memory holds it: flat, in the parameter's order of memory, on its device.

    Raises:
        StateError: It has another shape than the parameter.
    """
    _check_errors({spec.name: error}, {spec.name: spec})
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device=device)
    return strided.copy_(error).as_strided((spec.numel,), (1,))


def _in_shape(flat: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    strided = flat.as_strided(spec.shape, spec.stride, flat.storage_offset())
    return strided.clone(memory_format=torch.contiguous_format)


def _check_parameters(
    shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, ParameterSpec], by_position: bool
) -> None:
    here = {name: spec.shape for name, spec in specs.items()}
    missing, unknown = here.keys() - shapes.keys(), shapes.keys() - here.keys()
    if shapes and ((missing or unknown) if by_position else (missing and unknown)):
        raise StateError(
            f"the state is of a model with {_some(unknown) or 'nothing'} where this one trains "
            f"{_some(missing) or 'nothing'}; load the state of the same model"
        )
    for name, shape in here.items():
        if shapes.get(name, shape) != shape:
            raise StateError(
                f"{name} has shape {shapes[name]} in the state and {shape} in the model; "
                "load the state of the same model"
            )


def _some(names: Iterable[str]) -> str:
    """The first few names."""
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _check_errors(error: Mapping[str, torch.Tensor], specs: Mapping[str, ParameterSpec]) -> None:
    unknown = sorted(error.keys() - specs.keys())
    if unknown:
        raise StateError(
            f"the state has error memory for {unknown}, which this model does not train; load the state of "
            "the same model, or save after one step with AllReduce(), which pays all of it back"
        )
    for name, tensor in error.items():
        if tuple(tensor.shape) != specs[name].shape:
            raise StateError(
                f"the state's error of {name} has shape {tuple(tensor.shape)}, the model's parameter has "
                f"{specs[name].shape}; load the state of the same model"
            )


def _check_factors(labels: Iterable[str], specs: Mapping[str, ParameterSpec]) -> None:
    """A factor is of a parameter of this model, or (of a whole bucket) from one of them to another."""
    for label in labels:
        unknown = [name for name in label.split(BUCKET_SEPARATOR) if name not in specs]
        if unknown:
            raise StateError(
                f"the state has a factor of {label}, but this model does not train {unknown}; "
                "load the state of the same model"
            )


def _count(state: Mapping[str, Any], key: str) -> int:
    return whole_number(key, state.get(key, 0), least=0, error=StateError)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = state["parameters"]
    if not isinstance(shapes, Mapping) or not all(isinstance(each, list | tuple) for each in shapes.values()):
        raise StateError(f"parameters must map names to shapes, got {_kind(shapes)}")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _tensors(state: Mapping[str, Any], key: str) -> dict[str, torch.Tensor]:
    tensors = state[key]
    if not isinstance(tensors, Mapping):
        raise StateError(f"{key} must map names to tensors, got {_kind(tensors)}")
    for name, tensor in tensors.items():
        if (
            not isinstance(name, str)
            or not isinstance(tensor, torch.Tensor)
            or not tensor.is_floating_point()
        ):
            raise StateError(f"{key} must map names to floating tensors, got {name!r}: {_kind(tensor)}")
        if not tensor.isfinite().all():
            raise StateError(f"{key} of {name} is not finite: the state is damaged; load an earlier one")
    return {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in tensors.items()}


def _kind(value: object) -> str:
    """What was got, in a few words."""
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))[:8]}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return f"{type(value).__name__}"
