"""The options of `thinwire attach`, passed in the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import parsed
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.advice.automatic import Auto

VARIABLE, OPTIONS_VARIABLE = "THINWIRE_ATTACH", "THINWIRE_ATTACH_OPTIONS"


@dataclass(frozen=True)
class Options:
    """How processes attach their models.

    Attributes:
        algorithm: As written in Python, such as `Quantize(bits=4)`; or `4 bits`, or `auto()`.
        watch: A file for the first process's records; None for none.
        checkpoint: A folder for each process's state, read at the start and written at the end.
        strict: Whether a model that can't be attached ends the training; a command without any fails.
    """

    algorithm: str = "Quantize(bits=4)"
    watch: str | None = None
    checkpoint: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if not isinstance(averaging_of(self.algorithm), Algorithm) and self.checkpoint is not None:
            raise ConfigError(
                "auto can't be combined with a checkpoint, since auto chooses again in each run; leave out "
                "one of them"
            )

    def environment(self) -> dict[str, str]:
        """Return the variables from which `of` reads these options in another process."""
        options = asdict(self)
        return {VARIABLE: options.pop("algorithm"), OPTIONS_VARIABLE: json.dumps(options)}

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Options:
        return cls(environment[VARIABLE], **json.loads(environment.get(OPTIONS_VARIABLE, "{}")))


def averaging_of(text: str) -> Algorithm | Callable[..., Auto]:
    """Return the algorithm that a text names, or `auto` with its settings."""
    settings = parsed(text)
    if isinstance(settings, Algorithm):
        return settings
    # Imported here: `auto` needs more modules than an algorithm.
    from thinwire.advice.automatic import auto  # noqa: PLC0415

    takes = signature(auto).parameters.values()
    names = [argument.name for argument in takes if argument.kind is argument.KEYWORD_ONLY]
    for name in settings.keys() - {*names, "machines", "host_check", "on_nonfinite"}:
        raise ConfigError(f"auto has no setting {name!r}; it has {', '.join(names)}")
    return partial(auto, **settings)
