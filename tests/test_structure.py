"""The shape of the house: floors, public names, nothing at import."""

from __future__ import annotations

import ast
import graphlib
import json
import pkgutil
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import thinwire
from launcher import run_python
from thinwire import errors

SOURCE = Path(thinwire.__file__).parent


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
    return {each for each in imported & MODULES.keys() if each != name and each != name.rpartition(".")[0]}


def room_of(name: str) -> str:
    return [*name.split("."), "__init__"][1]


def rooms_imported_in(package: str) -> dict[str, set[str]]:
    """Which of a package's modules and subpackages import which others, with all that is in them."""
    depth, rooms = package.count(".") + 2, dict[str, set[str]]()
    for name in (each for each in MODULES if each.startswith(f"{package}.")):
        own = ".".join(name.split(".")[:depth])
        inside = (each for each in imported_by(name) if each.startswith(f"{package}."))
        others = {".".join(each.split(".")[:depth]) for each in inside}
        rooms.setdefault(own, set()).update(others - {own})
    return rooms


def test_packages_form_no_circle_at_any_level() -> None:
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    assert len(packages) > 15
    for package in packages:
        rooms = rooms_imported_in(package)
        order = list(graphlib.TopologicalSorter(rooms).static_order())  # raises where there is a circle
        assert rooms.keys() <= set(order)


def test_imports_form_no_circle() -> None:
    sorter = graphlib.TopologicalSorter({name: imported_by(name) for name in MODULES})
    assert len(list(sorter.static_order())) == len(MODULES)


def test_the_protocol_of_algorithms_imports_no_kernel() -> None:
    for name in ("thinwire.algorithms.base", "thinwire.algorithms.requests"):
        assert not [each for each in imported_by(name) if each.startswith("thinwire.kernels")]


DISTRIBUTED = re.compile(
    r"\bdist\.(\w*(reduce|broadcast|gather|scatter|all_to_all|barrier|send|recv|new_group|new_subgroups))\b"
    r"|notify_join_context"
)


def test_only_the_channel_issues_collectives_and_makes_groups() -> None:
    found = {room_of(name) for name, path in MODULES.items() if DISTRIBUTED.search(path.read_text())}
    assert found == {"channel"}


def test_algorithms_are_pure_tensor_code() -> None:
    for path in (SOURCE / "algorithms").rglob("*.py"):
        assert "distributed" not in path.read_text(), path


CORE = ["sync", "watch", "advice", "checkpoint.py"]
OF_ONE_ALGORITHM = re.compile(r"\b(factors?|matri\w*|rank)\b", re.I)
ALLOWED = re.compile(r"PowerSGD\(matrix_rank=\d+\)|process rank|\.rank\b|def rank|rank = 0\n")


def test_the_core_knows_no_algorithm() -> None:
    """But for its examples."""
    paths = [path for place in CORE for path in [SOURCE / place, *(SOURCE / place).rglob("*.py")]]
    for path in paths:
        if path.is_file():
            assert not OF_ONE_ALGORITHM.findall(ALLOWED.sub("", path.read_text())), path


# Frameworks take seconds to import, and elastic needs torchft: these are read, not imported.
PUBLIC = ["thinwire", *(f"thinwire.{name}" for name in thinwire.PUBLIC_MODULES)]
REFERENCE = [SOURCE.parents[1] / "docs" / page for page in ("api.md", "api-algorithms.md")]
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
    defined = {
        node.name
        for node in tree_of(name).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }
    assert defined <= set(exported)
    entries = re.findall(r"^::: (\S+)$", "".join(page.read_text() for page in REFERENCE), re.M)
    # With a module that the reference lists, by itself, or by its name at the top.
    listed = {each for entry in entries if entry in PUBLIC for each in listed_in(entry) or []}
    told = {each for each in exported if {f"{name}.{each}", f"thinwire.{each}"} & set(entries)} | listed
    assert set(exported) - {ELSEWHERE} - modules_of(name) <= told


def modules_of(name: str) -> set[str]:
    return {each.rpartition(".")[2] for each in MODULES if each.rpartition(".")[0] == name}


def test_nothing_else_says_that_it_is_public() -> None:
    """Only packages list what their modules may import from them."""
    inner = set(MODULES) - set(PUBLIC)
    listing = {name for name in inner if listed_in(name) is not None and MODULES[name].name != "__init__.py"}
    assert {name.rpartition(".")[0] for name in listing} == {"thinwire.ddp_comm_hooks"}  # torch's own modules


def test_the_public_names() -> None:
    assert set(thinwire.__all__) == {
        "advise", "attach", "auto", "check_replicas", "hooks", "join",
        "AllReduce", "Cast", "PowerSGD", "Quantize", "TopK",
        "DiLoCo", "GradientSync", "LocalSGD", "Nesterov", "Plan", "Stats", "Streaming", "Warmup", "Watch",
        "__version__",
        "AgreementError", "AttachError", "CheckpointError", "CommunicationError", "ConfigError",
        "GradientError", "LeftError", "MissingExtraError", "NonfiniteError", "StateError", "StepError",
        "ThinwireError",
    }  # fmt: skip


def test_the_package_shows_its_public_names_and_no_inner_rooms() -> None:
    shown = [name for name in dir(thinwire) if not name.startswith("_")]
    modules = {name for name in shown if isinstance(getattr(thinwire, name), ModuleType)}
    assert set(thinwire.__all__) - {"__version__"} <= set(shown)
    assert set(shown) == modules | set(thinwire.__all__) - {"__version__"}
    assert {"algorithms", "checkpoint", "elastic", "errors", "powersgd", "simulation", "testing"} <= modules
    reference = "".join(
        (SOURCE.parents[1] / "docs" / page).read_text() for page in ("api.md", "api-algorithms.md")
    )
    for name in modules:
        assert f"::: thinwire.{name}" in reference, name


def test_a_handle_shows_what_is_the_users_and_the_reference_tells_all_of_it() -> None:
    shown = [name for name in dir(thinwire.GradientSync) if not name.startswith("_")]
    assert shown == [
        "abandon", "algorithm", "detach", "distributed_state",
        "load_state_dict", "plan", "state_dict", "stats", "steps", "use",
    ]  # fmt: skip
    reference = (SOURCE.parents[1] / "docs" / "api.md").read_text()
    told = re.search(r"^::: thinwire.GradientSync\n    options:\n      members: \[(.*)\]", reference, re.M)
    assert told is not None
    assert told[1].split(", ") == shown


# In a forked process, which has imported torch and much more: all but torch is forgotten, strangers refused.
IMPORT = """
import importlib.abc, json, sys
standard = sys.stdlib_module_names | {"torch", "__main__", "__mp_main__"}
for name in [each for each in sys.modules if each.partition(".")[0] not in standard]:
    del sys.modules[name]
strangers = []

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in standard | {"thinwire"}:
            strangers.append(name)
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refusing())
import thinwire
thinwire.attach
found = {"strangers": list(strangers), "all": list(sys.modules)}
named = [thinwire.checkpoint.save, thinwire.powersgd.Config, hasattr(thinwire, "nothing")]
print(json.dumps({**found, "named": list(map(str, named))}))
"""


def test_importing_thinwire_imports_only_torch_and_itself(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text(IMPORT)
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["strangers"] == []
    assert "thinwire.sync.engine" in told["all"]
    later = (
        "thinwire.demo",
        "thinwire.cli",
        "thinwire.checkpoint",
        "thinwire.powersgd",
        "thinwire.integrations",
        "thinwire.advice",
        "thinwire.localsgd",
    )
    assert [name for name in told["all"] if name.startswith(later)] == []
    # What the docs name without an import is imported then.
    assert "function save" in told["named"][0]
    assert told["named"][-1] == "False"


def test_every_error_is_in_the_tree_and_in_its_picture() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.ThinwireError)
        assert name in (errors.__doc__ or "")


@cache
def documented_functions() -> list[tuple[str, ast.FunctionDef]]:
    """The public functions, methods and properties of the package, with where they stand."""
    found = []
    for name in MODULES:
        tree = tree_of(name)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
        owners: list[ast.Module | ast.ClassDef] = [tree, *classes]
        for owner in owners:
            prefix = f"{name}.{owner.name}" if isinstance(owner, ast.ClassDef) else name
            found += [
                (f"{prefix}.{node.name}", node)
                for node in owner.body
                if isinstance(node, ast.FunctionDef)
                and node.name[0] != "_"
                and not is_setter(node)
                and not is_command(name, node)
            ]
    return found


def is_setter(function: ast.FunctionDef) -> bool:
    """Whether it sets an attribute, whose docstring is that of its getter."""
    return any(ast.unparse(decorator).endswith(".setter") for decorator in function.decorator_list)


def is_command(module: str, function: ast.FunctionDef) -> bool:
    """Whether it is a subcommand: its docstring is its --help, its parameters' help stands with them."""
    return module == f"thinwire.cli.{function.name}"


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether it is a GPU's: its module says what all kernels' parameters are."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def repeats_an_interface(function: ast.FunctionDef) -> bool:
    """Whether its docstring is that of another, which says the rest: "As `Transport.mean`."""
    return (ast.get_docstring(function) or "").startswith("As `")


def is_attribute(function: ast.FunctionDef) -> bool:
    """Whether it is read like an attribute."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


@cache
def in_the_reference() -> set[str]:
    """The modules, classes and functions that the pages of the reference list, by where they are defined."""
    places = set()
    for page in ("api.md", "api-algorithms.md"):
        for name in re.findall(r"^::: (\S+)$", (SOURCE.parents[1] / "docs" / page).read_text(), re.M):
            if name.startswith("thinwire.integrations."):  # to import the frameworks takes seconds
                places.add(name)
                continue
            listed = pkgutil.resolve_name(name)
            members = [getattr(listed, each) for each in getattr(listed, "__all__", ())]
            places |= {
                f"{each.__module__}.{each.__qualname__}" for each in (listed, *members) if callable(each)
            }
    return places


def users_call(place: str) -> bool:
    owner = place.rpartition(".")[0]
    return not in_the_reference().isdisjoint((place, owner, owner.rpartition(".")[0]))


def test_functions_of_several_parameters_that_users_call_say_what_each_is() -> None:
    checked = 0
    for place, function in documented_functions():
        if not users_call(place):
            continue
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names = [each.arg for each in named if each.arg not in ("self", "cls") and each.arg[0] != "_"]
        if len(names) < 2 or repeats_an_interface(function) or is_kernel(function):
            continue
        checked += 1
        described = re.split(r"^Args:$", ast.get_docstring(function) or "", maxsplit=1, flags=re.M)[1:]
        assert described, f"{place} has no Args"
        missing = [each for each in names if not re.search(rf"^    {each}: ", described[0], re.M)]
        assert not missing, f"{place} does not describe {missing}"
    assert checked > 25


def test_functions_that_users_call_say_what_they_raise() -> None:
    """But for errors that only a mistake of ours brings about."""
    checked = 0
    for place, function in documented_functions():
        raised = {
            node.exc.func.id if isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name) else ""
            for node in ast.walk(function)
            if isinstance(node, ast.Raise) and node.exc is not None
        } - {"AssertionError", "NotImplementedError"}
        if raised and users_call(place) and not repeats_an_interface(function):
            checked += 1
            assert "\nRaises:\n" in (ast.get_docstring(function) or ""), f"{place} has no Raises"
    assert checked > 10


NO_VERBS = {
    "A", "All", "An", "By", "Everything", "For", "How", "If", "In", "Its", "Like", "Nothing", "Of", "One",
    "So", "Some", "That", "The", "This", "Those", "What", "When", "Where", "Whether", "Which",
}  # fmt: skip


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    for place, function in documented_functions():
        words = (ast.get_docstring(function) or "").split()
        assert words, f"{place} has no docstring"
        assert is_attribute(function) or words[0] not in NO_VERBS, f"{place} begins with {words[0]!r}"
