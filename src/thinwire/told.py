"""What a process tells the others of itself before it sends anything, so that they can find differences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, is_dataclass

from thinwire.algorithms import Algorithm
from thinwire.channel import CALL
from thinwire.plan import ParameterSpec
from thinwire.version import __version__

__all__ = ["told_of"]


def told_of(
    call: str,
    algorithm: Algorithm,
    specs: Iterable[ParameterSpec],
    *,
    step: int,
    nonfinite_steps: int,
    loaded: str | None,
    error_is_mean: bool,
    knows_loss_scale: bool,
    may_be_unused: bool,
    host_check: bool,
    on_nonfinite: str,
) -> dict[str, str]:
    """All that must be the same on every process, by subject: version, algorithm, plan, and where it stands.

    The plan follows from the algorithm and the shapes.

    Args:
        call: What it is about to do.
        algorithm: With its settings.
        specs: All parameters that are known.
        step: Steps committed so far.
        nonfinite_steps: Steps that were not finite.
        loaded: The checksum of the state that was loaded, None if none was.
        error_is_mean: Whether nothing has changed the error since it was averaged.
        knows_loss_scale: Whether error is in unscaled units.
        may_be_unused: Whether flags of used parameters travel as well.
        host_check: Whether steps that are not finite are counted apart.
        on_nonfinite: What becomes of them.
    """
    told = {
        CALL: call,
        "thinwire": __version__,
        "algorithm": type(algorithm).__name__,
        **{name: repr(value) for name, value in _settings_of(algorithm).items()},
        "loss scale": "known" if knows_loss_scale else "not known",
        "find_unused_parameters": str(may_be_unused),
        "host_check": str(host_check),
        "on_nonfinite": on_nonfinite,
        "committed steps": str(step),
        "steps that were not finite": str(nonfinite_steps),
        "loaded state": "none" if loaded is None else loaded,
        "averaged error": str(error_is_mean),
    }
    return told | {f"parameter {spec.name}": _described(spec) for spec in specs}


def _settings_of(algorithm: Algorithm) -> dict[str, object]:
    """An algorithm's settings by name, of pairs one a name: where some differ, only those are told."""
    if not is_dataclass(algorithm) or isinstance(algorithm, type):
        return {}
    settings: dict[str, object] = {}
    for name, value in asdict(algorithm).items():
        if isinstance(value, tuple):
            settings |= {f"{name} of {key}": each for key, each in value}
        else:
            settings[name] = value
    return settings


def _described(spec: ParameterSpec) -> str:
    shape = "×".join(map(str, spec.shape)) or "scalar"
    return f"{shape} {str(spec.dtype).removeprefix('torch.')}, strides {spec.stride}"
