"""The shape of the house: floors, public names, nothing at import."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import thinwire
from launcher import run_python
from thinwire import algorithms, channel, checkpoint, ddp_comm_hooks, errors, hooks, testing

SOURCE = Path(thinwire.__file__).parent

# From the bottom up; a module imports from its own floor or a lower one only.
FLOORS = [
    {"errors", "version", "end_signals", "interpreter", "lifeline"},
    {"plan", "checks", "checksum", "foreign"},
    {"algorithms", "channel"},
    {
        "exchange",
        "state",
        "told",
        "checkpoint",
        "stats",
        "loss_scale",
        "nonfinite",
        "unused",
        "contributors",
        "arithmetic",
        "clock",
        "factors",
        "missed",
        "all_gather",
    },
    {"engine"},
    {"sync"},
    {"ddp", "simulation", "step", "local_sgd", "post_local_sgd", "stateless_hooks", "join", "testing"},
    {"hooks", "powersgd"},
    {"ddp_comm_hooks"},
    {"integrations", "watch"},
    {"job", "local_job"},
    {"probe"},
    {"advice"},
    {"__init__"},
    {"lab", "report", "selftest"},
    {"demo"},
    {"cli"},
    {"__main__"},
]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms of thinwire that a file imports, anywhere in it."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "thinwire":
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            rooms |= {[*name, "__init__"][1] for name in names if name[0] == "thinwire"}
    known = set().union(*FLOORS)
    return {room if room in known else "__init__" for room in rooms}


def test_every_file_stands_on_a_floor_and_imports_only_downwards() -> None:
    floor_of = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 15
    for path in files:
        for room in imported_rooms(path):
            assert floor_of[room] <= floor_of[room_of(path)], f"{path.name} imports {room} from above it"


COLLECTIVES = re.compile(r"\bdist\.\w*(reduce|broadcast|gather|scatter|all_to_all|barrier|send|recv)")


def test_only_the_channel_issues_collectives() -> None:
    found = {room_of(path) for path in SOURCE.rglob("*.py") if COLLECTIVES.search(path.read_text())}
    assert found == {"channel"}


def test_algorithms_are_pure_tensor_code() -> None:
    for path in (SOURCE / "algorithms").glob("*.py"):
        assert "distributed" not in path.read_text(), path


PUBLIC = [thinwire, hooks, ddp_comm_hooks, errors, algorithms, channel, checkpoint, testing]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda m: m.__name__)
def test_all_names_what_is_public(module: object) -> None:
    source = Path(str(module.__file__))  # type: ignore[attr-defined]
    defined = {
        node.name
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }
    exported = set(module.__all__)  # type: ignore[attr-defined]
    assert defined <= exported
    assert all(hasattr(module, name) for name in exported)
    assert list(module.__all__) == sorted(module.__all__)  # type: ignore[attr-defined]


def test_the_public_names() -> None:
    assert set(thinwire.__all__) == {
        "Advice", "advise",
        "AllGatherGrad",
        "all_gather_grad",
        "AgreementError", "AllReduce", "AttachError", "BatchedPowerSGD", "Cast", "CheckpointError",
        "CommunicationError",
        "ConfigError",
        "GradientError", "GradientSync", "LocalSGD", "MissingExtraError", "NonfiniteError",
        "Plan", "PowerSGD", "StateError",
        "Stats", "StepError", "ThinwireError", "__version__", "attach", "hooks", "join",
        "JSONLWriter", "MetricsWriter", "TensorBoardWriter", "Watch", "read_run",
    }  # fmt: skip


def test_a_handle_shows_what_is_the_users_and_the_reference_tells_all_of_it() -> None:
    shown = [name for name in dir(thinwire.GradientSync) if not name.startswith("_")]
    assert shown == [
        "abandon", "algorithm", "load_state_dict", "plan", "state_dict", "stats", "steps", "use",
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
print(json.dumps({"strangers": strangers, "all": list(sys.modules)}))
"""


def test_importing_thinwire_imports_only_torch_and_itself(tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text(IMPORT)
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["strangers"] == []
    assert "thinwire.engine" in told["all"]
    assert [name for name in told["all"] if name.startswith(("thinwire.demo", "thinwire.cli"))] == []


def test_every_error_is_in_the_tree_and_in_its_picture() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.ThinwireError)
        assert name in (errors.__doc__ or "")
