"""What is wrong with the names of an algorithm's settings, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature

from thinwire.errors import ConfigError


def check_names(
    kind: type, args: Sequence[object], settings: Mapping[str, object], elsewhere: Mapping[str, str]
) -> None:
    """Refuse settings that a class does not take."""
    taken = signature(kind.__init__)  # type: ignore[misc]
    try:
        taken.bind_partial(None, *args, **settings)
    except TypeError as error:
        defaults = {name: each.default for name, each in taken.parameters.items() if name != "self"}
        raise ConfigError(_respelt(kind.__name__, defaults, args, settings, elsewhere)) from error


def _respelt(
    kind: str,
    defaults: Mapping[str, object],
    args: Sequence[object],
    settings: Mapping[str, object],
    elsewhere: Mapping[str, str],
) -> str:
    names = list(defaults)
    for unknown in (name for name in settings if name not in names):
        other = elsewhere.get(unknown)
        # Only what this algorithm has: `BatchedPowerSGD` lacks some of `PowerSGD`'s.
        meant = [other] if other in names else get_close_matches(unknown, names, n=1)
        if meant:
            return f"{kind} has no setting {unknown!r}; write {kind}({meant[0]}={settings[unknown]!r})"
        return f"{kind} has no setting {unknown!r}; it has {', '.join(names) or 'none'}"
    if not names:
        return f"{kind} has no settings, got {args[0]!r}; write {kind}()"
    # Not a model, say, that stands where another library has it.
    value = args[0] if isinstance(args[0], int | float | str) else defaults[names[0]]
    return f"{kind} takes settings by name, got {args[0]!r} without one; write {kind}({names[0]}={value!r})"
