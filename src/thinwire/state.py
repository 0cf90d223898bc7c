"""Saved state: memory as tensors in the model's own shapes, by parameter name, and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

import torch

from thinwire.algorithms import Algorithm, Memory
from thinwire.errors import StateError
from thinwire.plan import BUCKET_SEPARATOR, ParameterSpec

__all__ = ["LoadedState", "checked_state", "laid_out", "packed_state"]

STATE_VERSION = 1


class LoadedState(NamedTuple):
    """A state that has been checked; its tensors are copies.

    Attributes:
        step: Committed steps.
        skipped_steps: Skipped ones.
        error: By parameter name, fp32 in the parameter's shape.
        factor: By route, fp32, (matrix rank, columns).
    """

    step: int
    skipped_steps: int
    error: dict[str, torch.Tensor]
    factor: dict[str, torch.Tensor]


def packed_state(
    algorithm: Algorithm,
    memory: Memory,
    specs: Mapping[str, ParameterSpec],
    unclaimed_error: Mapping[str, torch.Tensor],
    skipped_steps: int,
) -> dict[str, Any]:
    """The state of `memory`, as copies.

    Args:
        algorithm: Noted for the reader.
        memory: Its error must be the mean already.
        specs: Give the error back the shapes of the parameters.
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
    if not isinstance(state, Mapping) or not state.keys() >= {"version", "step", "error", "factor"}:
        raise StateError(f"expected a state made by state_dict(), got {_kind(state)}")
    if state["version"] != STATE_VERSION:
        raise StateError(
            f"the state is of version {state['version']!r}, this Thinwire reads version {STATE_VERSION}; "
            "load it with the Thinwire that saved it"
        )
    loaded = LoadedState(
        step=_count(state, "step"),
        skipped_steps=_count(state, "skipped_steps"),
        error=_tensors(state, "error"),
        factor=_tensors(state, "factor"),
    )
    for label, factor in loaded.factor.items():
        if factor.dim() != 2:
            raise StateError(f"factor of {label} must have 2 dimensions, got shape {tuple(factor.shape)}")
    if specs is not None:
        _check_model(loaded.error, specs)
        _check_factors(loaded.factor, specs)
    return loaded


def laid_out(error: torch.Tensor, spec: ParameterSpec, device: torch.device) -> torch.Tensor:
    """The error as memory holds it: flat, in the parameter's order of memory, on its device.

    Raises:
        StateError: It has another shape than the parameter.
    """
    _check_model({spec.name: error}, {spec.name: spec})
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=torch.float32, device=device)
    return strided.copy_(error).as_strided((spec.numel,), (1,))


def _in_shape(flat: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    strided = flat.as_strided(spec.shape, spec.stride, flat.storage_offset())
    return strided.clone(memory_format=torch.contiguous_format)


def _check_model(error: Mapping[str, torch.Tensor], specs: Mapping[str, ParameterSpec]) -> None:
    unknown = sorted(error.keys() - specs.keys())
    if unknown:
        raise StateError(
            f"the state has error memory for {unknown}, which this model does not train; "
            "load the state of the same model"
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
    value = state.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(f"{key} must be a whole number of at least 0, got {value!r}")
    return value


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
