"""A sharded run when something goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from adapters.test_sharded import backward, language, mesh_of, runs_on_cpus, sharded
from processes import Ended, Setting, in_each_process, run_fresh
from thinwire import CommunicationError, PowerSGD
from thinwire.adapters.attach import attach
from thinwire.algorithms.error_feedback import ERROR
from thinwire.sync import engine_of
from thinwire.testing import fail_at, faults

pytestmark = runs_on_cpus
POWER = PowerSGD(matrix_rank=2, min_compression_ratio=0.5)
LOST, AT = 3, 2  # the second shard of the second replica, in the third step


def remembered(sync: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine_of(sync).state.memory[ERROR].items()}


def test_all_shards_and_replicas_are_told_of_a_lost_one() -> None:
    """It dies between its messages. Who waits for it raises and ends, and so who waits for those."""
    ended = run_fresh(_until_lost, processes=4)
    assert ended[LOST] == Ended(None, -9)
    for process, end in enumerate(ended[:LOST]):
        world, kind, words, steps, is_as_before, owes = end.told
        assert world == 4
        assert kind == "CommunicationError", (process, kind, words)
        assert words.startswith(f"step {AT}, ")
        assert steps == AT
        assert is_as_before
        assert owes


def _until_lost(setting: Setting) -> tuple[int, str, str, int, bool, bool]:
    setting.join_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(language(), mesh["shard"])
    sync = attach(model, POWER, replicas=mesh["replicate"])
    schedule = [fail_at(1, AT, "kill", after_messages=2)] if setting.process_rank == LOST else []
    error: BaseException | None = None
    with faults(sync, schedule):
        for step in range(AT + 1):
            before = remembered(sync)
            try:
                backward(model, step)
            except CommunicationError as raised:
                error = raised
                break
    after = remembered(sync)
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in after)
    owes = any(bool(residual.any()) for residual in after.values())
    world = dist.get_world_size()
    return world, type(error).__name__, str(error), sync.steps, same, owes


@pytest.mark.parametrize("on_nonfinite", ["nan", "zero"])
@in_each_process(4)
def test_a_message_that_is_not_finite_is_one_step_lost_everywhere(on_nonfinite: Any) -> None:
    """It is of one shard of one replica: other shards receive nothing of it, and are told."""
    model = sharded(language(), mesh_of()["shard"])
    sync = attach(model, POWER, replicas=mesh_of(), on_nonfinite=on_nonfinite)
    schedule = [fail_at(1, AT, "non-finite")] if dist.get_rank() == LOST else []
    with faults(sync, schedule) as struck:
        for step in range(4):
            model.zero_grad()
            before = remembered(sync)
            backward(model, step)
            gradients = torch.cat(
                [p.grad.to_local().flatten() for p in model.parameters() if p.grad is not None]
            )
            if step == AT:
                after = remembered(sync)
                is_as_before = all(torch.equal(before[name], after[name]) for name in before)
                spoiled = bool((gradients.isnan() if on_nonfinite == "nan" else gradients == 0).all())
    assert len(struck) == len(schedule)
    is_on = bool(gradients.isfinite().all()) and bool(gradients.any() or not gradients.numel())
    assert (sync.steps, sync.stats().nonfinite_steps) == (4, 1)
    assert is_as_before
    assert spoiled
    assert is_on
