"""What `thinwire attach` was told, as it travels in the environment."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import REGISTRY
from thinwire.errors import ConfigError

VARIABLE, OPTIONS_VARIABLE = "THINWIRE_ATTACH", "THINWIRE_ATTACH_OPTIONS"
AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """How processes attach their models.

    Attributes:
        algorithm: As it is written in Python, such as `Quantize(bits=4)`; or `auto()`.
        watch: A file for the first process's records; None for none.
        checkpoint: A folder for what each process remembers, read at the start and written at the end.
        strict: Whether a model that can't be attached ends the training.
    """

    algorithm: str = "Quantize(bits=4)"
    watch: str | None = None
    checkpoint: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if isinstance(parsed(self.algorithm), dict) and self.checkpoint is not None:
            raise ConfigError("auto with a checkpoint: auto chooses again in each run; leave one of both out")

    def environment(self) -> dict[str, str]:
        """Return the variables by which `of` finds these options in another process."""
        options = asdict(self)
        return {VARIABLE: options.pop("algorithm"), OPTIONS_VARIABLE: json.dumps(options)}

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Options:
        return cls(environment[VARIABLE], **json.loads(environment.get(OPTIONS_VARIABLE, "{}")))


def parsed(text: str) -> Algorithm | dict[str, Any]:
    """Parse an algorithm, or the settings of `auto`. The text is never evaluated as code.

    Examples:
        >>> parsed("Cast('bf16')"), parsed("auto(budget_loss=0.005)")
        (Cast(dtype='bf16'), {'budget_loss': 0.005})
    """
    kinds = {entry.kind.__name__: entry.kind for entry in REGISTRY}
    expected = "expected one as in Python, such as 'Quantize(bits=4)', 'PowerSGD(matrix_rank=4)' or 'auto()'"
    try:
        call = ast.parse(text.strip().removeprefix("thinwire."), mode="eval").body
        if isinstance(call, ast.Name):
            call = ast.Call(call, [], [])
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("no call by a name")
        values = [ast.literal_eval(value) for value in call.args]
        settings = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{text!r} is not an algorithm: {expected}") from error
    name = call.func.id
    if name == AUTO and not values:
        return settings
    if name not in kinds:
        alike = get_close_matches(name, [*kinds, AUTO], n=1)
        raise ConfigError(
            f"{text!r} names no algorithm; {f'did you mean {alike[0]}?' if alike else expected}"
        )
    try:
        return kinds[name](*values, **settings)
    except TypeError as error:
        fields = ", ".join(field.name for field in dataclasses.fields(kinds[name]))  # type: ignore[arg-type]
        raise ConfigError(f"{text!r} does not fit {name}, which has the settings {fields}") from error
