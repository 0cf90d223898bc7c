"""An algorithm of a user's own goes everywhere that Thinwire's own go, though nothing of Thinwire knows it.

The conformance suite runs it with the others (catalog.py), and so do the tests of saved state, of steps that
are not finite and of `host_check`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import members
import thinwire
from processes import in_each_process
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
def test_under_ddp_with_uneven_batches() -> None:
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
    assert sync.stats().steps == 5
    assert sync.stats().compression_ratio > 3.5
