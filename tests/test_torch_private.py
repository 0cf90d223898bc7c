"""That nothing else uses torch's private API; and uses of it that no other test would find wrong."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.amp.grad_scaler import GradScaler
from torch.autograd.profiler import profile
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import torch_private
from thinwire.hooks import noop_hook

SOURCE = Path(thinwire.__file__).parent


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        yield
    finally:
        dist.destroy_process_group()


def new_ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def foreign_hook(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# Autograd.


def test_a_backward_pass_has_a_number_a_running_node_and_an_end() -> None:
    seen: list[Any] = []
    weight = torch.ones(3, requires_grad=True)

    def note(gradient: Tensor) -> None:
        queue = torch_private.at_end_of_backward
        seen.append((torch_private.backward_pass(), torch_private.running_node() is not None))
        queue(lambda: queue(lambda: seen.append("behind the others")))
        queue(lambda: seen.append(torch_private.running_node()))

    weight.register_hook(note)  # type: ignore[no-untyped-call]
    for _ in range(2):
        weight.sum().backward()  # type: ignore[no-untyped-call]
    (first, is_running), end, last, (second, _), *_ = seen
    assert last == "behind the others"
    assert first != second
    assert -1 not in (first, second)
    assert is_running
    assert end is None
    assert torch_private.backward_pass() == -1
    assert torch_private.running_node() is None


def test_a_function_that_is_not_compiled_and_a_profiler_that_is_on() -> None:
    seen = []

    @torch_private.not_compiled
    def look(tensor: Tensor) -> Tensor:
        seen.append((torch.compiler.is_compiling(), torch_private.is_profiling()))
        return tensor

    compiled = torch.compile(lambda tensor: look(tensor) + 1, backend="eager")
    compiled(torch.ones(2))
    with profile():
        look(torch.ones(2))
    assert seen == [(False, False), (False, True)]


# Modules, tensors and optimizers.


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_a_module_holds_and_whether_it_is_compiled() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert torch_private.non_persistent_buffers(module) == {"scratch"}
    children, parameters = torch_private.children_and_parameters(module)
    module.child = nn.Linear(2, 2)
    assert (list(children), list(parameters)) == (["child"], ["weight", "bias"])  # they change with it
    other = nn.Parameter(torch.ones(2, 2))
    torch_private.put_parameters(module, {**parameters, "weight": other})
    assert module.weight is other
    assert not torch_private.is_compiled(module)
    compiled: Any = torch.compile(module, backend="eager")
    assert torch_private.is_compiled(compiled)
    assert torch_private.uncompiled(compiled) is torch_private.uncompiled(module) is module
    module.compile(backend="eager")
    assert torch_private.is_compiled(module)


def test_a_step_may_be_replaced_without_a_schedulers_warning() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert torch_private.takes_step_hooks(optimizer)
    assert not torch_private.takes_step_hooks(torch.optim.SGD.__new__(torch.optim.SGD))
    assert not torch_private.has_step_hooks(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = torch_private.counted_step(torch_private.note_step)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.step()
    schedule.step()  # warnings are errors
    optimizer.register_step_post_hook(lambda *_: None)
    assert torch_private.has_step_hooks(optimizer)


class Refusal:
    """A hook that lets no one pass."""

    def __call__(self, *_: object) -> None:
        raise AssertionError("called")


def test_hooks_of_a_class_are_removed_from_a_copy_too() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(Refusal())
    calls: list[object] = []
    module.register_forward_pre_hook(lambda *_: calls.append(_))
    copied = copy.deepcopy(module)
    for each in (module, copied):
        torch_private.remove_forward_pre_hooks(each, Refusal)
        each(torch.ones(1, 2))
    assert len(calls) == 2


def test_what_belongs_to_a_tensor() -> None:
    assert torch_private.tree_map(lambda leaf: leaf + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}
    tensor, empty = torch.ones(4), torch.empty(0)
    before = torch_private.version_of(tensor)
    tensor[:2].add_(1)
    assert torch_private.version_of(tensor) == before + 1
    assert torch_private.version_of(None) == -1
    assert torch_private.storage_key(tensor[:2]) == torch_private.storage_key(tensor[2:])
    assert torch_private.storage_key(empty) not in map(torch_private.storage_key, (tensor, torch.empty(0)))
    weight = torch.ones(3, requires_grad=True)
    hook = weight.register_post_accumulate_grad_hook(print)  # type: ignore[no-untyped-call]
    assert list(torch_private.post_accumulate_hooks(weight)) == [print]
    hook.remove()
    assert not list(torch_private.post_accumulate_hooks(weight))


def test_stages_of_a_scaler() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    scaler = GradScaler("cpu")
    assert not torch_private.scales_now(scaler)
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch_private.scales_now(scaler)
    assert not torch_private.was_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert not torch_private.scales_now(scaler)
    assert torch_private.was_unscaled(scaler, optimizer)
    assert not torch_private.scales_now(GradScaler("cpu", enabled=False))


@pytest.mark.skipif(torch_private.fp32_precision is None, reason="torch before 2.9")
def test_precision_of_products() -> None:
    assert torch_private.fp32_precision is not None
    assert torch_private.set_fp32_precision is not None
    before = torch_private.fp32_precision("mkldnn", "matmul")
    torch_private.set_fp32_precision("mkldnn", "matmul", "ieee")
    try:
        assert torch_private.fp32_precision("mkldnn", "matmul") == "ieee"
    finally:
        torch_private.set_fp32_precision("mkldnn", "matmul", before)


# DDP.


@pytest.mark.usefixtures("alone")
def test_parameters_and_options_of_ddp() -> None:
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(False)
    model = DistributedDataParallel(module)
    assert list(map(id, torch_private.ddp_parameters(model))) == list(map(id, module.parameters()))
    assert torch_private.ddp_parameters(DistributedDataParallel.__new__(DistributedDataParallel)) == []
    assert not torch_private.has_python_reducer(model)
    assert torch_private.ddp_logging_data(model)["dtypes"] == "float"


@pytest.mark.usefixtures("alone")
def test_the_hook_of_ddp() -> None:
    model = new_ddp()
    assert torch_private.ddp_logging_data(model).get("comm_hook", "") == ""
    model.register_comm_hook("state", foreign_hook)
    assert torch_private.ddp_logging_data(model)["comm_hook"] == "foreign_hook"
    with pytest.raises(RuntimeError):
        model.register_comm_hook("second", noop_hook)
    assert len(torch_private.comm_hooks(model)) == 2
    torch_private.forget_refused_hook(model, "foreign_hook")
    assert [(hook, state) for hook, state in torch_private.comm_hooks(model)] == [(foreign_hook, "state")]
    assert torch_private.ddp_logging_data(model)["comm_hook"] == "foreign_hook"
    model.register_forward_pre_hook(partial(print))
    state = model.__getstate__()  # type: ignore[no-untyped-call]
    torch_private.forget_hooks_in(state, "another")
    assert (state["_comm_hooks"], len(state["_forward_pre_hooks"])) == ([], 1)
    torch_private.forget_hooks_in(state, "functools")
    assert not state["_forward_pre_hooks"]
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_an_optimizer_in_the_backward_pass() -> None:
    apply = import_module("torch.distributed.optim")._apply_optimizer_in_backward  # it takes long

    module = nn.Linear(2, 2)
    assert not torch_private.has_optimizer_in_backward(module.weight)
    apply(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    assert torch_private.has_optimizer_in_backward(module.weight)


# That there are no others.

# Private names of other libraries, and of subclasses, by what they belong to.
OTHERS = {
    "adapters/ddp_model.py": {"_dynamo"},  # named in an error
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
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    ours = OF_NAMED_TUPLES.union(*(map(_names_made, map(ast.parse, texts.values()))))
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
    named = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef))
    assigned = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store))
    return {node.name for node in named} | {ast.unparse(node).removeprefix("self.") for node in assigned}
