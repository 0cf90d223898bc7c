"""How large the house is, and how it reads: `make figures`.

Figures of the source as it lies there; only an import is run, in fresh processes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "thinwire"
Function = ast.FunctionDef | ast.AsyncFunctionDef

RUN_LINES = 6  # a run of so many shared lines counts as a duplicate
TOO_COMMON = 8  # a run that stands in more places is a habit, not a duplicate
IMPORTS = 9  # fresh processes, of which the median counts


def num_lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def functions_in(paths: list[Path]) -> Iterator[tuple[str, Function]]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def body_lines(function: Function) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def num_arguments(function: Function) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def comment_share(paths: list[Path]) -> float:
    """Return lines that are a comment over lines of code, docstrings counted as neither."""
    comments = code = 0
    for path in paths:
        text = path.read_text()
        docstrings = {
            line
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip().startswith("#"):
                comments += 1
            elif line.strip() and number not in docstrings:
                code += 1
    return comments / code


def duplicate_pairs(paths: list[Path]) -> list[str]:
    """Return the pairs of files that share a run, each with the place of one."""
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


def closets(paths: list[Path]) -> list[str]:
    """Return private functions of at most four lines that are used once."""
    words = Counter(re.findall(r"\w+", "\n".join(path.read_text() for path in paths)))
    return [
        where
        for where, function in functions_in(paths)
        if re.match(r"_[^_]", function.name)
        and not function.decorator_list
        and words[function.name] == 2
        and 0 < body_lines(function) <= 4
    ]


def import_figures() -> tuple[int, float]:
    """Return our modules that DDP's users load, and the time of that over that of `import torch`."""
    ours = "sum(name.partition('.')[0] == 'thinwire' for name in sys.modules)"
    count = f"import sys, thinwire; thinwire.attach; print({ours})"
    timed = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    seconds: dict[str, list[float]] = {"torch": [], "thinwire; thinwire.attach": []}
    for _ in range(IMPORTS):
        for statement, found in seconds.items():
            found.append(float(printed_by(timed.format(statement))))
    of_torch, of_both = map(median, seconds.values())
    return int(printed_by(count)), of_both / of_torch


def printed_by(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def main() -> None:
    source, tests = (sorted(folder.rglob("*.py")) for folder in (SOURCE, ROOT / "tests"))
    functions = list(functions_in(source))
    sizes = [body_lines(function) for _, function in functions]
    many = [
        f"{where}: {num_arguments(f)}"
        for where, f in functions
        if num_arguments(f) > 10 and "triton" not in where
    ]
    modules, ratio = import_figures()
    same, used_once = duplicate_pairs(source), closets(source)
    rows = [
        ("src: lines, with docstrings", f"{num_lines(source):,}"),
        ("src: files", len(source)),
        ("tests: lines", f"{num_lines(tests):,}"),
        ("files that share six lines", len(same)),
        ("modules of ours that `thinwire.attach` loads", modules),
        ("its time, torch's included, in that of `import torch`", f"{ratio:.2f}"),
        ("functions of more than 10 arguments, Triton's aside", len(many)),
        ("private functions of up to 4 lines that are used once", len(used_once)),
        ("90 % of function bodies have at most, lines", f"{quantiles(sizes, n=10)[-1]:.0f}"),
        ("comments, in lines of code", f"{comment_share(source):.1%}"),
    ]
    for name, figure in rows:
        print(f"{name:56} {figure:>8}")
    if "--list" in sys.argv[1:]:
        print(
            "", "Shared lines:", *same, "", "Many arguments:", *many, "", "Used once:", *used_once, sep="\n"
        )


if __name__ == "__main__":
    main()
