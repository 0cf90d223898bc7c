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
TREES = [ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))]
# The statements among which each node stands; the walk comes to inner ones last.
BLOCKS = {
    inner: statements
    for tree in TREES
    for node in ast.walk(tree)
    for statements in (getattr(node, field, None) for field in ("body", "orelse", "finalbody"))
    for statement in (statements if isinstance(statements, list) else ())
    for inner in ast.walk(statement)
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
        case ast.FormattedValue(value=ast.Name() as name):
            found = messages(name, inside, functions)
        case ast.Name():
            found = any_of(assigned_to(node, inside), functions)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in functions.keys() - dir(
            str
        ):
            returns = [n for n in ast.walk(functions[name]) if isinstance(n, ast.Return)]
            found = any_of([each.value for each in returns], functions)
    return found


def any_of(expressions: Sequence[ast.expr | None], functions: Functions) -> set[str]:
    return set().union(*(messages(each, ast.Pass(), functions) for each in expressions)) or {"…"}


def assigned_to(name: ast.Name, inside: ast.AST) -> list[ast.expr]:
    """The last value in the same block; else all in the function; else that of a module's constant."""
    constants = [node for tree in TREES for node in tree.body] if name.id.isupper() else []
    found = [
        (each, value)
        for each in (*ast.walk(inside), *constants)
        if isinstance(each, ast.Assign)
        for target in each.targets
        for one, value in assigned(target, each.value)
        if isinstance(one, ast.Name) and one.id == name.id
    ]
    before = [value for each, value in found if BLOCKS[each] is BLOCKS[name] and each.lineno < name.lineno]
    # Empty where nothing is wrong.
    return before[-1:] or [value for _, value in found if getattr(value, "value", None) != ""]


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def raised() -> Iterator[tuple[str, str]]:
    """Every error that is made in the package, with what it may say."""
    nodes = [node for tree in TREES for node in ast.walk(tree)]
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
