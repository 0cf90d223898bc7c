"""An algorithm of a user's own goes everywhere that Thinwire's own go, though nothing of Thinwire knows it.

The conformance suite runs it with the others (catalog.py), and so do the tests of saved state, of steps that
are not finite and of `host_check`.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import members
import thinwire
from processes import in_each_process
from thinwire.algorithms import registry
from thinwire.probe import Probe, Timing
from thinwire.sync import engine_of
from toy import AroundTrend
from training import are_alike


def test_models_are_averaged_less_often_with_it() -> None:
    for agreed, sent_share in members.run(2, _averaged_less_often):
        assert agreed
        assert 0 < sent_share < 4 * 0.3  # four averagings in a quarter of the bytes


def _averaged_less_often(member: members.Member) -> tuple[bool, float]:
    with member.local(algorithm=AroundTrend()) as local:
        member.train(8)
    return member.agreed(), local.stats().message_bytes / local.sync.plan.gradient_bytes


@in_each_process(2)
def test_under_ddp_with_uneven_batches_it_is_advised_too() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))
    model = DistributedDataParallel(module, bucket_cap_mb=0.01)
    sync = thinwire.attach(model, AroundTrend())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with thinwire.join(model):
        for step in range(5 - 2 * dist.get_rank()):
            optimizer.zero_grad()
            draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
            torch.autograd.backward(model(torch.randn(16, 64, generator=draws)).square().mean())
            optimizer.step()
    assert len(engine_of(sync).buckets.plans) > 1
    assert are_alike(module.parameters())
    variant = registry.Variant("AroundTrend()", AroundTrend(), is_priced=True)
    entry = registry.Registered("toy", AroundTrend, (variant,))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "REGISTRY", (*registry.REGISTRY, entry))
        predictions = thinwire.advise(
            copy.deepcopy(module), one_step, Probe(2, "gloo", "cpu", TIMINGS, [], []), budget_seconds=0.3
        ).predictions
    assert sync.stats().steps == 5
    assert sync.stats().compression_ratio > 3.5
    assert "AroundTrend()" in [prediction.name for prediction in predictions]


TIMINGS = [Timing(size, [0.001 + size / 1e6]) for size in (4, 1 << 20, 1 << 24)]


def one_step(model: nn.Module) -> None:
    torch.autograd.backward(model(torch.ones(16, 64)).square().mean())
