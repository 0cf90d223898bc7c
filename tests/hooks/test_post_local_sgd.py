"""torch's post-local SGD hook with our core, and what averaging less often breaks in torch (FACTS 15)."""

from __future__ import annotations

import inspect
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as stock
from torch.nn.parallel import DistributedDataParallel

from processes import in_each_process
from thinwire import AttachError, ConfigError, LocalSGD, hooks
from thinwire.torch_private import timeout_of
from training import agreed, ddp_of, flat, halves, new_model, new_optimizer, pairs, train


def test_the_state_and_the_hook_have_torchs_parameters_and_defaults() -> None:
    theirs = inspect.signature(stock.PostLocalSGDState).parameters
    ours = inspect.signature(hooks.PostLocalSGDState).parameters
    added = {"on_nonfinite": "nan"}
    assert list(ours) == [*theirs, *added]
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()} | added
    assert ours["on_nonfinite"].kind == inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(hooks.post_localSGD_hook).parameters) == ["state", "bucket"]


def with_state(
    state: hooks.PostLocalSGDState, hook: hooks.Hook = hooks.post_localSGD_hook
) -> DistributedDataParallel:
    model = ddp_of()
    model.register_comm_hook(state, hook)
    return model


@pytest.mark.parametrize("local_gradients", [True, False])
@in_each_process(4)
def test_gradients_are_torchs_own(local_gradients: bool) -> None:
    """Global, then of the pair or alone; several buckets; the same counter."""
    subgroup = pairs()
    their_state = stock.PostLocalSGDState(None, subgroup, 3, local_gradients)  # type: ignore[no-untyped-call]
    our_state = hooks.PostLocalSGDState(None, subgroup, 3, local_gradients)
    theirs, ours = ddp_of(), with_state(our_state)
    theirs.register_comm_hook(their_state, stock.post_localSGD_hook)
    optimizers = [new_optimizer(theirs), new_optimizer(ours)]
    for step in range(5):
        train(theirs, optimizers[0], range(step, step + 1))
        train(ours, optimizers[1], range(step, step + 1))
        assert torch.equal(flat(theirs), flat(ours))
        assert their_state.iter == our_state.iter == min(step + 1, 3)
        assert halves(ours) == ((True, True) if step < 3 else (local_gradients, False))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    *(({"start_localSGD_iter": wrong}, "start_localSGD_iter must be a whole number") for wrong in (-1, 1.5)),
    ({"post_local_gradient_allreduce": 2}, "post_local_gradient_allreduce must be True"),
    ({"subgroup": 3}, "subgroup must be a torch.distributed process group or None, got 3"),
    ({"process_group": "all"}, "process_group must be a torch.distributed process group"),
]


@in_each_process(2)
def test_mistakes_raise_at_once() -> None:
    groups = [dist.new_group([process_rank]) for process_rank in range(2)]
    foreign = ({"subgroup": groups[1 - dist.get_rank()]}, "this process is not a member")
    for settings, message in (*MISTAKES, foreign):
        given = {"process_group": None, "subgroup": dist.group.WORLD, "start_localSGD_iter": 3, **settings}
        with pytest.raises((ConfigError, AttachError), match=f"^{message}"):
            hooks.PostLocalSGDState(**given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with an accelerator the machine's processes are known")
@in_each_process(4)
def test_without_a_subgroup_local_steps_need_the_launchers_word() -> None:
    """The warm-up does not; the first step warns."""
    states = [hooks.PostLocalSGDState(None, None, 3) for _ in range(2)]
    models = [with_state(state) for state in states]
    with patch("thinwire.hooks.post_local_sgd.logger.warning") as warned:
        train(models[0], new_optimizer(models[0]), range(3))
        with pytest.raises(ConfigError, match=r"^local SGD can't start.*pass subgroup="):
            train(models[0], new_optimizer(models[0]), range(3, 4))
        with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
            train(models[1], new_optimizer(models[1]), range(5))
    assert [state.iter for state in states] == [3, 3]
    assert [call.args[0] for call in warned.call_args_list] == ["step %d will fail: %s"]
    assert halves(models[1]) == (True, False)
    assert len({timeout_of(g, torch.device("cpu")) for g in (states[1].subgroup, dist.group.WORLD) if g}) < 2


@in_each_process(4)
def test_its_messages_in_16_bits() -> None:
    subgroup = pairs()
    whole = with_state(hooks.PostLocalSGDState(None, subgroup, 2))
    hook = hooks.bf16_compress_wrapper(hooks.post_localSGD_hook)
    small = with_state(hooks.PostLocalSGDState(None, subgroup, 2), hook)
    optimizers = [new_optimizer(whole), new_optimizer(small)]
    for step in range(4):
        train(whole, optimizers[0], range(step, step + 1))
        train(small, optimizers[1], range(step, step + 1))
        assert 0 < (flat(whole) - flat(small)).norm() < 0.02 * flat(whole).norm()
    assert halves(small) == (True, False)


@in_each_process(2)
def test_a_process_alone_in_its_subgroup_is_no_mistake() -> None:
    alone = [dist.new_group([process_rank]) for process_rank in range(2)][dist.get_rank()]
    model = with_state(hooks.PostLocalSGDState(None, alone, 1, on_nonfinite="zero"))
    with patch("thinwire.adapters.setup.logger") as logger:
        train(model, new_optimizer(model), range(3))
    assert not logger.method_calls


@in_each_process(2)
def test_facts_15_parameters_without_a_gradient_are_averaged() -> None:
    """torch leaves them out, though earlier steps have moved them; with none left it fails."""
    model = new_model()
    optimizer = new_optimizer(model)
    with LocalSGD(model, optimizer, every_steps=100) as local:
        for count in (1, None):
            train(model, optimizer, range(2))
            for parameter in list(model.parameters())[:count]:
                parameter.grad = None
            assert not agreed(model)
            local.average()
            assert agreed(model)
