"""What mkdocs calls while it builds the site: which pages can be searched."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Leave tables of figures out of the search: they would be most of its index."""
    if page.file.src_uri.startswith("benchmarks/results/"):
        page.meta["search"] = {"exclude": True}
