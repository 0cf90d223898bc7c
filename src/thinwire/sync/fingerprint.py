"""What a process says of itself before it sends anything, so that processes can find differences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, is_dataclass

from thinwire.algorithms import Algorithm, Choices
from thinwire.channel import CALL, Description
from thinwire.plan import ParameterSpec
from thinwire.version import __version__

__all__ = ["description_of"]


def description_of(
    call: str, algorithm: Algorithm, choices: Choices, specs: Iterable[ParameterSpec], progress: Description
) -> Description:
    """Return all that must be the same on every process, by subject.

    The plan follows from the algorithm, its choices and the shapes.

    Args:
        call: What it is about to do.
        algorithm: With its settings.
        choices: What was chosen at run time.
        specs: All parameters that are known.
        progress: Where it stands, and how it treats steps.
    """
    described = {CALL: call, "thinwire": __version__, "algorithm": type(algorithm).__name__}
    if is_dataclass(algorithm):
        for name, value in asdict(algorithm).items():
            if isinstance(value, tuple):  # of pairs: where some differ, only those are shown
                described |= {f"{name} of {key}": repr(each) for key, each in value}
            else:
                described[name] = repr(value)
    described |= progress
    described |= {f"choice for {name}": str(choice) for name, choice in sorted(choices.items())}
    for spec in specs:
        shape = "×".join(map(str, spec.shape)) or "scalar"
        dtype = str(spec.dtype).removeprefix("torch.")
        described[f"parameter {spec.name}"] = f"{shape} {dtype}, strides {spec.stride}"
    return described
