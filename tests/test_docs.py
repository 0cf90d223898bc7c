"""The pages are true: what they call is there with the arguments that they name, and their code runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import in_turn
import thinwire
from processes import in_each_process
from thinwire import algorithms, elastic, errors, hooks, powersgd, testing
from training import are_alike

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
INTEGRATIONS = Path(thinwire.__file__).parent / "integrations"
FAQ = PAGES["faq.md"]


def test_every_error_stands_in_the_list_of_errors() -> None:
    headings = re.findall(r"^## (\w+)$", FAQ, re.MULTILINE)
    assert set(errors.__all__) <= set(headings)
    assert all(issubclass(getattr(errors, name), errors.ThinwireError) for name in errors.__all__)


# By the script that makes them.
MADE: dict[str, tuple[str, Callable[[Any], str]]] = {
    "scripts/errors_page.py": ("docs/errors.md", lambda script: script.page()),
    "benchmarks/results_page.py": ("docs/results.md", lambda script: script.text()),
    "benchmarks/loss_gaps.py": ("src/thinwire/advice/loss_gaps.json", lambda script: script.text()),
    "scripts/calculator_constants.py": (
        "docs/calculator.json",
        lambda script: json.dumps(script.constants(), indent=1) + "\n",
    ),
}


@pytest.mark.parametrize("script", MADE)
def test_what_a_script_makes_is_what_it_has_made(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If not, run it."""
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    path, text = MADE[script]
    assert (ROOT / path).read_text(encoding="utf-8") == text(importlib.import_module(Path(script).stem))


def test_the_algorithm_of_the_page_passes_the_page_s_test() -> None:
    page = PAGES["own-algorithm.md"]
    shown = page.partition("## Test it")[2].partition("```python\n")[2].partition("```")[0]
    assert "compression_ratio > 7" in shown
    assert '--8<-- "tests/in_turn.py"' in page
    exec(compile(shown, "own-algorithm.md", "exec"), {"torch": torch, "InTurn": in_turn.InTurn})


@pytest.fixture(scope="module")
def offered() -> dict[str, list[set[str] | None]]:
    """The parameters of what pages call, by its last name, which several modules may have; None: any."""
    found: dict[str, list[set[str] | None]] = {}
    for module in (thinwire, algorithms, elastic, powersgd, hooks, testing):
        for name in module.__all__:
            each = getattr(module, name)
            is_error = inspect.isclass(each) and issubclass(each, Exception)  # which has no signature
            if inspect.isfunction(each) or (inspect.isclass(each) and not is_error):
                parameters = inspect.signature(each).parameters
                takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
                found.setdefault(name, []).append(None if takes_any else set(parameters))
    # Read, for to import the frameworks takes seconds.
    for path in INTEGRATIONS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                parameters_of = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
                found.setdefault(node.name, []).append(parameters_of)
    return found


def codes(page: str) -> Iterator[str]:
    """The code that a page shows: its blocks, what a diff makes of them, and what stands within lines."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "diff":
            kept = [line[1:] for line in block.splitlines() if line[:1] in "+ "]
            yield from kept
            yield "\n".join(kept)
        elif language == "python":
            yield block
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_calls_has_the_arguments_that_it_names(
    name: str, offered: dict[str, list[set[str] | None]]
) -> None:
    for code in codes(PAGES[name]):
        try:
            tree = ast.parse(textwrap.dedent(code.replace("…", "...")))
        except SyntaxError:  # a part of a statement, or no code
            continue
        for call in ast.walk(tree):
            if isinstance(call, ast.Call):
                given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
                offers = offered.get(ast.unparse(call.func).rpartition(".")[2], [None])
                assert any(offer is None or given <= offer for offer in offers), ast.unparse(call)


@pytest.mark.parametrize("name", PAGES)
def test_names_that_a_page_has_are_there(name: str) -> None:
    code = "\n".join(codes(PAGES[name]))
    for handle in re.findall(r"(?<![\w./])sync\.(\w+)\(", code):
        assert hasattr(thinwire.GradientSync, handle), handle
    for method in re.findall(r"(?<![\w./])local\.(\w+)\(", code):
        assert hasattr(elastic.LocalSGD if name.startswith("elastic") else thinwire.LocalSGD, method), method
    for dotted in re.findall(r"(?<![\w./])thinwire((?:\.[A-Za-z_]\w*)+)", code):
        assert dotted == ".pt" or is_there(dotted[1:].split(".")), dotted


def is_there(names: list[str]) -> bool:
    """Whether the package has a module, or a name in a module, of this path."""
    if names[0] == "integrations":
        path = INTEGRATIONS / f"{names[1]}.py"
        return path.exists() and all(f'"{name}"' in path.read_text() for name in names[2:])
    owner: Any = thinwire
    for depth, name in enumerate(names, 1):
        if not hasattr(owner, name):
            try:
                importlib.import_module(".".join(["thinwire", *names[:depth]]))
            except ImportError:
                return False
        owner = getattr(owner, name)
    return True


def quickstart() -> str:
    """The script that the page tells to save, less making and ending the group: the pool has one."""
    code = PAGES["quickstart.md"].partition("```python\n")[2].partition("```")[0]
    group = re.compile(r"^(dist\.(init|destroy)_process_group\(.*\)|del model, sync .*)\n", re.MULTILINE)
    without, removed = group.subn("", code)
    assert removed == 3
    return without


@in_each_process(2)
def test_the_quickstart_compresses_and_leaves_one_model() -> None:
    names: dict[str, Any] = {}
    exec(compile(quickstart(), "quickstart.py", "exec"), names)
    assert names["sync"].stats().compression_ratio > 7
    assert are_alike(names["model"].parameters())


def test_the_readme_adds_lines_of_the_quickstart() -> None:
    added = re.findall(r"^\+(.*)", PAGES["README.md"], re.MULTILINE)
    assert len(added) == 3
    assert all(line in quickstart() for line in added)


def test_one_version_everywhere() -> None:
    assert f"\nversion: {thinwire.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {thinwire.__version__} " in (ROOT / "CHANGELOG.md").read_text()
