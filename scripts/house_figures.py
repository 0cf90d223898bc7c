"""Print how large the code is and what makes it hard to read: `make figures`; with the places: `--list`.

Figures of the source as it lies there: nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from itertools import combinations_with_replacement
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "thinwire"
MAX_ARGUMENTS = 11
RUN_LINES = 6  # a run of so many shared lines counts as a duplicate
TOO_COMMON = 8  # a run that stands in more places is a habit, not a duplicate
LARGEST = 5

Trees = dict[Path, ast.Module]


def nodes(trees: Trees, *kinds: type[ast.AST]) -> list[tuple[str, ast.AST]]:
    """Return all nodes of some kinds, each with its place."""
    return [
        (f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}", node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


def many_arguments(trees: Trees) -> list[str]:
    """Return functions of more than `MAX_ARGUMENTS`, Triton's kernels aside."""
    found = []
    for place, node in nodes(trees, ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len(arguments) - (arguments[:1] in (["self"], ["cls"]))
        if count > MAX_ARGUMENTS and "triton" not in place:
            found.append(f"{place} {node.name}: {count}")
    return found


def loops_over_each(trees: Trees) -> list[str]:
    """Return loops and comprehensions whose variable is called `each`."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.comprehension):
                names = [n for n in ast.walk(node.target) if isinstance(n, ast.Name) and n.id == "each"]
                found += [f"{path.relative_to(SOURCE)}:{name.lineno}" for name in names]
    return found


def relative_docstrings(trees: Trees) -> list[str]:
    """Return docstrings that define a thing by a relative clause."""
    found = []
    for place, node in nodes(trees, ast.FunctionDef, ast.ClassDef, ast.Module):
        assert isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        if re.match(r"(Return )?(What|Whose|Whom|Who)\b", first, re.I):
            found.append(f"{place} {first}")
    return found


def classes(trees: Trees) -> tuple[list[str], list[str]]:
    """Return names that several classes have, and the largest classes with what they inherit."""
    places: dict[str, list[str]] = defaultdict(list)
    bases: dict[str, list[str]] = {}
    members: dict[str, tuple[set[str], set[str]]] = {}
    for place, node in nodes(trees, ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        places[node.name].append(place)
        bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
        attributes = {
            target.attr
            for method in methods
            for target in ast.walk(method)
            if isinstance(target, ast.Attribute)
            and isinstance(target.ctx, ast.Store)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        }
        members[node.name] = {method.name for method in methods}, attributes

    def ancestors(name: str) -> set[str]:
        return {name}.union(*(ancestors(base) for base in bases.get(name, ()) if base != name))

    sizes = []
    for name in members:
        inherited = [members[ancestor] for ancestor in ancestors(name) if ancestor in members]
        methods_, attributes_ = (set[str]().union(*sets) for sets in zip(*inherited, strict=True))
        sizes.append((len(methods_), len(attributes_), name))
    largest = [f"{name}: {count} methods, {own} attributes" for count, own, name in sorted(sizes)[::-1]]
    twice = [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]
    return sorted(twice), largest[:LARGEST]


def duplicates(paths: list[Path]) -> list[str]:
    """Return the pairs of files that share a run of lines, each with one place."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path in paths:
        lines = [
            (number, line)
            for number, line in enumerate(map(str.strip, path.read_text().splitlines()), start=1)
            if re.search(r"\w", line) and not re.match(r"#|import |from .* import ", line)
        ]
        for start in range(len(lines) - RUN_LINES + 1):
            run = lines[start : start + RUN_LINES]
            places[tuple(line for _, line in run)].append((path, run[0][0]))
    pairs: dict[tuple[Path, Path], str] = {}
    for found in places.values():
        if not 1 < len(found) <= TOO_COMMON:
            continue
        for (one, first), (other, second) in combinations_with_replacement(found, 2):
            if one != other or abs(first - second) >= RUN_LINES:
                where = f"{one.relative_to(SOURCE)}:{first} ~ {other.relative_to(SOURCE)}:{second}"
                pairs.setdefault((one, other), where)
    return sorted(pairs.values())


def num_lines(folder: Path) -> int:
    """Count the lines of Python under a folder."""
    return sum(path.read_text().count("\n") for path in folder.rglob("*.py"))


def main() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in paths}
    for folder in ("src", "tests", "benchmarks", "scripts"):
        print(f"{folder + ': lines':56} {num_lines(ROOT / folder):>8,}")
    same_names, largest = classes(trees)
    stems = Counter(path.name for path in paths if path.name != "__init__.py")
    lists = {
        f"functions of more than {MAX_ARGUMENTS} arguments, Triton's aside": many_arguments(trees),
        "loops over a variable called `each`": loops_over_each(trees),
        "docstrings that begin with What or Who": relative_docstrings(trees),
        "files that share six lines": duplicates(paths),
        "names of several classes": same_names,
        "names of several files": sorted(name for name, count in stems.items() if count > 1),
    }
    print(f"{'src: files':56} {len(paths):>8}")
    for name, found in lists.items():
        print(f"{name:56} {len(found):>8}")
    print("largest classes, with what they inherit:", *largest, sep="\n  ")
    if "--list" in sys.argv[1:]:
        for name, found in lists.items():
            print("", f"{name}:", *found, sep="\n")


if __name__ == "__main__":
    main()
