"""What a process tells the others of itself before it sends gradients, so that they can find differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass

import torch

from thinwire.algorithms import Algorithm, Memory
from thinwire.checksum import with_checksum
from thinwire.plan import ParameterSpec
from thinwire.version import __version__

__all__ = ["settings_of", "told_of"]


def told_of(
    algorithm: Algorithm,
    specs: Iterable[ParameterSpec],
    bucket: Iterable[ParameterSpec],
    memory: Memory,
    *,
    knows_loss_scale: bool,
    may_be_unused: bool,
) -> dict[str, str]:
    """All that must be the same on every process, by subject: version, algorithm, plan, and what was loaded.

    The plan follows from the algorithm and the shapes.

    Args:
        algorithm: With its settings.
        specs: All parameters that are known.
        bucket: Those that are about to be averaged together.
        memory: Its step and factors; the error may differ.
        knows_loss_scale: Whether error is in unscaled units.
        may_be_unused: Whether flags of used parameters travel as well.
    """
    told = {
        "thinwire": __version__,
        "algorithm": type(algorithm).__name__,
        **{name: repr(value) for name, value in settings_of(algorithm).items()},
        "loss scale": "known" if knows_loss_scale else "not known",
        "find_unused_parameters": str(may_be_unused),
        "committed steps": str(memory.step),
        "factors": _fingerprint(memory.factor),
    }
    told |= {f"parameter {spec.name}": _described(spec) for spec in specs}
    told["bucket"] = ", ".join(spec.name for spec in bucket)
    return told


def settings_of(algorithm: Algorithm) -> dict[str, object]:
    """An algorithm's settings by name."""
    return asdict(algorithm) if is_dataclass(algorithm) and not isinstance(algorithm, type) else {}


def _described(spec: ParameterSpec) -> str:
    shape = "×".join(map(str, spec.shape)) or "scalar"
    return f"{shape} {str(spec.dtype).removeprefix('torch.')}, strides {spec.stride}"


def _fingerprint(factors: Mapping[str, torch.Tensor]) -> str:
    return str(with_checksum(factors)["checksum"]) if factors else "none"
