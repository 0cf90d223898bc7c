"""The table of all error messages in `docs/faq.md`, read from the code.

python tests/errors_page.py    # after a message has changed
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "thinwire"
PAGE = ROOT / "docs" / "faq.md"
HEADING = "## All messages\n"
INTRODUCTION = """
Made from the code by `python tests/errors_page.py`; "…" stands for what differs from case to case. The
sections above explain the most frequent ones.

| error | message |
|---|---|
"""
ERRORS = {
    node.name for node in ast.parse((SOURCE / "errors.py").read_text()).body if isinstance(node, ast.ClassDef)
}
Functions = dict[str, ast.FunctionDef]


def messages(node: ast.expr | None, inside: ast.AST, functions: Functions) -> set[str]:
    """What an expression may say; "…" for what is not known before it runs."""
    found = {"…"}
    match node:
        case ast.Constant(value=str(text)):
            found = {text}
        case ast.JoinedStr(values=parts):
            several = [messages(part, inside, functions) for part in parts]
            found = {"".join(chosen) for chosen in product(*several)}
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = product(messages(left, inside, functions), messages(right, inside, functions))
            found = {one + other for one, other in both}
        case ast.IfExp(body=body, orelse=orelse):
            found = messages(body, inside, functions) | messages(orelse, inside, functions)
        case ast.Name(id=name):
            found = any_of(assigned_to(name, inside), functions)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in functions.keys() - dir(
            str
        ):
            returns = [n for n in ast.walk(functions[name]) if isinstance(n, ast.Return)]
            found = any_of([each.value for each in returns], functions)
    return found


def any_of(expressions: Sequence[ast.expr | None], functions: Functions) -> set[str]:
    return set().union(*(messages(each, ast.Pass(), functions) for each in expressions)) or {"…"}


def assigned_to(name: str, inside: ast.AST) -> list[ast.expr]:
    assignments = [node for node in ast.walk(inside) if isinstance(node, ast.Assign)]
    return [
        each.value
        for each in assignments
        if any(isinstance(target, ast.Name) and target.id == name for target in each.targets)
    ]


def raised() -> Iterator[tuple[str, str]]:
    """Every error that is made in the package, with what it may say."""
    trees = [ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ERRORS:
                for said in messages(call.args[0] if call.args else None, function, functions):
                    yield call.func.id, re.sub(r"(…\W{0,2})+…", "…", " ".join(said.split()))


def table() -> str:
    rows = sorted({each for each in raised() if len(re.findall(r"\w+", each[1])) > 2})
    escaped = [(error, re.sub(r"([|*<\[\\])", r"\\\1", said)) for error, said in rows]
    return "".join(f"| {error} | {said} |\n" for error, said in escaped)


def page() -> str:
    """The page as it should be."""
    written = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
    return f"{written}\n\n{HEADING}{INTRODUCTION}{table()}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
