"""The shape of the house: who imports whom, what is public, what the reference says of it."""

from __future__ import annotations

import ast
import graphlib
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import thinwire
from commands import run_python

SOURCE = Path(thinwire.__file__).parent
DOCS = SOURCE.parents[1] / "docs"
REFERENCE = "".join((DOCS / page).read_text() for page in ("api.md", "api-algorithms.md"))
LISTED = re.findall(r"^::: (\S+)$", REFERENCE, re.M)


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def imported_by(name: str) -> set[str]:
    """The package's modules that a module imports: at the top, lazily, for types, or by `import_module`."""
    imported = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                imported.add(whole if whole in MODULES else node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            imported.add(node.value)
    # A package may import its own modules: that is what shows them.
    return (imported & MODULES.keys()) - {name, name.rpartition(".")[0]}


def imports_inside(package: str) -> dict[str, set[str]]:
    """Which of a package's modules and subpackages import which others, with all that is in them."""
    depth, found = package.count(".") + 2, dict[str, set[str]]()
    for name in (module for module in MODULES if module.startswith(f"{package}.")):
        own = ".".join(name.split(".")[:depth])
        inside = (module for module in imported_by(name) if module.startswith(f"{package}."))
        imports = {".".join(module.split(".")[:depth]) for module in inside}
        found.setdefault(own, set()).update(imports - {own})
    return found


PACKAGES = [name for name, path in MODULES.items() if path.name == "__init__.py"]


@pytest.mark.parametrize("package", [None, *PACKAGES])
def test_nothing_imports_in_a_circle(package: str | None) -> None:
    """At no level: neither the modules, nor the packages with all that is in them."""
    imports = {name: imported_by(name) for name in MODULES} if package is None else imports_inside(package)
    order = list(graphlib.TopologicalSorter(imports).static_order())  # raises if there is a circle
    assert imports.keys() <= set(order)


@pytest.mark.parametrize(
    ("importing", "imported"),
    [
        ("algorithms", "comm"),
        ("algorithms.base", "kernels"),
        ("algorithms.requests", "kernels"),
        ("kernels", "algorithms"),
        ("tensors", "kernels"),
    ],
)
def test_algorithms_use_kernels_and_kernels_know_no_algorithm(importing: str, imported: str) -> None:
    inside = [name for name in MODULES if f"{name}.".startswith(f"thinwire.{importing}.")]
    assert inside
    assert not [
        module for name in inside for module in imported_by(name) if module.startswith(f"thinwire.{imported}")
    ]


DISTRIBUTED = re.compile(
    r"\bdist\.(\w*(reduce|broadcast|gather|scatter|all_to_all|barrier|send|recv|new_group|new_subgroups))\b"
    r"|notify_join_context"
)


def test_only_the_channel_issues_collectives_and_makes_groups() -> None:
    found = {name.split(".")[1:2][0] for name in MODULES if DISTRIBUTED.search(MODULES[name].read_text())}
    assert found == {"comm"}


MAKES_TENSORS = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "randint", "randn"}
MAKES_TENSORS |= {"scalar_tensor", "tensor", "zeros"}


def test_every_new_tensor_names_its_device() -> None:
    """Otherwise a user's `torch.set_default_device("cuda")` moves what the host reads and Gloo sends."""
    unnamed = [
        (name, node.lineno)
        for name in MODULES
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MAKES_TENSORS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not unnamed


# Frameworks take seconds to import, and elastic needs torchft: these are read, not imported.
PUBLIC = ["thinwire", *(f"thinwire.{name}" for name in thinwire.PUBLIC_MODULES)]
# Accelerate's own, which is only handed on.
ELSEWHERE = "DDPCommunicationHookType"


def listed_in(name: str) -> list[str] | None:
    """What a module has in its `__all__`; None if it has none."""
    for node in tree_of(name).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(node).partition("=")[0]:
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_lists_what_it_defines_and_the_reference_has_all_of_it(name: str) -> None:
    exported = listed_in(name)
    assert exported is not None
    defined = {node.name for node in tree_of(name).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert {found for found in defined if found[0] != "_"} <= set(exported)
    # With a module that the reference lists, by itself, or by its name at the top.
    of_modules = {shown for entry in LISTED if entry in PUBLIC for shown in listed_in(entry) or []}
    described = {key for key in exported if {f"{name}.{key}", f"thinwire.{key}"} & set(LISTED)} | of_modules
    inner_modules = {module.rpartition(".")[2] for module in MODULES if module.rpartition(".")[0] == name}
    assert set(exported) - {ELSEWHERE} - inner_modules <= described


def test_the_package_shows_its_public_names_and_no_inner_rooms() -> None:
    shown = {name for name in dir(thinwire) if not name.startswith("_")}
    modules = {name for name in shown if isinstance(getattr(thinwire, name), ModuleType)}
    assert shown == modules | set(thinwire.__all__) - {"__version__"}
    assert {"algorithms", "checkpoint", "elastic", "errors", "powersgd", "simulation", "testing"} <= modules
    for name in modules:
        assert f"::: thinwire.{name}" in REFERENCE, name


def test_a_handle_shows_what_is_the_users_and_the_reference_tells_all_of_it() -> None:
    shown = [name for name in dir(thinwire.GradientSync) if not name.startswith("_")]
    members = re.search(r"^::: thinwire.GradientSync\n    options:\n      members: \[(.*)\]", REFERENCE, re.M)
    assert members is not None
    assert members[1].split(", ") == shown


# In a forked process, which has imported it before.
IMPORT = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "thinwire"]:
    del sys.modules[name]
import thinwire
thinwire.attach
print(*[name for name in sys.modules if name.startswith("thinwire.")])
"""


def test_importing_thinwire_imports_what_a_step_needs() -> None:
    imported = run_python("-u", "-c", IMPORT).stdout.split()
    assert "thinwire.sync.engine" in imported
    later = {"demo", "cli", "checkpoint", "integrations", "advice", "local_sgd"}
    assert later.isdisjoint(name.split(".")[1] for name in imported)
