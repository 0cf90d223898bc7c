"""That nothing else uses torch's private API; and what of it no other test would find wrong."""

from __future__ import annotations

import ast
import re
from importlib import import_module, reload
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from test_structure import MODULES, SOURCE, tree_of
from thinwire import torch_private
from thinwire.comm import ProcessGroupTransport
from thinwire.hooks import allreduce_hook, noop_hook


def test_what_is_known_of_modules_storages_and_half_constructed_ddp_models() -> None:
    module = nn.Linear(2, 2)
    compiled: Any = torch.compile(module, backend="eager")
    assert torch_private.uncompiled(compiled) is torch_private.uncompiled(module) is module
    tensor, *others = torch.ones(4), torch.empty(0), torch.empty(0)
    assert torch_private.storage_key(tensor[:2]) == torch_private.storage_key(tensor[2:])
    assert len(set(map(torch_private.storage_key, (tensor, *others)))) == 3
    assert torch_private.ddp_parameters(DistributedDataParallel.__new__(DistributedDataParallel)) == []


def test_a_refused_hook_leaves_the_one_before_and_a_group_ends_with_its_threads() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 4))
        model.register_comm_hook("first", noop_hook)
        with pytest.raises(RuntimeError):
            model.register_comm_hook("second", allreduce_hook)
        torch_private.forget_refused_hook(model, "noop_hook")
        assert [state for _, state in torch_private.comm_hooks(model)] == ["first"]
        assert torch_private.ddp_logging_data(model)["comm_hook"] == "noop_hook"
        functional = reload(import_module("torch.distributed.nn.functional"))
        assert functional.gather.__defaults__ == (0, dist.group.WORLD)  # would keep it until Python ends
        ProcessGroupTransport()
        assert functional.gather.__defaults__ == (0, None)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_an_optimizer_in_the_backward_pass() -> None:
    apply = import_module("torch.distributed.optim")._apply_optimizer_in_backward  # it takes long

    module = nn.Linear(2, 2)
    assert not torch_private.has_optimizer_in_backward(module.weight)
    apply(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    assert torch_private.has_optimizer_in_backward(module.weight)


# Private names of other libraries, and of subclasses, by what they belong to.
OTHERS = {
    "adapters/ddp_model.py": {"_dynamo", "_is_accelerate_prepared"},  # named in an error; read
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
    "preload/startup.py": {"_exit"},
}
OF_NAMED_TUPLES = {"_asdict", "_fields", "_replace"}


# As an attribute, as text, and imported; but for a module that has only public names.
USED = re.compile(r"(?:[\w)\]]\.|(?:get|has)attr\(.+?, \"|from torch\b.* import )(_[A-Za-z]\w*)\b")
PUBLIC = "torch._C._distributed_c10d"


def test_no_other_module_uses_torchs_private_api() -> None:
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in MODULES.values()}
    ours = OF_NAMED_TUPLES.union(*map(_names_made, map(tree_of, MODULES)))
    foreign = {
        (path, name)
        for path, text in texts.items()
        if path != "torch_private.py" and not path.startswith("kernels/")  # of Numba and Triton
        for name in set(USED.findall(text.replace(PUBLIC, ""))) - ours - OTHERS.get(path, set())
        if not name.startswith("_foreach_")
    }
    assert foreign == set()


def _names_made(tree: ast.Module) -> set[str]:
    """Return the names of functions and classes, and of what is assigned, to `self` as well."""
    made = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                made.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                made.add(name)
    return made
