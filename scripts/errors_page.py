"""The table of all error messages, `docs/errors.md`, read from the code.

python scripts/errors_page.py    # after a message has changed
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "thinwire"
PAGE = ROOT / "docs" / "errors.md"
INTRODUCTION = """# All error messages

[Errors, and what to do](faq.md) explains the most frequent ones. This table is made from the code by
`python scripts/errors_page.py`; "…" stands for what differs from case to case.

| error | message |
|---|---|
"""
TREES = [ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))]
NODES = [node for tree in TREES for node in ast.walk(tree)]
FUNCTIONS = {
    node.name: node
    for node in NODES
    if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and node.returns.id == "str"
}
PUBLIC = {
    node.name for node in ast.parse((SOURCE / "errors.py").read_text()).body if isinstance(node, ast.ClassDef)
}
# Inner errors are raised as their public base.
ERRORS = {name: name for name in PUBLIC} | {
    node.name: base.id
    for node in NODES
    if isinstance(node, ast.ClassDef) and node.name not in PUBLIC
    for base in node.bases
    if isinstance(base, ast.Name) and base.id in PUBLIC
}
UNKNOWN, MOST = "…", 8  # ways that a part of a message may read


def assigned(inside: Iterable[ast.AST], name: str) -> list[ast.expr]:
    """What a name is given, at any place."""
    found: list[ast.expr] = []
    for node in inside:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if value is not None and any(
            isinstance(target, ast.Name) and target.id == name for target in targets
        ):
            found.append(value)
    return found


def before(function: ast.AST, use: ast.expr) -> Iterator[ast.stmt]:
    """Yield the statements that may run before one with `use`, nearest first, without loops."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        block = getattr(function, field, [])
        for index, statement in enumerate(block if isinstance(block, list) else []):
            if use in ast.walk(statement):
                yield from before(statement, use)
                yield from reversed(block[:index])


def reaching(function: ast.AST, use: ast.Name) -> list[ast.expr]:
    """What a name may have been given where it is used: nothing that another assignment replaces."""
    found: list[ast.expr] = []
    for statement in before(function, use):
        found += assigned(ast.walk(statement), use.id)
        if isinstance(statement, ast.Assign) and assigned([statement], use.id):
            break
    return found or assigned(ast.walk(function), use.id)


CONSTANTS = [node for tree in TREES for node in tree.body]


def messages(node: ast.expr | None, inside: ast.AST) -> set[str]:
    """What an expression may say; "…" for what is not known before it runs."""
    found = {UNKNOWN}
    match node:
        case ast.Constant(value=str(text)):
            found = {text}
        case ast.JoinedStr(values=parts):
            found = joined(parts, inside)
        case ast.FormattedValue(value=ast.Name() | ast.IfExp() as value):
            found = {text if re.search(r"\w{2} \w", text) else UNKNOWN for text in messages(value, inside)}
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = joined([left, right], inside)
        case ast.IfExp(body=body, orelse=orelse):
            found = messages(body, inside) | messages(orelse, inside)
        case ast.Name(id=name) as use:
            given = reaching(inside, use) or assigned(CONSTANTS, name)
            found = set().union(*(messages(value, ast.Pass()) for value in given))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in FUNCTIONS.keys() - {
            *dir(str),
            *dir(dict),
        }:
            returned = [
                statement.value
                for statement in ast.walk(FUNCTIONS[name])
                if isinstance(statement, ast.Return)
            ]
            found = set().union(*(messages(value, ast.Pass()) for value in returned))
    return found if 0 < len(found) <= MOST else {UNKNOWN}


def joined(parts: list[ast.expr], inside: ast.AST) -> set[str]:
    return {"".join(chosen) for chosen in product(*(messages(part, inside) for part in parts))}


def raised() -> Iterator[tuple[str, str]]:
    """Every error that is made in the package, with what it may say."""
    for function in (node for node in NODES if isinstance(node, ast.FunctionDef)):
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ERRORS:
                for message in messages(call.args[0] if call.args else None, function):
                    yield ERRORS[call.func.id], re.sub(r"(…\W{0,2})+…", UNKNOWN, " ".join(message.split()))


def table() -> str:
    rows = sorted({pair for pair in raised() if len(re.findall(r"\w+", pair[1])) > 2})
    escaped = [(error, re.sub(r"([|*<\[\\])", r"\\\1", message)) for error, message in rows]
    return "".join(f"| {error} | {message} |\n" for error, message in escaped)


def page() -> str:
    """Return the page as it should be."""
    return INTRODUCTION + table()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
