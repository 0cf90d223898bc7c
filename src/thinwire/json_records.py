"""JSON that may come from anywhere, read into a dataclass or a TypedDict by its annotations."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

MAX_NUMBER = 1e100  # sums and squares of many such are finite, and can be drawn
MAX_WHOLE_NUMBER = 1 << 53  # a float holds every one up to here
MAX_SECONDS = 1e10  # three centuries
MAX_TEXT_LENGTH = 10_000
MAX_PROCESSES = 1 << 20

# A second and a third argument of Annotated are bounds: of a number, or of a list's length.
Whole = Annotated[int, 0, MAX_WHOLE_NUMBER]
Count = Annotated[int, 1, MAX_WHOLE_NUMBER]
Processes = Annotated[int, 1, MAX_PROCESSES]
Amount = Annotated[float, 0, MAX_WHOLE_NUMBER]
Seconds = Annotated[float, 0, MAX_SECONDS]

Reader: TypeAlias = Callable[[str, Any], Any]
Read = TypeVar("Read")


def parsed(line: str) -> Any:
    """Return what a text in JSON says. A lone surrogate, which no file can hold, becomes a question mark."""
    try:
        value = json.loads(line, parse_constant=_refuse)
        # Only if there may be one: to write all of it again and read that takes as long as the first time.
        if "\\ud" in line or "\\uD" in line:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def read_record(kind: type[Read], plain: Any) -> Read:
    """Return the fields that `kind` has, each checked, and no others."""
    readers = _readers(cast(Any, kind))  # to mypy a type is not hashable
    for name in readers:
        if type(plain) is not dict or name not in plain:
            raise ValueError(f"there is no {name}")
    return kind(**{name: reader(name, plain[name]) for name, reader in readers.items()})


def value_of(hint: Any, name: str, value: object) -> Any:
    """Return a value if it is of a type; `name` is for the error."""
    return _reader(hint)(name, value)


@cache
def _readers(kind: Any) -> Mapping[str, Reader]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: _reader(hint) for name, hint in hints.items()}


@cache
def _reader(hint: Any) -> Reader:
    """Return what checks a value of a type, given the field's name and the value."""
    bounds: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, bounds = get_args(hint)[0], get_args(hint)[1:]
    arguments, origin = get_args(hint), get_origin(hint) or hint
    reader: Reader = lambda name, value: read_record(hint, value)  # noqa: E731
    if origin in (Union, UnionType):
        of_value = _reader(arguments[0])
        reader = lambda name, value: None if value is None else of_value(name, value)  # noqa: E731
    elif origin is list:
        reader = partial(_list_of, _reader(arguments[0]), *(bounds or (0, MAX_WHOLE_NUMBER)))
    elif origin is tuple:
        items = partial(_list_of, _reader(arguments[0]), len(arguments), len(arguments))
        reader = lambda name, value: tuple(items(name, value))  # noqa: E731
    elif origin is dict:
        reader = partial(_mapping_of, _reader(arguments[0]), _reader(arguments[1]))
    elif origin in (Literal, int, float, str, bool):
        reader = partial(_plain, *_expected(origin, arguments or bounds))
    return reader


def _expected(kind: Any, choices: tuple[Any, ...]) -> tuple[str, Callable[[Any], bool]]:
    """Return what a plain value must be, and what tells whether it is that: one of some, or within bounds."""
    # Compare types: to `isinstance` True is a whole number.
    if kind is Literal:
        return f"one of {', '.join(choices)}", lambda value: type(value) is str and value in choices
    if kind is bool:
        return "true or false", lambda value: type(value) is bool
    if kind is str:
        words = f"text of at most {MAX_TEXT_LENGTH} characters"
        return words, lambda value: type(value) is str and len(value) <= MAX_TEXT_LENGTH
    low, high = choices or (-MAX_NUMBER, MAX_NUMBER)
    whole, digits = ("whole ", "") if kind is int else ("", "g")
    words = f"a {whole}number from {low:{digits}} to {high:{digits}}"
    return words, lambda value: type(value) in (int, kind) and low <= value <= high


def _plain(expected: str, fits: Callable[[Any], bool], name: str, value: Any) -> Any:
    if not fits(value):
        raise ValueError(f"{name} must be {expected}, got {reprlib.repr(value)}")
    return value


def _list_of(reader: Reader, minimum: int, maximum: int, name: str, value: Any) -> list[Any]:
    if type(value) is not list or not minimum <= len(value) <= maximum:
        got = f"one of {len(value)}" if type(value) is list else reprlib.repr(value)
        raise ValueError(f"{name} must be a list of {minimum} to {maximum}, got {got}")
    return [reader(name, each) for each in value]


def _mapping_of(key_reader: Reader, reader: Reader, name: str, value: Any) -> dict[str, Any]:
    _plain("an object", lambda value: type(value) is dict, name, value)
    # Each record has the same names: interned, they are kept once for all records.
    return {
        sys.intern(key_reader(f"a name in {name}", key)): reader(reprlib.repr(key), each)
        for key, each in value.items()
    }


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}, expected finite numbers")
