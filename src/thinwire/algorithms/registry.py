"""All algorithms, for demo, check, the conformance suite and the command line to iterate over."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, cast

from thinwire.algorithms.base import Algorithm, Slot
from thinwire.algorithms.exact import AllReduce, Cast
from thinwire.algorithms.lowrank.batched import BatchedPowerSGD
from thinwire.algorithms.lowrank.powersgd import PowerSGD
from thinwire.algorithms.quantize import Quantize
from thinwire.algorithms.topk import TopK
from thinwire.checks import shown
from thinwire.errors import ConfigError

AUTO = "auto"  # in place of an algorithm's name: choose one


@dataclass(frozen=True)
class Variant:
    """An algorithm with settings that `thinwire check` tries."""

    code: str  # the text that stands in code after `thinwire.`
    # Largest relative error of its means. If it keeps a residual: of the sum of all means and the residual.
    tolerance: float = 1e-5

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that the code makes."""
        return cast("Algorithm", parsed(self.code))


@dataclass(frozen=True)
class Registered:
    """An algorithm with its name and its variants."""

    name: str  # on a command line
    make: Callable[..., Algorithm]  # with settings by name; all have defaults
    variants: tuple[Variant, ...] = ()

    @property
    def has_memory(self) -> bool:
        """Whether it keeps state between steps."""
        return self.make().remembers

    def made(self, **offered: object) -> Algorithm:
        """Make it, with those of the offered settings that it has."""
        names = vars(self.make())
        return self.make(**{name: value for name, value in offered.items() if name in names})


KINDS: tuple[type[Algorithm], ...] = (AllReduce, Cast, Quantize, PowerSGD, BatchedPowerSGD, TopK)


def parsed(text: str) -> Algorithm | dict[str, Any]:
    """Parse an algorithm, or the settings of `auto`. The text is never evaluated as code.

    Examples:
        >>> parsed("Cast('bf16')"), parsed("auto(budget_loss=0.005)")
        (Cast(dtype='bf16'), {'budget_loss': 0.005})
        >>> parsed("4 bits") == Quantize(bits=4)
        True
    """
    if bits := re.fullmatch(r"\s*(\d+) ?bits?\s*", text):
        return Quantize(bits=int(bits[1]))
    kinds = {kind.__name__: kind for kind in KINDS}
    expected = "expected '4 bits', 'auto()', or one as in Python, such as 'Quantize(bits=4)'"
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
        spelled = {known.lower(): known for known in (*kinds, AUTO)}
        alike = get_close_matches(name.lower(), spelled, n=1)
        raise ConfigError(
            f"{text!r} names no algorithm; {f'did you mean {spelled[alike[0]]}?' if alike else expected}"
        )
    try:
        return kinds[name](*values, **settings)
    except TypeError as error:
        fields = ", ".join(field.name for field in dataclasses.fields(kinds[name]))  # type: ignore[arg-type]
        raise ConfigError(f"{text!r} does not fit {name}, which has the settings {fields}") from error


REGISTRY: tuple[Registered, ...] = (
    Registered("exact", AllReduce, (Variant("AllReduce()"),)),
    Registered("fp16", lambda: Cast("fp16"), (Variant('Cast("fp16")', 3e-3),)),
    Registered("bf16", lambda: Cast("bf16"), (Variant('Cast("bf16")', 2e-2),)),
    Registered(
        "quantize",
        Quantize,
        (
            Variant("Quantize(bits=8)", 3e-2),
            Variant("Quantize(bits=6)", 0.1),
            Variant("Quantize(bits=4)", 0.3),
            Variant("Quantize(bits=2)", 0.7),
        ),
    ),
    Registered(
        "powersgd",
        PowerSGD,
        (
            Variant("PowerSGD(matrix_rank=2)"),
            Variant("PowerSGD(matrix_rank=2, alternating=True)"),
            Variant('PowerSGD(matrix_rank=2, wire_dtype="bf16")', 2e-2),
        ),
    ),
    Registered("batched-powersgd", BatchedPowerSGD, (Variant("BatchedPowerSGD(matrix_rank=1)"),)),
    # Nothing is forgotten only with these settings.
    Registered("topk", TopK, (Variant('TopK(error_decay=1, merge="members")'),)),
)

# A state's slots are found by name, whichever algorithm saved it.
SLOTS: Mapping[str, Slot] = MappingProxyType({slot.name: slot for kind in KINDS for slot in kind.slots})


def no_algorithm(given: object) -> str:
    """Return how an error shows what is not an algorithm."""
    if isinstance(given, type) and issubclass(given, Algorithm):
        return f"the class; write {given.__name__}()"
    return shown(given)
