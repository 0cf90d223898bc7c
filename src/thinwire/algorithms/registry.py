"""All algorithms, for demo, advise, check, the conformance suite and the command line to iterate over."""

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
    """An algorithm with settings to try."""

    code: str  # the text that stands in code after `thinwire.`
    algorithm: Algorithm
    # Largest relative error of its means. If it keeps a residual: of the sum of all means and the residual.
    tolerance: float = 1e-5
    is_checked: bool = False  # by `thinwire check`
    is_priced: bool = False  # by `thinwire.advise`, which has a table of its cost in loss
    keeps_16_bits: bool = False  # whether its means are as good as 16 bits
    # If this one was not measured: algorithms (as `str`) that certainly lose less, and more.
    loses_more_than: str = ""
    loses_less_than: str = ""


@dataclass(frozen=True)
class Registered:
    """An algorithm with its name and its variants."""

    name: str  # on a command line
    make: Callable[..., Algorithm]  # with settings by name; all have defaults
    variants: tuple[Variant, ...] = ()
    priced_too: tuple[Variant, ...] = ()  # tried by `thinwire.advise` only
    is_lossy: bool = True  # whether its means are approximate

    @property
    def kind(self) -> type[Algorithm]:
        """Its class."""
        return type(self.make())

    @property
    def has_memory(self) -> bool:
        """Whether it keeps state between steps."""
        return self.make().remembers

    @property
    def priced(self) -> tuple[Variant, ...]:
        """The variants that `thinwire.advise` prices."""
        return (*(variant for variant in self.variants if variant.is_priced), *self.priced_too)

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


def _tried(code: str, **facts: Any) -> Variant:
    return Variant(code, cast("Algorithm", parsed(code)), **facts)


REGISTRY: tuple[Registered, ...] = (
    Registered(
        "exact",
        AllReduce,
        (_tried("AllReduce()", is_checked=True, is_priced=True, keeps_16_bits=True),),
        is_lossy=False,
    ),
    Registered(
        "fp16",
        lambda: Cast("fp16"),
        (_tried('Cast("fp16")', tolerance=3e-3, is_checked=True, keeps_16_bits=True),),
    ),
    Registered(
        "bf16",
        lambda: Cast("bf16"),
        (_tried('Cast("bf16")', tolerance=2e-2, is_checked=True, is_priced=True, keeps_16_bits=True),),
    ),
    Registered(
        "quantize",
        Quantize,
        (
            _tried(
                "Quantize(bits=8)",
                tolerance=3e-2,
                is_checked=True,
                is_priced=True,
                loses_more_than="Cast(dtype='bf16')",
                loses_less_than="Quantize(bits=4)",
            ),
            _tried(
                "Quantize(bits=6)",
                tolerance=0.1,
                is_checked=True,
                is_priced=True,
                loses_more_than="Quantize(bits=8)",
                loses_less_than="Quantize(bits=4)",
            ),
            _tried("Quantize(bits=4)", tolerance=0.3, is_checked=True, is_priced=True),
            _tried("Quantize(bits=2)", tolerance=0.7, is_checked=True, is_priced=True),
        ),
    ),
    Registered(
        "powersgd",
        PowerSGD,
        (
            _tried("PowerSGD(matrix_rank=1)", is_priced=True),
            _tried("PowerSGD(matrix_rank=2)", is_checked=True, is_priced=True),
            _tried("PowerSGD(matrix_rank=4)", is_priced=True),
            _tried(
                "PowerSGD(matrix_rank=8)",
                is_priced=True,
                loses_more_than="PowerSGD(matrix_rank=16)",
                loses_less_than="PowerSGD(matrix_rank=4)",
            ),
            _tried(
                "PowerSGD(matrix_rank=4, alternating=True)",
                is_priced=True,
                loses_more_than="PowerSGD(matrix_rank=8, alternating=True)",
            ),
            _tried("PowerSGD(matrix_rank=2, alternating=True)", is_checked=True),
            _tried('PowerSGD(matrix_rank=2, wire_dtype="bf16")', tolerance=2e-2, is_checked=True),
        ),
        priced_too=(_tried("PowerSGD(matrix_rank=16)"),),
    ),
    Registered(
        "batched-powersgd", BatchedPowerSGD, (_tried("BatchedPowerSGD(matrix_rank=1)", is_checked=True),)
    ),
    Registered(
        "topk",
        TopK,
        # The check is that nothing is forgotten, which holds only with these settings.
        (_tried('TopK(error_decay=1, merge="members")', is_checked=True),),
        priced_too=(Variant("TopK(density=1 / 32)", TopK(density=1 / 32)),),
    ),
)

# A state's slots are found by name, whichever algorithm saved it.
SLOTS: Mapping[str, Slot] = MappingProxyType({slot.name: slot for kind in KINDS for slot in kind.slots})


def no_algorithm(given: object) -> str:
    """Return how an error shows what is not an algorithm."""
    if isinstance(given, type) and issubclass(given, Algorithm):
        return f"the class; write {given.__name__}()"
    return shown(given)
