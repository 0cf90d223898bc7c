"""What mkdocs calls while it builds the site: pages to search, and a reference that lacks no public name."""

from __future__ import annotations

import ast
import zlib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

SOURCE = Path(__file__).parents[1] / "src"


def listed_in(module: str, variable: str) -> tuple[str, ...]:
    """Return the names that a variable of a module has, without importing it."""
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable:
            return tuple(ast.literal_eval(node.value))
    raise PluginError(f"{module} has no {variable}")


# Everything in their `__all__` must be rendered.
PUBLIC = ["thinwire", *(f"thinwire.{name}" for name in listed_in("thinwire", "PUBLIC_MODULES"))]

# Accelerate's own, which is only handed on.
ELSEWHERE = {"thinwire.integrations.accelerate.DDPCommunicationHookType"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Leave tables of figures out of the search: they would be most of its index."""
    if page.file.src_uri.startswith("benchmarks/results/"):
        page.meta["search"] = {"exclude": True}


def on_post_build(config: Any) -> None:
    """Compare what the modules offer with the inventory of what was rendered."""
    inventory = Path(config.site_dir, "objects.inv").read_bytes()
    # Four lines of text, then lines that begin with a name, compressed.
    lines = zlib.decompress(inventory.split(b"\n", 4)[4]).decode().splitlines()
    rendered = {line.split(" ", 1)[0] for line in lines}
    missing = [name for module in PUBLIC for name in public_names(module) if name not in rendered | ELSEWHERE]
    if missing:
        raise PluginError(f"the reference (docs/api*.md) lacks {', '.join(missing)}")


def public_names(module: str) -> list[str]:
    """Return what a module has in its `__all__`, without importing it."""
    return [f"{module}.{name}" for name in listed_in(module, "__all__")]
