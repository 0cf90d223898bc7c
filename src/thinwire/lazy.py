"""Names that a package imports when they are first used, so that what needs no torch does not wait for it."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_later(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Return a package's `__getattr__`, for names of its `modules`, and its `__dir__`, for an editor."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get, lambda: import_module(package).__all__
