"""torch's package of hooks under our name: migrating is one prefix."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms import ddp_comm_hooks as stock

import thinwire
from hooks.test_hooks import new_model
from processes import in_each_process
from thinwire import ddp_comm_hooks, hooks
from training import gathered

MODULES = [
    "default_hooks",
    "powerSGD_hook",
    "post_localSGD_hook",
    "quantization_hooks",
    "debugging_hooks",
    "optimizer_overlap_hooks",
]


# Before a test imports them: the package's import is enough for `ddp_comm_hooks.default_hooks`.
IS_BROUGHT_ALONG = [hasattr(ddp_comm_hooks, name) for name in MODULES]


def module_of(package: Any, name: str) -> Any:
    return importlib.import_module(f"{package.__name__}.{name}")


@pytest.mark.parametrize("name", MODULES)
def test_the_modules_have_torchs_public_names_and_parameters(name: str) -> None:
    theirs, ours = module_of(stock, name), module_of(ddp_comm_hooks, name)
    own = [key for key, value in vars(theirs).items() if getattr(value, "__module__", "") == theirs.__name__]
    public = sorted(getattr(theirs, "__all__", [key for key in own if not key.startswith("_")]))
    assert ours.__all__ == public
    for key in public:
        assert getattr(ours, key) is getattr(hooks, key)
        expected = list(inspect.signature(getattr(theirs, key)).parameters)
        assert list(inspect.signature(getattr(ours, key)).parameters)[: len(expected)] == expected


def test_the_package_has_torchs_names_and_what_makes_no_sense_says_so() -> None:
    assert all(IS_BROUGHT_ALONG)
    assert sorted(ddp_comm_hooks.__all__) == sorted(stock.__all__)
    assert list(ddp_comm_hooks.DDPCommHookType.__members__) == list(stock.DDPCommHookType.__members__)
    theirs = inspect.signature(stock.register_ddp_comm_hook).parameters
    assert list(inspect.signature(ddp_comm_hooks.register_ddp_comm_hook).parameters) == list(theirs)
    module = module_of(ddp_comm_hooks, "optimizer_overlap_hooks")
    with pytest.raises(thinwire.ConfigError, match="would overlap nothing"):
        _ = module._hook_then_optimizer
    assert not hasattr(module, "no_such_name")


RANKS = {"POWER_SGD": 1, "POWER_SGD_RANK2": 2, "BATCHED_POWER_SGD": 1, "BATCHED_POWER_SGD_RANK2": 2}


@in_each_process(2)
def test_every_type_registers_its_hook() -> None:
    """Those that average leave one gradient on both processes, in buckets of their own."""
    assert len(ddp_comm_hooks.DDPCommHookType) == 10
    for kind in ddp_comm_hooks.DDPCommHookType:
        model = new_model()
        if kind.name in RANKS:
            kind.value(model=model, state=None, start_powerSGD_iter=0)
        else:
            ddp_comm_hooks.register_ddp_comm_hook(kind, model)
        model(torch.ones(2, 64) * (dist.get_rank() + 1)).square().sum().backward()
        mine = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert torch.equal(*gathered(mine)) == (kind.name != "NOOP")
        if kind.name in RANKS:
            state = cast(hooks.PowerSGDState, model._comm_hooks[0][1])
            assert state.matrix_approximation_rank == RANKS[kind.name]
            assert state.stats().compression_ratio > 4


@in_each_process(2)
def test_torchs_built_in_types_register_ours() -> None:
    for built_in, ours in (
        (BuiltinCommHookType.ALLREDUCE, hooks.allreduce_hook),
        (BuiltinCommHookType.FP16_COMPRESS, hooks.fp16_compress_hook),
    ):
        model = new_model()
        ddp_comm_hooks.register_ddp_comm_hook(built_in, model)
        assert model._comm_hooks[0][0] is ours
    with pytest.raises(thinwire.AttachError):
        ddp_comm_hooks.register_ddp_comm_hook(ddp_comm_hooks.DDPCommHookType.NOOP, model)


def test_mistakes_are_refused_at_once() -> None:
    for kind, words in (
        (stock.DDPCommHookType.NOOP, "thinwire.ddp_comm_hooks.DDPCommHookType"),
        (ddp_comm_hooks.DDPCommHookType.NOOP, "got Linear"),
    ):
        with pytest.raises(thinwire.ThinwireError, match=words):
            ddp_comm_hooks.register_ddp_comm_hook(kind, nn.Linear(2, 2))  # type: ignore[arg-type]
