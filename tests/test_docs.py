"""What the pages say is so: the sentences that they explain are the code's, and code that they show runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import in_turn
import thinwire
from thinwire import errors

ROOT = Path(__file__).parents[1]
FAQ = (ROOT / "docs" / "faq.md").read_text()
SENTENCES = re.findall(r"^> (.*)", FAQ, re.MULTILINE)


def sources() -> list[str]:
    """The package's files, each with the parts of its strings joined as Python joins them."""
    files = Path(thinwire.__file__).parent.rglob("*.py")
    joined = [re.sub(r'(["\'])\s+f?["\']', "", path.read_text()) for path in files]
    return [re.sub(r"\{[^{}]*\}|%[sdr]|%\.1f", "…", text) for text in joined]


def test_every_error_stands_in_the_list_of_errors() -> None:
    headings = re.findall(r"^## (\w+)$", FAQ, re.MULTILINE)
    assert set(errors.__all__) <= set(headings)


@pytest.fixture(scope="module")
def source() -> list[str]:
    return sources()


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_that_is_explained_is_one_that_is_raised(sentence: str, source: list[str]) -> None:
    parts = [part.strip(" .;") for part in sentence.split("…") if len(part.strip(" .;")) > 3]
    assert parts
    assert any(all(part in text for part in parts) for text in source), parts


def test_the_small_algorithm_is_small_and_does_what_its_page_says() -> None:
    source = Path(in_turn.__file__).read_text()
    assert len(source.splitlines()) <= 60
    page = (ROOT / "docs" / "own-algorithm.md").read_text()
    shown = page.partition("## Test it")[2].partition("```python\n")[2].partition("```")[0]
    assert "compression_ratio > 7" in shown
    assert '--8<-- "tests/in_turn.py"' in page
    exec(compile(shown, "own-algorithm.md", "exec"), {"torch": torch, "InTurn": in_turn.InTurn})
