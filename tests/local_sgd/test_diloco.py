"""`DiLoCo`: its defaults, and what users do around an inner optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from members import NESTEROV, Member, in_each_member, once
from thinwire import Nesterov
from thinwire.algorithms import AllReduce, Quantize, TopK
from thinwire.errors import StateError
from thinwire.local_sgd import DiLoCo
from training import batch_of, flat, new_model


def diloco(member: Member, **settings: Any) -> DiLoCo:
    return DiLoCo(member.model, member.optimizer, replicas=member.transport, **settings)


@pytest.mark.parametrize(
    ("size", "settings", "lr", "momentum"),
    [
        (1, {}, 0.4, 0.9),
        (4, {"every_steps": 10}, 0.6, 0.5),
        (4, {"pair": True}, 0.5, 0.9),
        (2, {"outer": Nesterov(lr=0.7, momentum=0)}, 0.7, 0.0),
        (8, {"algorithm": TopK()}, 0.5, 0.0),
    ],
    ids=str,
)
@in_each_member()
def test_the_outer_optimizer_fits_the_members_and_the_distance(
    member: Member, settings: dict[str, Any], lr: float, momentum: float
) -> None:
    own = {"subgroup": member.pair} if settings.get("pair") else settings
    with diloco(member, **own) as local:
        assert local.outer is not None
        group = local.outer.param_groups[0]
        assert (group["lr"], group["momentum"], group["nesterov"]) == (lr, momentum, momentum > 0)
        assert str(local).startswith("DiLoCo(every_steps=")


@in_each_member(2)
def test_changes_travel_in_four_bits_and_the_outer_state_lies_where_asked(member: Member) -> None:
    with diloco(member, every_steps=10, outer=Nesterov(device="cpu")) as local:
        member.train(20)
    assert local.sync.algorithm == Quantize(bits=4)
    assert local.stats().compression_ratio > 6 * 10
    assert local.outer is not None
    kept = [each["momentum_buffer"] for each in local.outer.state.values()]
    assert [each.device.type for each in kept] == ["cpu"] * 6
    assert member.agreed()


def losses(model: nn.Module, step: int, worker: int) -> list[Tensor]:
    """Of two parts of a batch; worker 0's overflows in step 5."""
    factor = torch.inf if (step, worker) == (5, 0) else 1.0
    return [model(batch_of(2 * step + part, worker).double()).square().mean() * factor / 2 for part in (0, 1)]


@in_each_member(2)
def test_with_all_that_a_loop_has(member: Member) -> None:
    """Clipping, accumulation, a scaler that skips, schedules inside and outside: as if written by hand."""
    member.take(new_model(dtype=torch.float64))
    model, member.optimizer = member.model, torch.optim.AdamW(member.model.parameters(), lr=1e-2)
    expected, start = _by_hand(2), flat(model)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    schedule = CosineAnnealingLR(member.optimizer, T_max=12)
    settings: dict[str, Any] = {"algorithm": AllReduce(), "outer": Nesterov(lr=0.8, momentum=0.9)}
    with diloco(member, every_steps=4, grad_scaler=scaler, **settings) as local:
        assert local.outer is not None
        outer_schedule = LinearLR(local.outer, start_factor=1.0, end_factor=0.5, total_iters=3)
        for step in range(12):
            member.optimizer.zero_grad()
            for loss in losses(model, step, member.rank):
                torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(member.optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(member.optimizer)
            scaler.update()
            schedule.step()
            if local.steps % 4 == 0:
                outer_schedule.step()
    assert (expected - start).norm() > 0.1
    assert (flat(model) - expected).norm() < 1e-11
    assert local.steps == 12
    assert member.agreed()


@once
def _by_hand(num_workers: int) -> Tensor:
    workers = [new_model(dtype=torch.float64) for _ in range(num_workers)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=1e-2) for worker in workers]
    schedules = [CosineAnnealingLR(optimizer, T_max=12) for optimizer in optimizers]
    theta, velocity = flat(workers[0]), torch.zeros(flat(workers[0]).shape, dtype=torch.float64)
    for step in range(12):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            optimizer.zero_grad()
            torch.autograd.backward(sum(losses(worker, step, rank), start=torch.zeros(())))
            if (step, rank) != (5, 0):
                nn.utils.clip_grad_norm_(worker.parameters(), 0.05)
                optimizer.step()
            else:
                optimizer.zero_grad()
                optimizer._opt_called = True  # type: ignore[attr-defined]
            schedules[rank].step()
        if step % 4 == 3:
            gradient = theta - torch.stack([flat(worker) for worker in workers]).mean(0)
            velocity = 0.9 * velocity + gradient
            theta = theta - 0.8 * (1 - 0.5 * (step // 4) / 3) * (gradient + 0.9 * velocity)
            for worker in workers:
                nn.utils.vector_to_parameters(theta.clone(), worker.parameters())
    return theta


@in_each_member(1)
def test_momentum_with_few_entries_is_warned_of_at_the_users_line(member: Member) -> None:
    words = "momentum, but TopK.* sends an entry only now and then.* leave momentum out"
    for outer in (Nesterov(momentum=0.9), NESTEROV, partial(torch.optim.Adam, lr=1e-3)):
        with pytest.warns(UserWarning, match=words) as caught, diloco(member, algorithm=TopK(), outer=outer):
            pass
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("saved", "loading", "lacks"),
    [
        (NESTEROV, torch.optim.Adam, "step"),  # torch's Adam itself looks for it
        (torch.optim.Adam, NESTEROV, ".*dampening, momentum"),
    ],
)
@in_each_member(1)
def test_the_state_of_another_kind_of_outer_optimizer_is_refused(
    member: Member, saved: Any, loading: Any, lacks: str
) -> None:
    with member.local(outer=saved) as local:
        member.train(1)
    other = member.local(outer=loading)
    other.load_state_dict(local.state_dict())
    with pytest.raises(StateError, match=f"a different outer optimizer: it has no {lacks}"):
        other.__enter__()
