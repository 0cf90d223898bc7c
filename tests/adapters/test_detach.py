"""`sync.detach()`: the model is as it was before, and may be attached again."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from processes import in_each_process
from thinwire import LocalSGD, PowerSGD, hooks
from training import ddp_of, error_of, gradient_of

POWER = PowerSGD(matrix_rank=2)


@in_each_process(2)
def test_a_detached_ddp_model_averages_exactly_and_is_attached_again() -> None:
    model, plain, straight = ddp_of(), ddp_of(), ddp_of()
    sync, other = thinwire.attach(model, POWER), thinwire.attach(straight, POWER)
    assert "sync.detach()" in error_of(lambda: thinwire.attach(model, POWER))
    assert (gradient_of(model, 0) - gradient_of(plain, 0)).norm() > 1e-3
    in_a_pass: list[str] = []
    model.module[0].weight.register_hook(lambda _: in_a_pass.append(error_of(sync.detach)))
    gradient_of(model, 1)
    assert "detach() was called during a backward pass" in in_a_pass[0]
    for step in range(2):
        gradient_of(straight, step)
    saved, _ = sync.state_dict(), other.state_dict()
    sync.detach()
    assert "nothing to detach" in error_of(sync.detach)
    assert "call attach(model, algorithm) again" in error_of(lambda: sync.use(POWER))
    assert (gradient_of(model, 2) - gradient_of(plain, 2)).norm() < 1e-6
    # A copy has no hook, as a copy of any DDP model; it may be trained.
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        gradient_of(copied, 2)
    assert sync.stats().steps == 2
    assert sync.stats().compression_ratio > 5
    # What is remembered goes along.
    again = thinwire.attach(model, POWER)
    again.load_state_dict(saved)
    assert torch.equal(gradient_of(model, 3), gradient_of(straight, 3))
    again.detach()
    # Whoever comes next takes the same hook: a LocalSGD, and after it attach.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(model, optimizer, every_steps=2, algorithm=POWER) as local:
        assert "already has a communication hook" in error_of(lambda: thinwire.attach(model, POWER))
        for step in range(2):
            gradient_of(model, step)
            optimizer.step()
    assert local.stats().compression_ratio > 2
    last = thinwire.attach(model, POWER)
    gradient_of(model, 5)
    assert last.stats().steps == 1


@in_each_process(2)
def test_a_model_is_detached_after_its_group_was_destroyed_and_a_hook_registered_by_hand_stays() -> None:
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(24, 8), process_group=group)
    sync = thinwire.attach(model, POWER)
    gradient_of(model, 0)
    dist.destroy_process_group(group)
    sync.detach()
    model, state = ddp_of(), hooks.PowerSGDState(None, start_powerSGD_iter=0)
    model.register_comm_hook(state, hooks.powerSGD_hook)
    gradient_of(model, 0)
    assert "nothing to detach" in error_of(state.sync.detach)
