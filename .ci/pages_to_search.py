"""What mkdocs calls while it builds the site: which pages the search finds, and first."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Put errors first, and leave tables of figures out, which would be most of the index."""
    if page.file.src_uri in ("docs/faq.md", "docs/errors.md"):
        page.meta["search"] = {"boost": 6}
    if page.file.src_uri.startswith("benchmarks/results/"):
        page.meta["search"] = {"exclude": True}
