"""SparseLoCo: local SGD whose changes travel as their largest entries."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from members import Member, in_each_member, once
from reference_topk import Reference
from thinwire import TopK
from training import batch_of, flat, new_model, train_step

NUM_AVERAGINGS, EVERY_STEPS = 3, 3
SETTINGS: dict[str, Any] = {"density": 1 / 20, "bits": 2, "chunk": 300, "error_decay": 0.9}


@pytest.mark.parametrize(("size", "merge"), [(2, "members"), (3, "senders")])
@in_each_member()
def test_sparseloco_against_a_plain_reference(member: Member, merge: Any) -> None:
    expected = _by_itself(member.size, merge)
    member.take(new_model(dtype=torch.float64))
    start = flat(member.model)
    member.optimizer = torch.optim.AdamW(member.model.parameters(), lr=1e-2)
    algorithm, outer = TopK(**SETTINGS, merge=merge), partial(torch.optim.SGD, lr=1)
    with member.local(every_steps=EVERY_STEPS, algorithm=algorithm, outer=outer) as local:
        member.train(NUM_AVERAGINGS * EVERY_STEPS)
    assert (expected - start).norm() > 0.1
    assert (flat(member.model) - expected).norm() < 1e-10
    assert member.agreed()
    assert local.stats().compression_ratio > 10 * EVERY_STEPS


@once
def _by_itself(num_workers: int, merge: str) -> Tensor:
    """The paper's algorithm on one vector of parameters, in float64."""
    workers = [new_model(dtype=torch.float64) for _ in range(num_workers)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=1e-2) for worker in workers]
    sizes = [each.numel() for each in workers[0].parameters()]
    reference = Reference(sizes, num_workers, **SETTINGS, merge=merge)
    theta = flat(workers[0])
    for averaging in range(NUM_AVERAGINGS):
        for place, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            nn.utils.vector_to_parameters(theta.clone(), worker.parameters())
            for step in range(averaging * EVERY_STEPS, (averaging + 1) * EVERY_STEPS):
                train_step(worker, optimizer, batch_of(step, place).double())
        changes = np.stack([(flat(worker) - theta).numpy() for worker in workers])
        theta = theta + torch.from_numpy(reference.average(changes))
    return theta
