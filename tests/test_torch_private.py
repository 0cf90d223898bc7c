"""Torch's private API is used in one module alone, whose functions the tests of what calls them try."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from thinwire import torch_private

SOURCE = Path(thinwire.__file__).parent


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_an_optimizer_in_the_backward_pass() -> None:
    """Other tests set the attribute that this leaves."""
    apply = import_module("torch.distributed.optim")._apply_optimizer_in_backward  # it takes long

    module = nn.Linear(2, 2)
    assert not torch_private.has_optimizer_in_backward(module.weight)
    apply(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    assert torch_private.has_optimizer_in_backward(module.weight)


# Private names of other libraries, and of subclasses, by what they belong to.
OTHERS = {
    "integrations/accelerate.py": {"_custom_objects"},
    "integrations/lightning.py": {
        "_ddp_comm_hook",
        "_ddp_comm_state",
        "_ddp_comm_wrapper",
        "_enable_model_averaging",
        "_model_averager",
    },
    "local_sgd/groups/torchft_client.py": {"_quorum_id"},
    "local_sgd/groups/torchft_group.py": {"_client", "_quorum_future", "_quorum_id"},
    "demo/train.py": {"_exit"},
}
OF_NAMED_TUPLES = {"_asdict", "_fields", "_replace"}


def test_no_other_module_uses_torchs_private_api() -> None:
    ours, used = set(OF_NAMED_TUPLES), set[tuple[str, str]]()
    for file in SOURCE.rglob("*.py"):
        path = file.relative_to(SOURCE).as_posix()
        is_looked_at = path != "torch_private.py" and not path.startswith("kernels/")  # of Numba and Triton
        for node in ast.walk(ast.parse(file.read_text())):
            ours.update(_names_made(node))
            if is_looked_at:
                used.update((path, name) for name in _private_names_in(node))
    foreign = {(path, name) for path, name in used if name not in ours | OTHERS.get(path, set())}
    assert {(path, name) for path, name in foreign if not name.startswith("_foreach_")} == set()


def _names_made(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr if isinstance(node.value, ast.Name) and node.value.id == "self" else ""


def _private_names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        name = node.attr
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        name = ast.unparse(node.args[1]).strip("'\"")
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
        yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        name = node.module.rpartition(".")[2] if node.module != "torch._C._distributed_c10d" else ""
    else:
        return
    if name.startswith("_") and not name.startswith("__"):
        yield name
