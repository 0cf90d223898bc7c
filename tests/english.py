"""How often texts have turns of phrase that stop a native reader: `make figures`.

python tests/english.py [--list] [CLONE]    # of another commit: give it a clone of that
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = r"(?:\A|[.!?] |\n\n|\n? *[-*] |\| )\**"  # of a sentence, an item, a cell
PLACE = r"(?:\w+ ){0,4}(?:lies?|lay|begins?|stands?|goes|go|went|comes?)\b"  # what truly is a place
BEFORE = r"[,;:(] |\b(?:and|or|but|only|not|also|even|except) "
TELLS = {
    "another": r"\banother\b",
    "anew": r"\banew\b",
    "of its own": r"\bof (?:its|their|one's|your|his) own\b",
    "so many": r"\bso many\b",
    "for ever": r"\bfor ever\b",
    "nobody": r"\b(?:nobody|whoever)\b",
    "where, for if": rf"(?:{START}|{BEFORE})where (?!to\b|{PLACE})",
    "As `X`:": r"\AAs `[^`\n]+`:",
    "Of, Who, By, Behind, Not": rf"(?-i:{START}(?:Of|Who|By(?! default)|Behind|Not)\b)",
}


def prose(page: str) -> Iterator[str]:
    """The paragraphs of a page, without its code."""
    without = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    yield from re.split(r"\n\n+", re.sub(r"`[^`\n]*`", "`x`", without))


def docstrings(tree: ast.AST) -> dict[int, str]:
    """By the number of the node, of every module, class and function, and what stands behind attributes."""
    return {
        id(node.value): str(node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def strings(tree: ast.AST) -> Iterator[str]:
    """What code may print: whole literals, `x` in place of what differs, and no docstrings."""
    done = set(docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            done |= {id(part) for part in node.values}
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "`x`" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in done:
            yield node.value


def comments(text: str) -> Iterator[str]:
    """Comments, joined where they go on on the next line."""
    previous = -2
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != previous + 1 and block:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            previous = token.start[0]
    if block:
        yield " ".join(block)


def texts(root: Path) -> dict[str, list[tuple[str, str]]]:
    """By kind: the place of a text, and the text."""
    found: dict[str, list[tuple[str, str]]] = {
        "docs, README": [],
        "strings of src": [],
        "docstrings, comments": [],
    }
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    for path in pages:
        found["docs, README"] += [(str(path.relative_to(root)), text) for text in prose(path.read_text())]
    for path in sorted((root / "src").rglob("*.py")):
        text, place = path.read_text(), str(path.relative_to(root))
        tree = ast.parse(text)
        found["strings of src"] += [(place, each) for each in strings(tree)]
        told = [*docstrings(tree).values(), *comments(text)]
        found["docstrings, comments"] += [(place, each) for each in told]
    return found


def main() -> None:
    given = [Path(each) for each in sys.argv[1:] if each != "--list"]
    found = texts(given[0] if given else ROOT)
    counts = {
        kind: Counter(
            {tell: sum(len(re.findall(p, text, re.I)) for _, text in some) for tell, p in TELLS.items()}
        )
        for kind, some in found.items()
    }
    print(f"{'tells':28}", *(f"{kind:>22}" for kind in counts))
    for tell in TELLS:
        print(f"{tell:28}", *(f"{count[tell]:>22}" for count in counts.values()))
    print(f"{'all':28}", *(f"{count.total():>22}" for count in counts.values()))
    if "--list" in sys.argv:
        for kind, some in found.items():
            for place, text in some:
                for tell, pattern in TELLS.items():
                    for match in re.finditer(pattern, text, re.I):
                        shown = text[max(0, match.start() - 60) : match.end() + 60].replace("\n", " ")
                        print(f"{kind} · {place} · {tell}: {shown}")


if __name__ == "__main__":
    main()
