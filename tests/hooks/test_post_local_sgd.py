"""torch's post-local SGD hook with our core, and what averaging less often breaks in torch (FACTS 15)."""

from __future__ import annotations

import copy
import inspect
import logging
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as stock
from torch.nn.parallel import DistributedDataParallel

from pool import Pool
from thinwire import LocalSGD, ThinwireError, Warmup, hooks
from thinwire.channel import ProcessGroupTransport
from training import (
    agreed,
    batch_of,
    error_of,
    flat,
    gathered,
    halves,
    new_model,
    new_optimizer,
    pairs,
    train,
)


def new_ddp_model() -> DistributedDataParallel:
    return DistributedDataParallel(new_model(), bucket_cap_mb=0.005)


def test_the_state_and_the_hook_have_torchs_parameters_and_defaults() -> None:
    theirs = inspect.signature(stock.PostLocalSGDState).parameters
    ours = inspect.signature(hooks.PostLocalSGDState).parameters
    added = {"on_nonfinite": "nan"}
    assert list(ours) == [*theirs, *added]
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()} | added
    assert ours["on_nonfinite"].kind == inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(hooks.post_localSGD_hook).parameters) == ["state", "bucket"]


@pytest.mark.parametrize("local_gradients", [True, False])
def test_gradients_are_torchs_own(pool4: Pool, local_gradients: bool) -> None:
    """Global, then of the pair or alone; several buckets; the same counter."""
    for world_size, equal, iters, seen in pool4.run(_as_torchs, local_gradients):
        assert world_size == 4
        assert equal
        assert iters == [(1, 1), (2, 2), (3, 3), (3, 3), (3, 3)]
        assert seen == [(True, True)] * 3 + [(local_gradients, False)] * 2


def _as_torchs(local_gradients: bool) -> tuple[int, bool, list[tuple[int, int]], list[tuple[bool, bool]]]:
    subgroup = pairs()
    theirs, ours = new_ddp_model(), new_ddp_model()
    their_state = stock.PostLocalSGDState(None, subgroup, 3, local_gradients)  # type: ignore[no-untyped-call]
    our_state = hooks.PostLocalSGDState(None, subgroup, 3, local_gradients)
    theirs.register_comm_hook(their_state, stock.post_localSGD_hook)
    ours.register_comm_hook(our_state, hooks.post_localSGD_hook)
    optimizers = [new_optimizer(theirs), new_optimizer(ours)]
    equal, iters, seen = True, [], []
    for step in range(5):
        train(theirs, optimizers[0], range(step, step + 1))
        train(ours, optimizers[1], range(step, step + 1))
        equal &= torch.equal(flat(theirs), flat(ours))
        iters.append((their_state.iter, our_state.iter))
        seen.append(halves(ours))
    return dist.get_world_size(), equal, iters, seen


def test_a_process_group_of_some(pool4: Pool) -> None:
    for size, seen in pool4.run(_of_some):
        assert size == 2
        assert seen == (True, False)


def _of_some() -> tuple[int, tuple[bool, bool]]:
    group = pairs()
    model = DistributedDataParallel(new_model(), process_group=group)
    state = hooks.PostLocalSGDState(group, None, 10, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, hooks.post_localSGD_hook)
    train(model, new_optimizer(model), range(3))
    return group.size(), halves(model)


def test_a_copied_model_averages_again(pool2: Pool) -> None:
    assert pool2.run(_copied) == [(3, 0, False, True)] * 2


def _copied() -> tuple[int, int, bool, bool]:
    model = DistributedDataParallel(new_model())
    state = hooks.PostLocalSGDState(None, None, 3, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, hooks.post_localSGD_hook)
    train(model, new_optimizer(model), range(3))
    copied, copied_state = copy.deepcopy((model, state))
    for each in (model, copied):
        train(each, new_optimizer(each), range(3, 4))
    return state.iter, copied_state.iter, agreed(model), agreed(copied)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_localSGD_iter": -1}, "ConfigError: start_localSGD_iter must be a whole number"),
        ({"start_localSGD_iter": 1.5}, "ConfigError: start_localSGD_iter must be a whole number"),
        ({"post_local_gradient_allreduce": 2}, "ConfigError: post_local_gradient_allreduce must be True"),
        ({"subgroup": 3}, "AttachError: subgroup must be a torch.distributed process group or None, got 3"),
        ({"process_group": "all"}, "AttachError: process_group must be a torch.distributed process group"),
        ({"subgroup": "foreign"}, "AttachError: this process is not a member"),
    ],
    ids=str,
)
def test_mistakes_raise_at_once(pool2: Pool, settings: dict[str, Any], message: str) -> None:
    assert all(each.startswith(message) for each in pool2.run(_mistake, settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start_localSGD_iter", "3"),
        ("post_local_gradient_allreduce", 2),
        ("iter", -1),
        ("subgroup", 3),
        ("on_nonfinite", "raise"),
        ("start_local_iter", 3),
    ],
)
def test_what_is_set_later_is_checked_as_well(name: str, value: Any) -> None:
    state = hooks.PostLocalSGDState(None, None, 4)
    before = dict(vars(state))
    with pytest.raises(ThinwireError, match=name) as caught:
        setattr(state, name, value)
    assert name == "start_local_iter" or str(value) in str(caught.value)
    assert vars(state) == before
    state.iter = 2.0  # type: ignore[assignment]
    assert type(state.iter) is int


def _mistake(settings: dict[str, Any]) -> str:
    if settings.get("subgroup") == "foreign":
        groups = [dist.new_group([process_rank]) for process_rank in range(2)]
        settings = settings | {"subgroup": groups[1 - dist.get_rank()]}
    arguments = {"process_group": None, "subgroup": dist.group.WORLD, "start_localSGD_iter": 3, **settings}
    return error_of(lambda: hooks.PostLocalSGDState(**arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with an accelerator the machine's processes are known")
def test_without_a_subgroup_local_steps_need_the_launchers_word(pool4: Pool) -> None:
    """The warm-up does not; the first step warns."""
    for iters, refused, warnings_seen, seen in pool4.run(_no_subgroup):
        assert iters == [3, 3]
        assert refused.startswith("ConfigError: local SGD starts")
        assert "pass subgroup=" in refused
        assert len(warnings_seen) == 1
        assert warnings_seen[0].startswith("step 3 will fail: ")
        assert seen == (True, False)


def _no_subgroup() -> tuple[list[int], str, list[str], tuple[bool, bool]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thinwire.hooks.post_local_sgd")
    logger.addHandler(handler)
    models, states = [new_ddp_model() for _ in range(2)], []
    for model, told in zip(models, ({}, {"LOCAL_WORLD_SIZE": "2"}), strict=True):
        states.append(hooks.PostLocalSGDState(None, None, 3))
        model.register_comm_hook(states[-1], hooks.post_localSGD_hook)
        with patch.dict(os.environ, told):
            train(model, new_optimizer(model), range(3))
    refused = error_of(lambda: train(models[0], new_optimizer(models[0]), range(3, 4)))
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        train(models[1], new_optimizer(models[1]), range(3, 5))
    logger.removeHandler(handler)
    return [state.iter for state in states], refused, lines, halves(models[1])


def test_a_state_can_be_made_before_any_group_exists() -> None:
    assert not dist.is_initialized()
    assert hooks.PostLocalSGDState(None, None, 3).subgroup is None


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_its_messages_in_16_bits(pool4: Pool, wire: str) -> None:
    for gaps, seen, types in pool4.run(_in_16_bits, wire):
        assert seen == (True, False)
        assert types == {torch.float16 if wire == "fp16" else torch.bfloat16}
        assert all(0 < gap < 0.02 for gap in gaps)


def _in_16_bits(wire: str) -> tuple[list[float], tuple[bool, bool], set[torch.dtype]]:
    subgroup = pairs()
    wrapper = hooks.fp16_compress_wrapper if wire == "fp16" else hooks.bf16_compress_wrapper
    whole, small = new_ddp_model(), new_ddp_model()
    whole.register_comm_hook(hooks.PostLocalSGDState(None, subgroup, 2), hooks.post_localSGD_hook)
    small.register_comm_hook(hooks.PostLocalSGDState(None, subgroup, 2), wrapper(hooks.post_localSGD_hook))
    optimizers, gaps, types = [new_optimizer(whole), new_optimizer(small)], [], set()
    mean = ProcessGroupTransport.mean

    def looked_at(transport: ProcessGroupTransport, message: Tensor, purpose: str) -> Any:
        types.add(message.dtype)
        return mean(transport, message, purpose)

    for step in range(4):
        train(whole, optimizers[0], range(step, step + 1))
        with patch.object(ProcessGroupTransport, "mean", looked_at):
            train(small, optimizers[1], range(step, step + 1))
        gaps.append(((flat(whole) - flat(small)).norm() / flat(whole).norm()).item())
    return gaps, halves(small), types


# FACTS 15


def test_facts_15_one_counter(pool2: Pool) -> None:
    """torch has two, of gradients and of models, which must agree by hand."""
    for apart in pool2.run(_one_counter):
        assert apart == [False, False, True, False, True, False, True, False]
    names = inspect.signature(LocalSGD).parameters
    of_warmup = [name for name in names if "warm" in name or "start" in name]
    assert of_warmup == ["warmup"]  # a number, and how gradients travel


def _one_counter() -> list[bool]:
    model = new_ddp_model()
    optimizer = new_optimizer(model)
    apart = []
    with LocalSGD(model, optimizer, every_steps=2, warmup=Warmup(2)):
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            apart.append(not agreed(model))
    return apart


def test_facts_15_a_skipped_step_is_counted(pool2: Pool) -> None:
    """By torch it is not: one process is a step behind for good."""
    assert pool2.run(_skipped_step) == [[False, True] * 2 + [False]] * 2


def _skipped_step() -> list[bool]:
    model = new_model()
    optimizer, scaler = new_optimizer(model), GradScaler("cpu", init_scale=2.0**8)
    equal = []
    with LocalSGD(model, optimizer, every_steps=2, grad_scaler=scaler):
        for step in range(5):
            _overflowing_step(model, optimizer, scaler, step)
            equal.append(agreed(model))
    return equal


def _overflowing_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, step: int
) -> None:
    optimizer.zero_grad()
    factor = torch.inf if step == 2 and dist.get_rank() == 0 else 1.0
    torch.autograd.backward(scaler.scale(model(batch_of(step)).square().mean()) * factor)
    scaler.step(optimizer)
    scaler.update()


def test_facts_15_averaging_after_zero_grad(pool2: Pool) -> None:
    """torch leaves parameters without a gradient out, and with none left it fails."""
    assert pool2.run(_after_zero_grad) == [True] * 2


def _after_zero_grad() -> bool:
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=100) as local:
        train(model, optimizer, range(2))
        optimizer.zero_grad(set_to_none=True)
        assert not agreed(model)
        local.average()
        return agreed(model)


def test_facts_15_a_parameter_without_a_gradient_is_averaged(pool2: Pool) -> None:
    """torch leaves it out, though earlier steps have moved it on each process."""
    assert pool2.run(_without_gradient) == [True] * 2


def _without_gradient() -> bool:
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=100) as local:
        train(model, optimizer, range(2))
        next(model.parameters()).grad = None
        assert not agreed(model)
        local.average()
        return agreed(model)


def test_facts_15_storage_stays_where_it_is(pool2: Pool) -> None:
    """With torch, every parameter becomes a view of one new tensor, and others keep the old."""
    for moved, view_follows in pool2.run(_storage):
        assert not any(moved)
        assert view_follows


def _storage() -> tuple[list[bool], bool]:
    model = new_model()
    optimizer = new_optimizer(model)
    before = [p.data_ptr() for p in model.parameters()]
    held = next(model.parameters()).detach()
    with LocalSGD(model, optimizer, every_steps=2):
        train(model, optimizer, range(2))
        moved = [old != p.data_ptr() for old, p in zip(before, model.parameters(), strict=True)]
        everyone: Tensor = gathered(held)
        return moved, torch.equal(everyone[0], everyone[1])
